"""A mirror's tables at one frontier, read in this process (delta-rs).

Exact, by the Delta versions that the mirror's `_frontiers` names. A filter is pushed down as far as
Delta's statistics allow, and then checked row by row: the pushed-down filter may return more rows,
never fewer.
"""

from __future__ import annotations

from collections import Counter
from datetime import date
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from pyarrow import types

from lockstep.sinks.delta import column_index, lake, stored_files
from lockstep.sinks.delta import difference as delta_difference
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.lake import quoted
from lockstep.sinks.delta.stored_files import live_rows
from lockstep.sinks.documents import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from lockstep.jobs.documents.rows import NodeRows
    from lockstep.sinks.delta.stored_files import StoredFiles
    from lockstep.sinks.documents import DocumentNode, Term, Terms

# A query's text grows with the values in it; for more values than this it has only the smallest and
# the largest.
_NAMED_AT_MOST: Final = 5_000
# delta-rs reads the bounds of a file's decimals as doubles: it skips files by no more digits.
_EXACT_DIGITS: Final = 15
_TABLE: Final = "t"


class MirrorVersion(NamedTuple):
    """A mirror's path, and its version."""

    path: str
    version: int


class MirrorTables:
    """The tables of one frontier (`jobs.documents.kinds.Tables`)."""

    def __init__(
        self,
        places: Mapping[str, MirrorVersion],
        rows: Mapping[DocumentNode, NodeRows],
        files: StoredFiles | None = None,
        open_: Callable[[str, int], DeltaTable] = DeltaTable,
    ) -> None:
        """`files` keeps what is read, from one cut to the next."""
        self._places, self._rows, self._files = places, rows, files
        self._open = open_
        self._opened: dict[str, DeltaTable] = {}

    def find(
        self, node: DocumentNode, columns: tuple[str, ...], wanted: frozenset[Terms]
    ) -> Iterator[Row]:
        """Yield the rows of the node's table whose `columns` are among `wanted`: a `Find`."""
        return self._found(self._rows[node], columns, wanted)

    def trace(
        self, node: DocumentNode, columns: tuple[str, ...], wanted: frozenset[Terms]
    ) -> Iterator[Row]:
        """Yield the same rows with their keys and terms only."""
        return self._found(self._rows[node].traced, columns, wanted)

    def _found(
        self, reader: NodeRows, columns: tuple[str, ...], wanted: frozenset[Terms]
    ) -> Iterator[Row]:
        table = self.open(reader.node.table)
        if table is None or not wanted:
            return
        # A mirror gets a column with its first value; until then it is NULL, which equals nothing.
        if not {field.name for field in table.schema().fields} >= {*columns}:
            return
        terms = {column: {each[at] for each in wanted} for at, column in enumerate(columns)}
        for row in self._by_index(reader, table, terms) or _by_query(reader, table, terms):
            if row.of(columns) in wanted:
                yield row

    def _by_index(
        self, reader: NodeRows, table: DeltaTable, terms: Mapping[str, set[Term]]
    ) -> Iterator[Row] | None:
        """Return the rows that have one of the terms in each column, and maybe others.

        None if what is in memory can't find them, or does not fit there.
        """
        files = self._files
        if files is None or not stored_files.can_read(table):
            return None
        schema = lake.arrow_schema(table)
        found = {name: column_index.sought(schema.field(name).type, terms[name]) for name in terms}
        tests = {name: wanted for name, wanted in found.items() if wanted is not None}
        if not tests:
            return None
        there = [name for name in reader.columns if name in schema.names]
        try:
            rows = files.find(table, lake.arrow_schema(table, there), tests)
        except FileNotFoundError:
            return None
        if rows is None:
            return None
        for name in reader.columns:
            if name not in schema.names:
                rows = rows.append_column(name, pa.nulls(rows.num_rows))
        return _rows_in(reader, rows.select(reader.columns))

    def every(self, node: DocumentNode) -> Iterator[Row]:
        """Yield all rows of the node's table."""
        table = self.open(node.table)
        if table is not None:
            yield from _read(self._rows[node], table, [])

    def difference(
        self, node: DocumentNode, since: MirrorTables
    ) -> tuple[Iterable[Row], Iterable[Row]]:
        """Return the rows that only `since` has, and those that it lacks: keys and terms only.

        By the files that changed or, where the commits do not show these, by all rows.
        """
        before, after = since.open(node.table), self.open(node.table)
        if before is None or after is None:
            return since.every(node), self.every(node)
        found = self.by_files(node, since)
        return found or (since.lacking(node, self), self.lacking(node, since))

    def by_files(
        self, node: DocumentNode, since: MirrorTables
    ) -> tuple[list[Row], list[Row]] | None:
        """Return the same from the files that changed; None if the commits do not show them."""
        before, after = since.open(node.table), self.open(node.table)
        assert before is not None
        assert after is not None
        reader = self._rows[node].traced
        columns = (*reader.columns, delta_layout.CURRENT, delta_layout.DELETED)
        if self._files is not None:
            self._files.follow(after)
        found = delta_difference.between(before, after, columns, self._files)
        if found is None:
            return None
        old, new = (live_rows(side) for side in found)
        sides = differing(old, new, [*node.key, delta_layout.SEQ])
        # Keys that have no value of their column's type are compared by their text.
        counts, rows = Counter[tuple[bytes, int]](), dict[tuple[bytes, int], Row]()
        for side, more in zip(sides, (-1, 1), strict=True):
            for batch in side.to_batches():
                seqs = batch.column(delta_layout.SEQ).to_pylist()
                read = reader.read(batch.select(reader.columns))
                for seq, row in zip(seqs, read, strict=True):
                    counts[row.key, seq] += more
                    rows[row.key, seq] = row
        return (
            [rows[at] for at, count in counts.items() if count < 0],
            [rows[at] for at, count in counts.items() if count > 0],
        )

    def lacking(self, node: DocumentNode, other: MirrorTables) -> Iterator[Row]:
        """Yield the rows that the other tables do not have with the same seq."""
        before, after = self.open(node.table), other.open(node.table)
        assert before is not None
        assert after is not None
        same = " AND ".join(
            f"(n.{quoted(name)} IS NOT DISTINCT FROM o.{quoted(name)})"
            for name in (*node.key, delta_layout.SEQ)
        )
        reader = self._rows[node].traced
        columns = _selected(reader, before, "o")
        both = live(before, "o"), live(after, "n")
        query = (
            f"SELECT {columns} FROM o WHERE {both[0]} AND NOT EXISTS"  # noqa: S608 - quoted
            f" (SELECT 1 FROM n WHERE {both[1]} AND {same})"
        )
        builder = QueryBuilder().register("o", before).register("n", after)
        yield from _rows_of(reader, builder, query)

    def open(self, name: str) -> DeltaTable | None:
        """Return the table at its version; None if the frontier has none."""
        if name not in self._places:
            return None
        if name not in self._opened:
            self._opened[name] = self._open(*self._places[name])
        return self._opened[name]

    def differ(self, table: str, since: MirrorTables) -> bool:
        return self._places.get(table) != since._places.get(table)


def _by_query(reader: NodeRows, table: DeltaTable, terms: Mapping[str, set[Term]]) -> Iterator[Row]:
    """Yield the rows that have one of the terms in each column, and maybe others."""
    schema = pa.schema(table.schema().to_arrow())
    return _read(reader, table, [among(schema, name, terms[name]) for name in terms])


def _rows_in(reader: NodeRows, rows: pa.Table) -> Iterator[Row]:
    for batch in rows.combine_chunks().to_batches():
        yield from reader.read(batch)


def _read(reader: NodeRows, table: DeltaTable, tests: Iterable[str]) -> Iterator[Row]:
    columns = _selected(reader, table, _TABLE)
    where = " AND ".join([live(table, _TABLE), *filter(None, tests)])
    query = f"SELECT {columns} FROM {_TABLE} WHERE {where}"  # noqa: S608 - quoted
    yield from _rows_of(reader, QueryBuilder().register(_TABLE, table), query)


def _selected(reader: NodeRows, table: DeltaTable, name: str) -> str:
    """Return the selected columns; a column that this version of the table lacks is NULL."""
    there = {field.name for field in table.schema().fields}
    return ", ".join(
        f"{name}.{quoted(each)}" if each in there else f"NULL AS {quoted(each)}"
        for each in reader.columns
    )


def _rows_of(reader: NodeRows, builder: QueryBuilder, query: str) -> Iterator[Row]:
    for batch in pa.RecordBatchReader.from_stream(builder.execute(query)):
        yield from reader.read(batch)


def differing(old: pa.Table, new: pa.Table, key: list[str]) -> tuple[pa.Table, pa.Table]:
    """Return the rows of each side that cancel none of the other's, each once.

    One cancels one: a row is twice on a side if it came in one file and was then copied to another
    (`sinks.delta.difference`). Rows whose key has a NULL are all returned.
    """
    if not old.num_rows or not new.num_rows:  # a row twice on a side cancels one of the other's
        return old, new
    of_old, of_new = _counted(old, key), _counted(new, key)
    return _more(old, of_old, of_new, key), _more(new, of_new, of_old, key)


def _counted(rows: pa.Table, key: list[str]) -> pa.Table:
    """Return each key without a NULL, with its first row and how many rows have it."""
    numbered = rows.select(key).append_column("#", pa.arange(0, rows.num_rows)).drop_null()
    return numbered.group_by(key).aggregate([("#", "min"), ("#", "count")])


def _more(rows: pa.Table, mine: pa.Table, theirs: pa.Table, key: list[str]) -> pa.Table:
    """Return the first row of each key that more of mine have, and those with a NULL in it."""
    others = theirs.select([*key, "#_count"]).rename_columns([*key, "#others"])
    both = mine.join(others, keys=key, join_type="left outer")
    more = both.filter(pc.greater(both["#_count"], pc.fill_null(both["#others"], 0)))["#_min"]
    odd = pc.indices_nonzero(reduce(pc.or_, (pc.is_null(rows[name]) for name in key)))
    return rows.take(pa.concat_arrays([more.combine_chunks(), odd.cast(pa.int64())]))


def without(rows: pa.Table, others: pa.Table, key: list[str]) -> pa.Table:
    """Return the rows whose key, if it has no NULL, none of the others has."""
    if not rows.num_rows or not others.num_rows:
        return rows
    places = pa.arange(0, rows.num_rows)
    numbered = rows.select(key).append_column("#", places)
    left = numbered.join(others.select(key), keys=key, join_type="left anti")
    return rows.take(left["#"].combine_chunks())


def live(table: DeltaTable, name: str) -> str:
    """Return the predicate for current rows: neither marked as deleted nor historical."""
    names = {field.name for field in table.schema().fields}
    if delta_layout.CURRENT in names:
        return f"{name}.{delta_layout.CURRENT}"
    if delta_layout.DELETED in names:
        return f"{name}.{delta_layout.DELETED} IS NOT TRUE"
    return "TRUE"


def among(schema: pa.Schema, column: str, wanted: set[Term]) -> str:
    """Return a predicate that every row whose column is among `wanted` passes; "" for all rows."""
    kind = schema.field(column).type
    literals = [_literal(kind, term) for term in wanted]
    if None in literals or not literals:
        return ""
    name = quoted(column)
    if len(literals) <= _NAMED_AT_MOST:
        return f"{name} IN ({', '.join(map(str, literals))})"
    plain: list[Any] = list(wanted)
    return f"{name} BETWEEN {_literal(kind, min(plain))} AND {_literal(kind, max(plain))}"


def _literal(kind: pa.DataType, term: Term) -> str | None:
    """Return the SQL literal that equals the term in a column of that type; None if there is none.

    There is none for a value that has more than one text, for example a number stored as text, and
    for one that the column can't hold.
    """
    match term:
        case bool():
            return None
        case int() if types.is_integer(kind) and term in column_index.INTEGERS:
            return f"{term:d}"
        case str() if types.is_string(kind) or types.is_string_view(kind):
            return "'" + term.replace("'", "''") + "'"
        case Decimal() | int() if types.is_decimal(kind) and _is_exact(kind, term):
            return f"CAST('{Decimal(term):f}' AS DECIMAL({kind.precision},{kind.scale}))"
        case date() if types.is_date(kind):
            return f"DATE '{term}'"
        case _:
            return None


def _is_exact(kind: pa.DataType, term: Decimal | int) -> bool:
    """Return whether delta-rs compares a decimal with what files of this type have."""
    digits: int = kind.precision
    return digits <= _EXACT_DIGITS and abs(term) < 10 ** (digits - int(kind.scale))
