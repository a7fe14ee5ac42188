"""Partial rows of `_frontiers` read as the full rows that they replace."""

from __future__ import annotations

import shutil
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.errors import SwitchedError, UnavailableError
from cdc.events import LSN
from lockstep.conformance.store import applied
from lockstep.sinks.contract import Applied
from lockstep.sinks.delta import frontier_rows
from lockstep.sinks.delta import frontiers as delta_frontiers
from lockstep.sinks.delta.frontier_rows import FrontierRow, as_columns
from lockstep.sinks.delta.frontier_tail import FrontierTail
from lockstep.sinks.delta.frontiers import FrontierTable
from tests.fixtures.seeds import examples, first_seed

ROUNDS = examples(3)
STEPS = 50
KEPT_HOURS = 3
Place = tuple[int, int, int]


class Model:
    """What a table of full rows would have."""

    def __init__(self, path: Path, chance: Random) -> None:
        self.path, self.chance = path, chance
        self.now = datetime.now(UTC)
        self.generation, self.seq, self.lsn = 1, 0, 0
        self.versions: dict[str, int] = {}
        self.rows: dict[Place, dict[str, int]] = {}
        self.written: dict[Place, datetime] = {}
        self.copies = [self.opened(), self.opened()]

    def opened(self) -> FrontierTable:
        frontiers = FrontierTable(str(self.path), {}, {"pipeline": "shop", "follower": "lake"})
        frontiers.open(1)
        return frontiers

    def step(self) -> None:
        chance = self.chance
        which = chance.randrange(len(self.copies))
        do = chance.choices(
            (self.commit, self.tidy, self.restart, self.older, self.switch), (12, 2, 1, 2, 0.3)
        )[0]
        try:
            do(which)
        except SwitchedError:
            self.restart(which)

    def commit(self, which: int) -> None:
        """Commit a cut that changes some mirrors or none, with or without `begin`."""
        chance, copy = self.chance, self.copies[which]
        # Time passes from frontier to frontier, at one seq if there was no event.
        seq = self.seq + chance.randint(0, 2)
        if chance.random() < 0.7:
            copy.begin(seq)
        versions = dict(self.versions)
        for _ in range(chance.choice((0, 0, 1, 2, 9))):
            versions[f"public.t{chance.randrange(20)}"] = seq + 100
        at = self.at(seq, self.lsn + 1)
        if copy.commit(at, versions):
            self.seq, self.lsn, self.versions = seq, self.lsn + 1, versions
            self.add(FrontierRow(self.generation, at, versions))

    def at(self, seq: int, lsn: int) -> Applied:
        return applied(seq, generation=self.generation)._replace(lsn=LSN(lsn))

    def add(self, row: FrontierRow) -> None:
        place = row.generation, row.applied.seq, int(row.applied.lsn)
        self.rows[place], self.written[place] = dict(row.versions), self.now

    def tidy(self, which: int) -> None:
        """Delete old rows; the newest of them is the state at the start of the time kept."""
        self.copies[which].tidy(KEPT_HOURS)
        left = set(self.places())
        old = sorted(
            place
            for place, at in self.written.items()
            if place[0] == self.generation and at < self.now - timedelta(hours=KEPT_HOURS)
        )
        # If another copy was first, it is left for the next time.
        assert self.rows.keys() - left in (set(old[:-1]), set())
        for place in self.rows.keys() - left:
            del self.rows[place], self.written[place]

    def restart(self, which: int) -> None:
        self.copies[which] = self.opened()

    def older(self, _: int) -> None:
        self.now += timedelta(hours=self.chance.choice((1, 4)))

    def switch(self, which: int) -> None:
        if not self.rows:
            return
        copy, self.generation = self.copies[which], self.generation + 1
        copy.find()
        at = self.at(self.seq, self.lsn)
        row = FrontierRow(self.generation, at, dict.fromkeys(self.versions, 1))
        self.versions = dict(row.versions)
        copy.switch(row, self.seq)
        self.add(row)

    def places(self) -> list[Place]:
        table = DeltaTable(self.path / "_frontiers").to_pyarrow_table()
        return [(each["generation"], each["seq"], each["lsn"]) for each in table.to_pylist()]

    def check(self) -> None:
        """Compare every row, however it is looked up."""
        table = DeltaTable(self.path / "_frontiers")
        assert sorted(self.places()) == sorted(self.rows)
        found = frontier_rows.rows(table, "is_whole")
        seen = {(row.generation, row.applied.seq, int(row.applied.lsn)): row for row in found}
        assert {place: row.versions for place, row in seen.items()} == self.rows
        place = max(self.rows)
        newest = frontier_rows.as_of(table, LSN(place[2]), None)
        assert newest is not None
        assert newest.versions == self.rows[place]
        assert self.opened().newest == newest


@pytest.mark.parametrize("few", [False, True])
def test_partial_rows_read_as_the_full_rows_that_they_replace(
    monkeypatch: pytest.MonkeyPatch, *, few: bool
) -> None:
    """With two copies, restarts, upkeep and switches; `few` rows depend on each full row."""
    monkeypatch.setattr(delta_frontiers, "PARTIAL_ROWS", 3 if few else 100)
    first = first_seed("LOCKSTEP_DELTA_FRONTIERS")
    partial = 0
    for seed in range(first, first + ROUNDS):
        with TemporaryDirectory() as lake:
            model = Model(Path(lake), Random(seed))
            monkeypatch.setattr(delta_frontiers, "now", lambda model=model: model.now)
            for _ in range(STEPS):
                model.step()
                if model.rows and model.chance.random() < 0.2:
                    model.check()
            model.check()
            versions = DeltaTable(Path(lake, "_frontiers")).to_pyarrow_table()["versions"]
            partial += versions.null_count
    assert partial, "the rounds had partial rows"


def test_a_reader_of_the_commits_finds_the_newest_row_and_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was committed since its last look, and where one has failed."""
    monkeypatch.setattr(delta_frontiers, "PARTIAL_ROWS", 5)
    for seed in range(first_seed(), first_seed() + ROUNDS):
        with TemporaryDirectory() as lake:
            model = Model(Path(lake), Random(seed))
            monkeypatch.setattr(delta_frontiers, "now", lambda model=model: model.now)
            often, seldom = FrontierTail(lake, {}), FrontierTail(lake, {})
            for _ in range(STEPS):
                model.step()
                if model.chance.random() < 0.3:
                    _fail_to_load(often)
                _check_tail(model, often)
                if model.chance.random() < 0.2:
                    _check_tail(model, seldom)


def _fail_to_load(tail: FrontierTail) -> None:
    """Look while the storage is away, if the table is to be loaded."""

    def away(*_: object) -> None:
        raise UnavailableError("the storage is away", hint="")

    with pytest.MonkeyPatch.context() as patched, suppress(UnavailableError):
        patched.setattr(frontier_rows, "as_of", away)
        tail.newest()


def _check_tail(model: Model, tail: FrontierTail) -> None:
    newest = tail.newest()
    assert (newest is None) == (not model.rows)
    if newest is None:
        return
    place = max(model.rows)
    assert (newest.generation, newest.applied.seq, newest.applied.lsn) == place
    assert newest.versions == model.rows[place]
    _, seq, lsn = other = model.chance.choice(sorted(model.rows))
    found = tail.at(model.at(seq, lsn))
    assert found is not None
    at_it = [each for each in model.rows if each[1:] == other[1:]]
    assert found.versions == model.rows[max(at_it)]
    made_from = model.at(seq, lsn)._replace(mirror_generation=other[0])
    found = tail.at(made_from)
    assert found is not None
    assert found.versions == model.rows[other]
    assert tail.at(made_from._replace(mirror_generation=model.generation + 1)) is None
    assert tail.at(model.at(seq, 1 << 40)) is None


def test_a_reader_loads_no_table_for_rows_that_were_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontiers = Model(tmp_path, Random(1)).copies[0]
    assert frontiers.commit(applied(1), {"public.a": 1, "public.b": 1, "public.c": 1})
    tail = FrontierTail(str(tmp_path), {})
    for seq in range(2, delta_frontiers.PARTIAL_ROWS + 9):
        frontiers.begin(seq)
        versions = {"public.a": seq, "public.b": 1, "public.c": 1}
        if seq == 4:  # it knows the full row that those before it depend on
            monkeypatch.setattr(FrontierTail, "table", lambda _: pytest.fail("it is loaded"))
        assert frontiers.commit(applied(seq), versions)
        newest = tail.newest()
        assert newest is not None
        assert newest.versions == versions
        assert tail.at(applied(seq - 1)) is not None


def test_a_reader_finds_the_row_of_the_generation_that_its_store_was_made_from(
    tmp_path: Path,
) -> None:
    """A mirror was rebuilt up to the same frontier: it may have other rows there."""
    frontiers = Model(tmp_path, Random(1)).copies[0]
    assert frontiers.commit(applied(1), {"public.t": 1})
    followed = FrontierTail(str(tmp_path), {})
    followed.newest()
    frontiers.switch(FrontierRow(2, applied(1, generation=2), {"public.t": 2}), 1)
    followed.newest()
    for tail in (followed, FrontierTail(str(tmp_path), {})):
        found = {
            generation: tail.at(applied(1)._replace(mirror_generation=generation))
            for generation in (0, 1, 2, 3)
        }
        assert {at: row and row.versions["public.t"] for at, row in found.items()} == {
            0: 2, 1: 1, 2: 2, 3: None,
        }  # fmt: skip


def test_a_reader_notices_a_table_that_was_deleted_or_replaced(tmp_path: Path) -> None:
    """Also by one with as many commits."""
    tail = FrontierTail(str(tmp_path), {})
    assert tail.newest() is None
    for first in (10, 20):
        frontiers = Model(tmp_path, Random(1)).copies[0]
        for seq in (1, 2):
            assert frontiers.commit(applied(seq), {"public.t": first + seq})
        newest = tail.newest()
        assert newest is not None
        assert newest.versions == {"public.t": first + 2}
        shutil.rmtree(tmp_path / "_frontiers")
    assert tail.newest() is None


def test_a_writer_notices_a_restored_table_with_as_many_commits(tmp_path: Path) -> None:
    """A row has what the table has, not what the writer knows of versions that are lost."""
    path, kept = tmp_path / "lake", tmp_path / "kept"
    slow, other = Model(path, Random(1)).copies
    assert slow.commit(applied(1), {"public.a": 1, "public.b": 1, "public.c": 1})
    shutil.copytree(path, kept)
    assert slow.commit(applied(2), {"public.a": 1, "public.b": 1, "public.c": 2})
    shutil.rmtree(path)
    shutil.copytree(kept, path)
    other.open(1)
    assert other.commit(applied(2), {"public.a": 2, "public.b": 1, "public.c": 1})
    slow.begin(3)
    assert slow.newest == other.newest
    assert slow.commit(applied(3), {"public.a": 2, "public.b": 3, "public.c": 1})
    newest = FrontierTail(str(path), {}).newest()
    assert newest is not None
    assert newest.versions == {"public.a": 2, "public.b": 3, "public.c": 1}


def test_a_table_of_full_rows_only_is_continued(tmp_path: Path) -> None:
    """As an older release wrote it, without the columns of partial rows."""
    old = FrontierTable(str(tmp_path), {}, {"pipeline": "shop", "follower": "lake"})
    with pytest.MonkeyPatch.context() as patched:
        partial = ("changed", "full_seq", "full_lsn")
        fields = [field for field in frontier_rows.ARROW if field.name not in partial]
        patched.setattr(delta_frontiers, "ARROW", pa.schema(fields))
        types = {n: kind for n, kind in frontier_rows.TYPES.items() if n not in partial}
        patched.setattr(delta_frontiers, "TYPES", types)
        old.open(1)
        every = {f"public.t{number}": 1 for number in range(10)}
        assert old.commit(applied(1), every)
    table = DeltaTable(tmp_path / "_frontiers")
    assert "changed" not in table.to_pyarrow_table().column_names
    assert [row.versions for row in frontier_rows.rows(table, "seq = 1")] == [every]
    new = FrontierTable(str(tmp_path), {}, {"pipeline": "shop", "follower": "lake"})
    new.open(1)
    for seq in (2, 3):
        every = {**every, "public.t0": seq}
        new.begin(seq)
        assert new.commit(applied(seq), every)
    new.tidy(KEPT_HOURS)
    table = DeltaTable(tmp_path / "_frontiers")
    found = frontier_rows.rows(table, "is_whole")
    assert {row.applied.seq: row.versions["public.t0"] for row in found} == {1: 1, 2: 2, 3: 3}
    assert as_columns(found[0], datetime.now(UTC))["changed"] is None
