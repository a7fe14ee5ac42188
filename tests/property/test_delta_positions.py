"""Histories and tables without a key: by positions the rows are those that merges leave."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from lockstep.conformance.store import VALUES, apply
from lockstep.sinks.contract import Change, Changes, Version
from lockstep.sinks.delta import layout, log, positions, vectors
from lockstep.sinks.delta.keys import hashes
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.seeds import examples, first_seed
from tests.property.test_delta_appliers import BIG, ODD_DAYS, TABLES, WIDER, seen
from tests.property.test_delta_stats import read

HOWS = ("delta-rs", "vectors")
LOOSE = Version(6, "public", "loose", "shop.public.loose", (), BIG, VALUES)
Row = dict[str, Any]
Cut = tuple[int, Changes]  # with its last seq


def opened(path: Path, how: str, history: frozenset[str]) -> DeltaSink:
    sink = DeltaSink(
        DeltaSettings("shop", "m", "shop", str(path / how), history=history, applier=how)
    )
    sink.open()
    return sink


class Rows:
    """Random changes of a table: every version of each row, or of rows without a key."""

    def __init__(self, chance: Random, version: Version) -> None:
        self.chance, self.version, self.seq = chance, version, 0
        self.now: list[Row] = []  # several may be equal

    def row(self) -> Row:
        chance = self.chance
        row: Row = {
            "id": chance.randint(1, 6),
            "at": chance.choice(ODD_DAYS),
            "body": chance.choice([None, "", "a\x01b", "x" * 40]),
            "many": chance.choice([None, [1, None], [[1], [2]], []]),
            "n": chance.choice([None, "NaN", "1.25"]),
            "f": chance.choice([None, 0.0, -0.0, "NaN"]),
        }
        if self.version.columns is WIDER:
            row["later"] = chance.choice([None, None, 7])
        return row

    def cut(self) -> Changes:
        truncated = None
        if self.chance.random() < 0.1:
            self.seq += 1
            truncated, self.now = self.seq, []
        changes = [self.change() for _ in range(self.chance.randint(1, 9))]
        if truncated and self.version.key:
            lost = Change(None, truncated, None, *self.place(truncated), op="t")
            changes.insert(0, lost)
        return Changes((self.version,), changes, truncated)

    def change(self) -> Change:
        self.seq += 1
        key, row, place = self.version.key, self.row(), self.place(self.seq)
        same = [each for each in self.now if key and all(each[name] == row[name] for name in key)]
        before = same[0] if same else self.chance.choice([None, *self.now])
        if key and not same:
            before = None
        if before is not None:
            self.now.remove(before)
        if before is not None and self.chance.random() < 0.4:
            return self.sent(before, None, before, place)
        sent = dict(row)
        unchanged: tuple[str, ...] = ()
        if before is not None and self.chance.random() < 0.4:
            unchanged = ("body",)
            row["body"], sent["body"] = before["body"], "?"
        self.now.append(row)
        return self.sent(row, sent, before, place, unchanged)

    def sent(
        self,
        row: Row,
        sent: Row | None,
        before: Row | None,
        place: tuple[int, int, int],
        unchanged: tuple[str, ...] = (),
    ) -> Change:
        key = {name: row[name] for name in self.version.key}
        return Change(
            msgspec.json.encode(key) if key else None,
            self.seq,
            None if sent is None else msgspec.json.encode(sent),
            *place,
            unchanged,
            before=None if before is None or key else msgspec.json.encode(before),
            op="d" if sent is None else "u",
        )

    def place(self, seq: int) -> tuple[int, int, int]:
        # Two of them share a transaction.
        return self.version.schema_id, 1_000 + seq // 2, 1_700_000_000_000_000 + seq // 2


def optimize(path: Path) -> None:
    """Another writer's compaction, which moves every row."""
    table = DeltaTable(path)
    table.optimize.compact()


class Kept:
    """A copy of a lake, which takes its place once."""

    def __init__(self, lake: Path, copy: Path) -> None:
        self.lake, self.copy, self.cuts = lake, copy, 0

    def copy_or_restore(self, sink: DeltaSink, cuts: list[Cut]) -> None:
        """Copy the lake after these cuts; if that was done, restore it, and apply those since."""
        if not self.cuts:
            shutil.copytree(self.lake, self.copy)
            self.cuts = len(cuts)
            return
        shutil.rmtree(self.lake)
        self.copy.rename(self.lake)
        sink.open()
        for each in cuts[self.cuts :]:
            apply(sink, *each)
        self.cuts = 0


# The other kinds of keys are in the sample of test_delta_appliers.
@pytest.mark.long("keys of other kinds", sample=["loose", "pair", "odd"])
@pytest.mark.parametrize("table", ["loose", *TABLES])
def test_by_positions_as_by_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """A wider version, restarts, compaction by others, a restored lake, files that are joined."""
    monkeypatch.setattr(vectors, "FILES_OF_A_SIZE", 3)
    version = TABLES.get(table, LOOSE)
    history = frozenset({version.name}) if version.key else frozenset()
    first = first_seed("LOCKSTEP_DELTA_ROUNDS")
    for seed in range(first, first + examples(2)):
        path, rows = tmp_path / str(seed), Rows(Random(seed), version)
        sinks = {how: opened(path, how, history) for how in HOWS}
        cuts = list[Cut]()
        kept = {how: Kept(path / how, path / f"{how} kept") for how in HOWS}
        for turn in range(10):
            if turn == 5:
                rows.version = version._replace(schema_id=16, columns=WIDER)
            cut = rows.cut()
            cuts.append((rows.seq, cut))
            for how in HOWS:
                what = rows.chance.random()
                if what < 0.2:
                    sinks[how].close()
                    sinks[how] = opened(path, how, history)
                elif what < 0.4 and turn:
                    optimize(path / how / f"public.{version.table}")
                elif what < 0.8 and turn:
                    kept[how].copy_or_restore(sinks[how], cuts[:turn])
                apply(sinks[how], *cuts[turn])
            one, other = (
                without_seqs(seen(str(path / how), version.table), version) for how in HOWS
            )
            assert one == other
            if not version.key:
                assert sum(one.values()) == len(rows.now)
            has_true_stats(path / "vectors" / f"public.{version.table}")
        for sink in sinks.values():
            sink.close()


def without_seqs(rows: list[str], version: Version) -> Counter[str]:
    """Of equal rows without a key any one may be deleted: their seqs and times do not count."""
    if version.key:
        return Counter(rows)
    ours = ("_seq", "_commit_lsn", "_committed_at")
    return Counter(
        "".join(part for part in each.split("('") if not part.startswith(ours)) for each in rows
    )


def has_true_stats(path: Path) -> None:
    """Assert that each file has complete statistics that hold for the rows that are read."""
    table = DeltaTable(path)
    for add in log.added(table).values():
        stats = json.loads(add["stats"])
        rows = pq.read_table(path / add["path"])
        assert stats["numRecords"] == rows.num_rows
        assert stats["nullCount"].keys() >= {layout.SEQ, "id"}
        assert stats["minValues"][layout.SEQ] <= stats["maxValues"][layout.SEQ]
        assert stats.get("tightBounds", True) == (not add.get("deletionVector"))
        for name, count in stats["nullCount"].items():
            assert isinstance(count, dict) or count == rows[name].null_count
        for name in stats["minValues"]:
            kind = rows.schema.field(name).type
            least, most = (read(stats[each][name], kind) for each in ("minValues", "maxValues"))
            if isinstance(most, datetime):
                most += timedelta(microseconds=999)  # delta-rs truncates it; readers know
            for value in (each for each in rows[name].to_pylist() if each is not None):
                is_nan = value != value  # noqa: PLR0124 - delta-rs leaves it out of bounds
                assert is_nan or least <= value <= most, name


NAMES = st.sampled_from(["a", "b", "c"])


@given(
    one=st.dictionaries(NAMES, st.text(max_size=3)),
    other=st.dictionaries(NAMES, st.text(max_size=3)),
)
def test_rows_have_one_hash_if_they_are_equal(one: dict[str, str], other: dict[str, str]) -> None:
    """A column that is missing is NULL."""
    rows = pa.table(
        {name: pa.array([one.get(name), other.get(name)], pa.string()) for name in "abc"}
    )
    first, second = hashes(rows).to_pylist()
    assert (first == second) == (one == other)
    assert hashes(rows.slice(0, 1).select(sorted(one) or ["a"])).to_pylist() == [first]


@given(
    size=st.integers(1, 300),
    before=st.sets(st.integers(0, 299)),
    more=st.lists(st.integers(0, 299), max_size=8),
)
def test_deleted_rows_are_united(size: int, before: set[int], more: list[int]) -> None:
    deleted = pa.array([row in before for row in range(size)])
    rows = pa.array([row for row in more if row < size], pa.int32())
    for part in (deleted, pa.concat_arrays([pa.array([True] * 3), deleted]).slice(3)):
        found = positions.with_deleted(part, rows)
        assert found.to_pylist() == [row in before or row in more for row in range(size)]
