"""The difference of two versions by their files equals that of their complete rows."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.events import LSN
from lockstep.conformance.store import USERS, WIDER, change, row
from lockstep.jobs.documents.mirror import MirrorTables, MirrorVersion
from lockstep.jobs.documents.rows import NodeRows
from lockstep.jobs.views.states import TableStates
from lockstep.sinks.contract import Applied, Changes
from lockstep.sinks.delta import actions, lake, layout, plain, roaring
from lockstep.sinks.delta.opened_tables import OpenedTables
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.delta.stored_files import StoredFiles, live_rows
from lockstep.sinks.documents import DocumentNode, Row, Term
from tests.fixtures.seeds import examples, first_seed

_KEYS: Final = ("id", layout.SEQ)
_MAGIC: Final = 1_681_511_377
# A child's rows are found by their `name`, which each change sets.
_NODE: Final = DocumentNode("users", "public.users", ("id",), (), by=(("name", "name"),))


# -- deletion vectors ---------------------------------------------------------------------------


@given(st.sets(st.integers(0, 200_000), max_size=300), st.booleans(), st.integers(0, 70))
@settings(max_examples=50)
def test_our_deletion_vectors_are_read_as_they_were_written(
    rows: set[int],
    full: bool,  # noqa: FBT001 - drawn
    skipped: int,
) -> None:
    if full:  # a container that is a bitmap
        rows |= set(range(65_536, 75_000))
    bits = pa.array([number in rows for number in range(200_001)]).slice(skipped)
    wanted = sorted(number - skipped for number in rows if number >= skipped)
    assert roaring.decoded(actions.roaring_bitmap(bits)).to_pylist() == wanted


def test_other_writers_vectors_with_runs_are_read() -> None:
    """Two containers with a run, a list and a bitmap of 64-bit keys, as the specification has."""
    head = struct.pack("<IQ", _MAGIC, 2)
    runs = struct.pack("<I", 12_347 | 1 << 16) + b"\x01"  # two containers, the first has runs
    runs += struct.pack("<HHHH", 0, 2 + 1, 3, 1)
    runs += struct.pack("<HHHHH", 2, 5, 1, 100, 1)  # 5, 6 and 100, 101
    runs += struct.pack("<HH", 1, 9)
    first = struct.pack("<I", 0) + runs
    second = struct.pack("<I", 1) + struct.pack("<II", 12_346, 1)
    second += struct.pack("<HHIH", 0, 0, 16, 7)
    found = roaring.decoded(head + first + second).to_pylist()
    assert found == [5, 6, 100, 101, (3 << 16) + 1, (3 << 16) + 9, (1 << 32) + 7]


# -- histories ----------------------------------------------------------------------------------


class Mirror:
    """A mirror that is changed, rewritten, cleaned up and altered at random."""

    def __init__(self, path: Path, chance: Random, applier: str, *, soft: bool) -> None:
        self.path, self.chance = layout.path(str(path), "shop", USERS.topic), chance
        self.version, self.seq = USERS, 0
        self.files = StoredFiles()  # of one reader, whichever versions it compares
        self.sink = DeltaSink(
            DeltaSettings("t", "lake", "shop", str(path), applier=applier, soft=soft)
        )
        self.sink.open()
        self.change()

    def step(self) -> None:
        """Do one thing to the mirror, mostly write to it."""
        table = DeltaTable(self.path)
        match self.chance.choices(range(5), (8, 2, 1, 1, 1))[0]:
            case 0:
                self.change()
            case 1:
                table.optimize.compact()
            case 2:
                table.optimize.z_order(["id"])
            case 3:
                table.vacuum(0, dry_run=False, enforce_retention_duration=False)
            case 4:
                self.version = WIDER

    def change(self) -> None:
        """Write some rows and delete some; now and then, truncate."""
        chance, changes, truncated = self.chance, [], None
        if chance.random() < 0.08:
            self.seq += 1
            truncated = self.seq
        for number in chance.sample(range(40), chance.randint(1, 12)):
            self.seq += 1
            new = None if chance.random() < 0.3 else row(self.version, self.seq, number)
            changes.append(change(self.version, self.seq, new, number))
        self._write(Changes((self.version,), changes, truncated))

    def write(self, number: int) -> None:
        """Write one row."""
        self.seq += 1
        new = row(self.version, self.seq, number)
        self._write(Changes((self.version,), [change(self.version, self.seq, new, number)]))

    def _write(self, changes: Changes) -> None:
        self.sink.begin(self.seq, [self.version])
        self.sink.write(changes)
        self.sink.commit(Applied("t", 1, 1, LSN(self.seq), self.seq, self.seq, 1, {}))

    def at(self, version: int) -> MirrorTables:
        place = MirrorVersion(self.path, version)
        rows = {_NODE: NodeRows(_NODE, self.version)}
        return MirrorTables({_NODE.table: place}, rows, files=self.files)


def _shown(rows: Iterable[Row]) -> list[tuple[bytes, Term]]:
    return sorted((each.key, each.terms["name"]) for each in rows)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("applier", ["delta-rs", "vectors"])
def test_the_difference_by_files_is_that_of_complete_tables(
    tmp_path: Path, applier: str, *, soft: bool
) -> None:
    """Between any two versions: with OPTIMIZE, VACUUM and added columns between them."""
    by_files, rounds = 0, examples(6)
    for seed in range(first_seed(), first_seed() + rounds):
        chance = Random(seed)
        mirror = Mirror(tmp_path / str(seed), chance, applier, soft=soft)
        with closing(mirror.sink):
            for _ in range(12):
                mirror.step()
        last = DeltaTable(mirror.path).version()
        for _ in range(12):
            first, second = sorted(chance.sample(range(last + 1), 2))
            before, after = mirror.at(first), mirror.at(second)
            try:
                found = before.lacking(_NODE, after), after.lacking(_NODE, before)
                complete = [_shown(each) for each in found]
            except (DeltaError, pa.ArrowException):
                continue  # VACUUM has deleted files of the earlier version
            quick = after.by_files(_NODE, before)
            if quick is not None:
                by_files += 1
                assert [_shown(each) for each in quick] == complete, (seed, first, second)
    assert by_files > rounds


def test_a_row_that_others_moved_and_a_cut_copied_is_not_lost(tmp_path: Path) -> None:
    """It is in three files: that of its cut, of OPTIMIZE, and of a cut that rewrote that one."""
    mirror = Mirror(tmp_path, Random(1), "delta-rs", soft=False)
    with closing(mirror.sink):
        mirror.write(100)
        first = DeltaTable(mirror.path).version()
        mirror.write(101)
        DeltaTable(mirror.path).optimize.compact()
        mirror.write(100)
    found = mirror.at(DeltaTable(mirror.path).version()).by_files(_NODE, mirror.at(first))
    assert found is not None
    old, new = ([each.key for each in side] for side in found)
    assert old == [b'{"id":100}']
    assert sorted(new) == [b'{"id":100}', b'{"id":101}']


@pytest.mark.parametrize("most_bytes", [0, 2_000, 1 << 20], ids=["none", "some", "all"])
@pytest.mark.parametrize("applier", ["delta-rs", "vectors"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_rows_by_columns_that_are_kept_are_those_of_complete_tables(
    tmp_path: Path, applier: str, most_bytes: int, *, soft: bool
) -> None:
    """Of both versions around each step, however much of them is in memory."""
    found_here, rounds = 0, examples(3)
    for seed in range(first_seed(), first_seed() + rounds):
        chance, files = Random(seed), StoredFiles(most_bytes)
        mirror = Mirror(tmp_path / str(seed), chance, applier, soft=soft)
        with closing(mirror.sink):
            before, opened = DeltaTable(mirror.path), OpenedTables({})
            for _ in range(12):
                old = _keys_of(before)
                mirror.step()
                after = DeltaTable(mirror.path)
                was, now = (MirrorVersion(mirror.path, each.version()) for each in (before, after))
                spark: Any = None  # nothing is registered
                states = TableStates(spark, mirror.version, was, now, opened, files)
                wanted = {*chance.sample(range(40), 6)}
                tests = [("id", pa.array(wanted, pa.int32()))]
                rows = states.among(tests, {"name"}, 1_000)
                before = after
                if rows is None:
                    continue  # VACUUM has deleted files of the earlier version, or columns differ
                found_here += len(rows.new)
                sides = (rows.old, old), (rows.new, _keys_of(after))
                for side, every in sides:
                    shown = sorted(zip(*(side[name].to_pylist() for name in _KEYS), strict=True))
                    assert shown == [each for each in every if each[0] in wanted], seed
                complete = states.among([], {"name"}, 1_000)
                assert complete is not None
                assert complete.new.num_rows == len(sides[1][1])
                assert _kept_bytes(files) <= most_bytes
    assert found_here > rounds


def test_a_kept_column_that_has_another_type_now_is_read_again(tmp_path: Path) -> None:
    mirror, files = Mirror(tmp_path, Random(1), "vectors", soft=False), StoredFiles()
    with closing(mirror.sink):
        table = DeltaTable(mirror.path)
        (path,) = files.follow(table)
        (group,) = files.groups(table, path)
        for kind in (pa.int64(), pa.string(), pa.int64()):
            read = group.read(pa.schema([("id", kind)]))
            assert (read.num_rows, read.schema.field("id").type) == (group.rows, kind)
            assert _kept_bytes(files) == read.nbytes


def _kept_bytes(files: StoredFiles) -> int:
    kept: int = sum(each.nbytes for of_file in files.kept.values() for each in of_file.values())
    assert kept == files.bytes
    return kept


def _keys_of(table: DeltaTable) -> list[tuple[int, int]]:
    """Return the live rows' keys and seqs."""
    rows = live_rows(lake.read(table, lake.arrow_schema(table).names))
    return sorted(zip(*(rows[name].to_pylist() for name in _KEYS), strict=True))


@pytest.mark.parametrize("applier", ["delta-rs", "vectors"])
def test_a_versions_files_without_their_deleted_rows_are_its_rows(
    tmp_path: Path, applier: str
) -> None:
    without_rows = 0
    for seed in range(first_seed(), first_seed() + 2):
        mirror = Mirror(tmp_path / str(seed), Random(seed), applier, soft=False)
        with closing(mirror.sink):
            for _ in range(8):
                mirror.step()
                table = DeltaTable(mirror.path)
                found = plain.plain_files(table)
                assert found is not None
                without_rows += found.deleted.num_rows
                rows = lake.read(table, ["id", layout.SEQ])
                assert sorted(map(str, rows.to_pylist())) == _by_files(found)
    assert (without_rows > 0) == (applier == "vectors")


def _by_files(files: plain.PlainFiles) -> list[str]:
    """Return the rows that Spark reads of the files."""
    found = []
    for uri in files.uris:
        path = Path(uri.removeprefix("file://"))
        is_of_it = pc.equal(files.deleted["file"], path.name)
        missing = {*files.deleted.filter(is_of_it)["row"].to_pylist()}
        rows = pq.ParquetFile(path).read(["id", layout.SEQ]).to_pylist()
        found += [str(row) for number, row in enumerate(rows) if number not in missing]
    return sorted(found)


def test_a_rewrite_shows_no_difference_and_reads_no_file(tmp_path: Path) -> None:
    """OPTIMIZE only rearranges rows, so the files that it wrote need not exist."""
    mirror = Mirror(tmp_path, Random(1), "vectors", soft=False)
    with closing(mirror.sink):
        for _ in range(3):
            mirror.change()
        first = DeltaTable(mirror.path).version()
        DeltaTable(mirror.path).optimize.compact()
    second = DeltaTable(mirror.path)
    assert second.version() > first
    after = mirror.at(second.version())
    after.open(_NODE.table)
    for path in second.file_uris():
        Path(path.removeprefix("file://")).unlink()
    assert after.by_files(_NODE, mirror.at(first)) == ([], [])
