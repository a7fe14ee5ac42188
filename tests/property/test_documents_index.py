"""A mirror's rows that are found by an index of its files are those that a query finds.

Random tables of every kind of type, random versions of them, and values that are in them or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from hypothesis import given
from hypothesis import strategies as st

from cdc.events import LSN
from lockstep.conformance.store import VALUES
from lockstep.jobs.documents.mirror import MirrorTables, MirrorVersion
from lockstep.jobs.documents.rows import NodeRows
from lockstep.sinks.contract import Applied, Change, Changes, Column, Version
from lockstep.sinks.delta import column_index, lake, layout
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.delta.stored_files import StoredFiles
from lockstep.sinks.documents import DocumentNode, Row, Term, Terms
from tests.fixtures.seeds import examples, first_seed

_EPOCH: Final = date(1970, 1, 1)


def _column(name: str, kind: str, type_id: int, modifier: int = -1) -> Column:
    return Column(name, kind, type_id, modifier, nullable=name != "id")


_ADDED: Final = _column("extra", "int4", 23)
_COLUMNS: Final = (
    _column("id", "int8", 20),
    _column("small", "int2", 21),
    _column("code", "text", 25),
    _column("price", "numeric", 1700, (10 << 16 | 2) + 4),
    _column("large", "numeric", 1700, (30 << 16) + 4),
    _column("number", "numeric", 1700),
    _column("day", "date", 1082),
    _column("flag", "bool", 16),
    _column("ratio", "float8", 701),
    _column("at", "timestamptz", 1184),
)
_NAMES: Final = tuple(each.name for each in _COLUMNS)
_FEW: Final = 6  # values of a column, so that rows have them in common


def _version(*more: Column) -> Version:
    topic = "shop.public.things"
    return Version(1 + len(more), "public", "things", topic, ("id",), (*_COLUMNS, *more), VALUES)


def _node(version: Version) -> DocumentNode:
    names = tuple(each.name for each in version.columns)
    return DocumentNode(
        "things", "public.things", ("id",), names, by=tuple((each, each) for each in names)
    )


def _row(chance: Random, version: Version, number: int) -> dict[str, Any]:
    few = chance.randrange(_FEW)
    row = {
        "id": number,
        "small": few - 2,
        "code": chance.choice(["", "a", "it's", "ü", "a\n"]),
        "price": chance.choice([f"{few}.50", "-3.00", "NaN"]),
        "large": str(few * 10**22),
        "number": chance.choice([f"{few}.0", str(few)]),
        "day": 20_000 + few,
        "flag": few % 2 > 0,
        "ratio": few / 2,
        "at": (_EPOCH + timedelta(few)).isoformat() + "T00:00:00Z",
        "extra": few,
    }
    for name in row:
        if name != "id" and chance.random() < 0.15:
            row[name] = None
    return {each.name: row[each.name] for each in version.columns}


class Things:
    """One mirror that is changed and rewritten at random."""

    def __init__(self, path: Path, chance: Random, kind: str) -> None:
        self.chance, self.version, self.seq = chance, _version(), 0
        self.path = layout.path(str(path), "shop", self.version.topic)
        history = frozenset({"public.things"} if kind == "history" else ())
        settings = DeltaSettings("t", "lake", "shop", str(path), history=history)
        applier = kind if kind in {"vectors", "delta-rs"} else "auto"
        partition = {"public.things": ["small"]} if kind == "partitioned" else {}
        self.sink = DeltaSink(
            settings._replace(applier=applier, soft=kind == "soft", partition=partition)
        )
        self.sink.open()
        self.change()

    def step(self) -> None:
        table = DeltaTable(self.path)
        match self.chance.choices(range(4), (20, 2, 1, 1))[0]:
            case 0:
                self.change()
            case 1:
                table.optimize.compact()
            case 2:
                table.vacuum(0, dry_run=False, enforce_retention_duration=False)
            case 3:
                self.version = _version(_ADDED)

    def change(self) -> None:
        changes = []
        for number in self.chance.sample(range(60), self.chance.randint(1, 12)):
            self.seq += 1
            row = None if self.chance.random() < 0.3 else _row(self.chance, self.version, number)
            changes.append(
                Change(
                    b'{"id":%d}' % number,
                    self.seq,
                    None if row is None else msgspec.json.encode(row),
                    self.version.schema_id,
                    self.seq,
                    self.seq,
                    op="d" if row is None else "u",
                )
            )
        self.sink.begin(self.seq, [self.version])
        self.sink.write(Changes((self.version,), changes))
        self.sink.commit(Applied("t", 1, 1, LSN(self.seq), self.seq, self.seq, 1, {}))

    def at(self, version: int, files: StoredFiles | None) -> MirrorTables:
        node = _node(self.version)
        places = {node.table: MirrorVersion(self.path, version)}
        return MirrorTables(places, {node: NodeRows(node, self.version)}, files=files)


def _wanted(chance: Random, columns: tuple[str, ...], rows: list[Row]) -> frozenset[Terms]:
    """Return some rows' terms, in other forms too, and some that no row has."""
    some = [row.of(columns) for row in chance.sample(rows, min(4, len(rows)))]
    found = {tuple(_formed(chance, term) for term in terms) for terms in some if terms}
    if chance.random() < 0.3:
        others: list[Term] = [1 << 70, "zz", Decimal("0.001"), date(1, 1, 1), True, ("exact", "x")]
        found.add(tuple(chance.choice(others) for _ in columns))
    return frozenset(found)


def _formed(chance: Random, term: Term) -> Term:
    """Return an equal term, as another table's column may have it."""
    if type(term) is int and chance.random() < 0.1:
        return Decimal(term)
    if isinstance(term, Decimal) and term == int(term) and chance.random() < 0.3:
        return int(term)
    return term


def _shown(rows: Iterator[Row]) -> list[str]:
    return sorted(map(repr, rows))


@pytest.mark.parametrize(
    ("kind", "most_bytes"),
    [
        *(("vectors", each) for each in (0, 3_000)),
        *((each, 1 << 20) for each in ("vectors", "delta-rs", "auto", "soft", "history")),
        ("partitioned", 1 << 20),
    ],
)
def test_rows_by_an_index_are_those_of_a_query(
    tmp_path: Path, kind: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both versions around each step, however much of them fits into memory."""
    by_index = 0
    find = StoredFiles.find

    def counted(self: StoredFiles, *of: Any) -> pa.Table | None:  # noqa: ANN401 - its own
        nonlocal by_index
        found = find(self, *of)
        by_index += found is not None
        return found

    monkeypatch.setattr(StoredFiles, "find", counted)
    for seed in range(first_seed(), first_seed() + examples(4)):
        chance, files = Random(seed), StoredFiles(most_bytes)
        things = Things(tmp_path / str(seed), chance, kind)
        with closing(things.sink):
            before = DeltaTable(things.path).version()
            for _ in range(14):
                things.step()
                after = DeltaTable(things.path).version()
                for version in (before, after):
                    _compare(chance, things, version, files)
                    assert (
                        sum(each.nbytes for of in files.kept.values() for each in of.values())
                        == files.bytes
                        <= most_bytes
                    )
                before = after
    assert (by_index > 0) == (most_bytes > 0 and kind != "partitioned")


def _compare(chance: Random, things: Things, version: int, files: StoredFiles) -> None:
    node, query = _node(things.version), things.at(version, None)
    try:
        every = list(query.every(node))
    except DeltaError:
        return  # VACUUM has deleted files of this version
    indexed = things.at(version, files)
    for _ in range(3):
        columns = tuple(chance.sample(node.columns, chance.choice([1, 1, 2])))
        wanted = _wanted(chance, columns, every)
        expected = [row for row in every if row.of(columns) in wanted]
        assert _shown(indexed.find(node, columns, wanted)) == _shown(iter(expected)), columns
        traced = _shown(query.trace(node, columns, wanted))
        assert _shown(indexed.trace(node, columns, wanted)) == traced, columns
        assert len(traced) == len(expected)


_KINDS: Final = st.sampled_from(
    [pa.int16(), pa.int64(), pa.string(), pa.date32(), pa.decimal128(18, 3), pa.decimal128(5, 0)]
)
_VALUES: Final = {
    pa.int16(): st.integers(-(1 << 15), (1 << 15) - 1) | st.integers(-2, 2),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 2),
    pa.string(): st.text(max_size=2),
    pa.date32(): st.dates() | st.dates(max_value=date(1, 1, 3)),
    pa.decimal128(18, 3): st.decimals(-(10**14), 10**14, places=3) | st.decimals(-1, 1, places=3),
    pa.decimal128(5, 0): st.integers(-99_999, 99_999).map(Decimal),
}


@given(st.data())
def test_an_index_finds_every_row_that_has_a_wanted_value(data: st.DataObject) -> None:
    """And no other; also of a slice of the values."""
    kind = data.draw(_KINDS)
    values = data.draw(st.lists(st.none() | _VALUES[kind], max_size=30))
    skipped = data.draw(st.integers(0, len(values)))
    wanted = {*data.draw(st.lists(_VALUES[kind] | st.sampled_from([*values, 1 << 65]), max_size=5))}
    wanted -= {None}
    if not pa.types.is_integer(kind) and not pa.types.is_decimal(kind):
        wanted -= {1 << 65}
    column = pa.array(values, kind).slice(skipped)
    sought = column_index.sought(kind, wanted)
    assert sought is not None
    index = column_index.index(column, pa.arange(skipped, len(values)))
    found = column_index.find([(index, sought)]).to_pylist()
    expected = [at for at, each in enumerate(values) if at >= skipped and each in wanted]
    assert sorted(found) == expected


def test_a_column_with_one_value_does_not_hide_rows_of_another() -> None:
    """As a tenant's id does, which every row of the table has."""
    rows = pa.arange(0, 10_000)
    one = column_index.index(pa.repeat(pa.scalar(7, pa.int64()), 10_000), rows)
    each = column_index.index(rows, rows)
    wanted = pa.array([5, 9], pa.int64())
    found = column_index.find([(one, pa.array([7], pa.int64())), (each, wanted)])
    assert sorted(found.to_pylist()) == [5, 9]
    assert not len(column_index.find([(one, wanted), (each, wanted)]))


def test_a_table_that_does_not_fit_gives_up_its_room(tmp_path: Path) -> None:
    """Rows of it are found by queries from then on; nothing of it stays in memory for that."""
    things = Things(tmp_path, Random(1), "vectors")
    with closing(things.sink):
        for _ in range(3):
            things.change()
    table = DeltaTable(things.path)
    tests = {"id": pa.array([1, 2, 3], pa.int64())}
    schema = lake.arrow_schema(table, ["id", "code"])
    ample = StoredFiles()
    found = ample.find(table, schema, tests)
    assert found is not None
    assert 0 < found.num_rows <= 3
    tight = StoredFiles(ample.bytes - 1)
    assert tight.find(table, schema, tests) is None
    assert tight.bytes < ample.bytes / 2
    read = {path: add["size"] for path, add in tight.follow(table).items()}
    for path in read:
        Path(table.table_uri.removeprefix("file://"), path).unlink()
    assert tight.find(table, schema, tests) is None  # and reads nothing
