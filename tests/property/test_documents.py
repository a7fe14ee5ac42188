"""Documents of random histories equal those computed by brute force at each frontier.

Parents, children and grandchildren are written, moved, deleted, given other keys and truncated;
cuts are random. Documents are changed only by what a cut contains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.config.followers import Document
from cdc.events import LSN
from lockstep.conformance.store import USERS
from lockstep.jobs.documents.kinds import DocumentKind, DocumentTables, tree
from lockstep.jobs.documents.mirror import MirrorTables, MirrorVersion
from lockstep.jobs.documents.rows import NodeRows
from lockstep.sinks.contract import Applied, Column, Version
from lockstep.sinks.delta.layout import EXACT, SEQ
from lockstep.sinks.delta.stored_files import StoredFiles
from lockstep.sinks.documents import DocumentNode, Row, Terms

Table = dict[tuple[Any, ...], tuple[int, dict[str, Any]]]  # seq and row by key
World = dict[str, Table]

_EXACT: Final = pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False))
_INT, _TEXT, _NUMERIC = ("int8", 20, -1), ("text", 25, -1), ("numeric", 1700, (10 << 16 | 2) + 4)
_ARROW: Final = {"int8": pa.int64(), "text": pa.string(), "numeric": pa.decimal128(10, 2)}
COLUMNS: Final[dict[str, dict[str, tuple[str, int, int]]]] = {
    "shop.people": {"id": _INT, "name": _TEXT},
    "shop.orders": {"id": _INT, "person": _INT, "note": _TEXT},
    "shop.items": {"order": _NUMERIC, "line": _INT, "product": _TEXT, "price": _NUMERIC},
    "shop.products": {"code": _TEXT, "name": _TEXT},
}
KEYS: Final = {
    "shop.people": ("id",),
    "shop.orders": ("id",),
    "shop.items": ("order", "line"),
    "shop.products": ("code",),
}
VERSIONS: Final = {
    name: Version(
        number,
        name.partition(".")[0],
        name.partition(".")[2],
        f"x.{name}",
        KEYS[name],
        tuple(Column(each, *kind, nullable=True) for each, kind in columns.items()),
        {},
    )
    for number, (name, columns) in enumerate(COLUMNS.items(), 1)
}
_ITEMS: Final = Document(
    table="shop.items",
    by={"order": "id"},
    columns=("line", "price"),
    order=("-price",),
    children={"product": Document(table="shop.products", by={"code": "product"}, one=True)},
)
DOCUMENTS: Final = {
    "person": Document(
        table="shop.people",
        children={
            "orders": Document(table="shop.orders", by={"person": "id"}, children={"items": _ITEMS})
        },
    ),
    "order": Document(
        table="shop.orders",
        columns=("note",),
        children={
            "items": _ITEMS,
            "buyer": Document(table="shop.people", by={"id": "person"}, one=True),
            # The same table twice, and through a column that is not a key.
            "others": Document(
                table="shop.orders", by={"person": "person"}, columns=("id",), order=("note",)
            ),
        },
    ),
}


# -- brute force ------------------------------------------------------------------------------


def _shown(value: Any) -> Any:  # noqa: ANN401 - any value of a row
    return str(value) if isinstance(value, Decimal) else value


def expected(name: str, world: World) -> dict[str, Any]:
    """Return the documents of a world, by their keys' JSON."""
    document = DOCUMENTS[name]
    return {
        json.dumps(
            {k: _shown(row[k]) for k in KEYS[document.table]}, separators=(",", ":")
        ): _document(document, row, world)
        for _, row in world[document.table].values()
    }


def _document(document: Document, row: dict[str, Any], world: World) -> dict[str, Any]:
    shown = document.columns or tuple(COLUMNS[document.table])
    if not document.by:
        shown = (*KEYS[document.table], *shown)  # always, regardless of the chosen columns
    made = {name: _shown(row[name]) for name in shown}
    for name, child in document.children.items():
        rows = [
            each
            for _, each in world[child.table].values()
            if all(each[a] == row[b] and row[b] is not None for a, b in child.by.items())
        ]
        for column in reversed([*child.order, *KEYS[child.table]]):
            rows.sort(key=partial(_rank, column.removeprefix("-")), reverse=column[0] == "-")
        below = [_document(child, each, world) for each in rows]
        made[name] = (below[0] if below else None) if child.one else below
    return made


def _rank(column: str, row: dict[str, Any]) -> tuple[bool, Any]:
    return row[column] is None, row[column]


# -- the tables of a frontier, in Arrow and in Delta ------------------------------------------


def arrow(name: str, table: Table) -> pa.Table:
    columns = {
        each: pa.array([row[each] for _, row in table.values()], _ARROW[kind[0]])
        for each, kind in COLUMNS[name].items()
    }
    seqs = pa.array([seq for seq, _ in table.values()], pa.int64())
    return pa.table({**columns, SEQ: seqs, EXACT: pa.nulls(len(table), _EXACT)})


@dataclass
class ArrowTables:
    """A simple implementation of `jobs.documents.kinds.Tables`."""

    world: World
    rows: dict[DocumentNode, NodeRows]

    def every(self, node: DocumentNode) -> Iterator[Row]:
        reader = self.rows[node]
        for batch in arrow(node.table, self.world[node.table]).to_batches():
            yield from reader.read(batch.select(reader.columns))

    def find(
        self, node: DocumentNode, columns: tuple[str, ...], wanted: frozenset[Terms]
    ) -> Iterator[Row]:
        return (row for row in self.every(node) if row.of(columns) in wanted)

    trace = find

    def difference(
        self, node: DocumentNode, since: ArrowTables
    ) -> tuple[Iterator[Row], Iterator[Row]]:
        return since.lacking(node, self), self.lacking(node, since)

    def lacking(self, node: DocumentNode, other: ArrowTables) -> Iterator[Row]:
        there = other.world[node.table]
        left = {
            key: each
            for key, each in self.world[node.table].items()
            if there.get(key, (0,))[0] != each[0]
        }
        return ArrowTables({node.table: left}, self.rows).every(node)

    def differ(self, table: str, since: ArrowTables) -> bool:
        return self.world[table] != since.world[table]


@dataclass
class Deltas:
    """Tables in Delta, with one more version wherever a frontier changed them."""

    path: Path
    places: dict[str, MirrorVersion] = field(default_factory=dict)
    last: World = field(default_factory=dict)
    files: StoredFiles = field(default_factory=StoredFiles)

    def at(self, world: World, rows: dict[DocumentNode, NodeRows]) -> MirrorTables:
        for name, table in world.items():
            if table != self.last.get(name):
                self._write(name, table)
        self.last = {name: dict(table) for name, table in world.items()}
        return MirrorTables(dict(self.places), rows, files=self.files)

    def _write(self, name: str, table: Table) -> None:
        path = str(self.path / name)
        before = self.last.get(name, {})
        new = {key: each for key, each in table.items() if before.get(key) != each}
        if name not in self.places:
            write_deltalake(path, arrow(name, table))
        else:
            delta = DeltaTable(path)
            same = " AND ".join(f's."{key}" = t."{key}"' for key in KEYS[name])
            deleted = {key: each for key, each in before.items() if key not in table}
            if deleted:
                delta.merge(
                    arrow(name, deleted), same, source_alias="s", target_alias="t"
                ).when_matched_delete().execute()
            if new:
                delta.merge(
                    arrow(name, new), same, source_alias="s", target_alias="t"
                ).when_matched_update_all().when_not_matched_insert_all().execute()
        self.places[name] = MirrorVersion(path, DeltaTable(path).version())


# -- histories --------------------------------------------------------------------------------

_ids = st.integers(1, 4)
_maybe = st.none() | _ids
_codes = st.sampled_from(["a", "b", "it's"])
_prices = st.none() | st.sampled_from([Decimal("1.50"), Decimal("10.00"), Decimal("-3.25")])
_rows = st.one_of(
    st.tuples(
        st.just("shop.people"), st.fixed_dictionaries({"id": _ids, "name": st.text(max_size=2)})
    ),
    st.tuples(
        st.just("shop.orders"),
        st.fixed_dictionaries({"id": _ids, "person": _maybe, "note": st.none() | _codes}),
    ),
    st.tuples(
        st.just("shop.items"),
        st.fixed_dictionaries(
            {
                "order": _ids.map(lambda n: Decimal(n).quantize(Decimal("0.01"))),
                "line": _ids,
                "product": st.none() | _codes,
                "price": _prices,
            }
        ),
    ),
    st.tuples(st.just("shop.products"), st.fixed_dictionaries({"code": _codes, "name": _codes})),
)
_steps = st.one_of(
    st.tuples(st.just("put"), _rows),
    st.tuples(st.just("put"), _rows),
    st.tuples(st.just("delete"), _rows),
    # A changed key: the row takes another row's key, with its own values.
    st.tuples(st.just("rekey"), _rows),
    st.tuples(st.just("truncate"), st.sampled_from(sorted(COLUMNS))),
    st.tuples(st.just("cut"), st.none()),
    st.tuples(st.just("cut"), st.none()),
)


def _key(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[each] for each in KEYS[name])


def _step(world: World, what: str, of: Any, seq: int) -> None:  # noqa: ANN401 - as `_steps` has it
    if what == "truncate":
        world[of].clear()
        return
    name, row = of
    if what == "delete":
        world[name].pop(_key(name, row), None)
    elif what == "rekey" and world[name]:
        _, values = world[name].pop(min(world[name]))
        world[name][_key(name, row)] = seq, values | {key: row[key] for key in KEYS[name]}
    else:
        world[name][_key(name, row)] = seq, row


def _follow(
    steps: list[tuple[str, Any]],
    at: Callable[[World, dict[DocumentNode, NodeRows]], DocumentTables],
) -> None:
    kinds = {name: DocumentKind(name, document, VERSIONS) for name, document in DOCUMENTS.items()}
    rows = {node: reader for kind in kinds.values() for node, reader in kind.rows.items()}
    stored: dict[str, dict[str, tuple[int, Any]]] = {name: {} for name in kinds}
    world: World = {name: {} for name in COLUMNS}
    seq, old = 0, None
    for what, of in [*steps, ("cut", None)]:
        if what != "cut":
            seq += 1
            _step(world, what, of, seq)
            continue
        new = at({name: dict(table) for name, table in world.items()}, rows)
        applied = Applied("shop", 1, 1, LSN(seq), seq, 0, 0, {})
        for name, kind in kinds.items():
            _apply(stored[name], kind, new, applied, old)
            seen = {key: document for key, (_, document) in stored[name].items()}
            assert seen == expected(name, world)
        old = new


def _apply(
    stored: dict[str, tuple[int, Any]],
    kind: DocumentKind,
    new: DocumentTables,
    applied: Applied,
    old: DocumentTables | None,
) -> None:
    for changes in kind.changes(new, applied, old):
        keys = [change.key for change in changes.changes]
        assert len(set(keys)) == len(keys)
        for change in changes.changes:
            assert change.key is not None
            assert change.seq == applied.seq
            if change.row is None:
                stored.pop(change.key.decode(), None)
            else:
                stored[change.key.decode()] = change.seq, json.loads(change.row)


@given(st.lists(_steps, max_size=40))
def test_documents_are_those_of_each_frontier(steps: list[tuple[str, Any]]) -> None:
    _follow(steps, ArrowTables)


@given(steps=st.lists(_steps, min_size=10, max_size=25))
@settings(max_examples=5)
def test_documents_are_those_of_each_frontier_of_a_real_mirror(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]]
) -> None:
    deltas = Deltas(tmp_path_factory.mktemp("mirror"))
    _follow(steps, deltas.at)


def test_a_query_finds_values_whatever_else_is_wanted(tmp_path: Path) -> None:
    """Decimals of more digits than a double has, and values that no row of the column can have."""
    columns = {"id": _INT, "large": ("numeric", 1700, (30 << 16) + 4), "price": _NUMERIC}
    version = Version(
        1,
        "shop",
        "sums",
        "x.shop.sums",
        ("id",),
        tuple(Column(each, *kind, nullable=True) for each, kind in columns.items()),
        {},
    )
    large = [number * 10**22 + 1 for number in range(4)]
    write_deltalake(
        tmp_path,
        pa.table(
            {
                "id": pa.array(range(4), pa.int64()),
                "large": pa.array(map(Decimal, large), pa.decimal128(30, 0)),
                "price": pa.array(map(Decimal, range(4)), pa.decimal128(10, 2)),
                SEQ: pa.array(range(4), pa.int64()),
                EXACT: pa.nulls(4, _EXACT),
            }
        ),
    )
    node = DocumentNode(
        "sums", "shop.sums", ("id",), (), by=tuple((each, each) for each in columns)
    )
    place = {node.table: MirrorVersion(str(tmp_path), 0)}
    tables = MirrorTables(place, {node: NodeRows(node, version)})
    wanted: dict[str, set[Terms]] = {
        "id": {(1,), (1 << 70,)},
        "large": {(large[1],), (Decimal("0.5"),)},
        "price": {(1,), (1 << 70,), (Decimal("0.001"),)},
    }
    for name, terms in wanted.items():
        found = tables.trace(node, (name,), frozenset(terms))
        assert [row.terms["id"] for row in found] == [1], name
    # The mirror gets a column with the first value of it.
    assert not [*tables.trace(node, ("later",), frozenset({(1,)}))]


def test_documents_are_built_again_for_another_type_of_a_column() -> None:
    """Otherwise those that nothing changes later would keep values of the former type."""
    document = msgspec.convert({"table": USERS.name}, Document)

    def of(**changed: Any) -> DocumentNode:  # noqa: ANN401 - a column's
        columns = tuple(
            each._replace(**changed) if each.name == "body" else each for each in USERS.columns
        )
        return tree("user", document, {USERS.name: USERS._replace(columns=columns)})

    assert of() == of(nullable=False)
    assert of() != of(type="int4")
    assert of() != of(attnum=9)
    assert of(type="numeric", modifier=5) != of(type="numeric", modifier=6)
    assert of(type="varchar", modifier=14) == of(type="varchar", modifier=24)
