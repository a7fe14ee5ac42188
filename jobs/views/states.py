"""The states of the tables around a cut, as temporary views in a Spark session.

A table before the cut, after it, and the rows that only one of these has (`jobs.views.plans`). The
rows that differ are read from the files that changed, in this process; where the commits do not
show these, Spark compares both versions.

A value that does not fit its column's type in a mirror is NULL there (docs/DELTA.md): a query that
reads such a value fails with its table and column, because its answer would be wrong.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from lockstep.jobs.documents.mirror import (
    MirrorVersion,
    among,
    differing,
    live,
    without,
)
from lockstep.jobs.views.plans import ADDED, NEW, OLD, REMOVED
from lockstep.jobs.views.translating import relation
from lockstep.jobs.views.types import INEXACT, PgType, of
from lockstep.jobs.views.values import quoted, string
from lockstep.sinks.delta import difference as delta_difference
from lockstep.sinks.delta import lake, layout, plain, stored_files
from lockstep.sinks.delta.stored_files import live_rows

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from lockstep.sinks.contract import Column, Version
    from lockstep.sinks.delta.opened_tables import OpenedTables
    from lockstep.sinks.delta.stored_files import RowGroup, StoredFiles

# In the message of the error that a query raises for a value that is not in its mirror's column.
INEXACT_VALUE: Final = "lockstep: no exact value"
# A table with no more rows than these is read completely, once for all views.
SMALL_ROWS: Final = 20_000
_TABLE: Final = "t"
_METADATA: Final = "_metadata"  # what Spark calls the file's of a row
# Columns are read where others have passed the test, page by page.
_LATE: Final = {"datafusion.execution.parquet.pushdown_filters": "true"}

# A column, and the values of which a row must have one.
Test = tuple[str, pa.Array]


class StateRows(NamedTuple):
    """Rows of a table before the cut and after it, with `_seq` and `_exact`."""

    old: pa.Table
    new: pa.Table

    def values(self, column: str, *, nulls: bool = False) -> pa.Array:
        """Return the values of a column in either state, each once."""
        found = pa.chunked_array([*self.old[column].chunks, *self.new[column].chunks]).unique()
        return found if nulls else found.drop_null()


class TableStates:
    """One table around a cut."""

    def __init__(
        self,
        spark: SparkSession,
        version: Version,
        before: MirrorVersion | None,
        after: MirrorVersion | None,
        opened: OpenedTables,
        files: StoredFiles,
        names: frozenset[str] | None = None,
    ) -> None:
        """`opened`, `files`: the mirrors'. `names`: of the columns that views read; None: all."""
        self._spark, self._version, self._mirrors, self._files = spark, version, opened, files
        every = [each.name for each in version.columns]
        read = [each for each in every if names is None or each in {*names, *version.key}]
        self._names = dict.fromkeys(read)  # in their order
        self._before, self._after = before, after
        self._tables = dict[MirrorVersion, DeltaTable]()
        # What each state's temporary view has: these rows, or all (None).
        self._registered = dict[str, StateRows | None]()

    @property
    def differ(self) -> bool:
        """Whether the cut may have changed the table."""
        return self._before != self._after

    @cached_property
    def rows(self) -> int:
        """How many rows its files have after the cut, deleted ones among them."""
        if self._after is None:
            return 0
        files = pa.table(self._opened(self._after).get_add_actions())
        return sum(each or 0 for each in files["num_records"].to_pylist())

    @cached_property
    def bytes(self) -> int:
        """How many bytes its files have after the cut."""
        return lake.size(self._opened(self._after)) if self._after else 0

    @cached_property
    def changes(self) -> StateRows | None:
        """The rows that only one state has; None if only Spark can find them."""
        if self._after is None or self._before is None or not self.has_same_columns:
            return None
        names = [*self._names]
        columns = [*names, layout.SEQ, layout.EXACT, layout.CURRENT, layout.DELETED]
        before, after = self._opened(self._before), self._opened(self._after)
        if stored_files.can_read(after):
            self._files.follow(after)  # so that what is read of these is kept
        found = delta_difference.between(before, after, columns, self._files)
        if found is None:
            return None
        key = [*self._version.key, layout.SEQ]
        old, new = (live_rows(side).select([*names, layout.SEQ, layout.EXACT]) for side in found)
        return StateRows(*differing(old, new, key))

    def among(self, tests: Sequence[Test], names: Container[str], most: int) -> StateRows | None:
        """Return the rows that have a value that a test names, some columns of them.

        None if they are more than `most`, if the mirror lacks a column, or if the state before
        can't be made of the one after.
        """
        columns = [each for each in self._names if each in names]
        columns = list(dict.fromkeys([*columns, *self._version.key, layout.SEQ, layout.EXACT]))
        if self._after is None or not self.has_same_columns:
            return None
        changes = self.changes if self.differ else None
        if self.differ and changes is None:
            return None
        new = self._found(self._after, columns, tests, most)
        if new is None:
            return None
        if changes is None:
            return StateRows(new, new)
        key = [*self._version.key, layout.SEQ]
        if not self._version.key or any(changes.new[each].null_count for each in key):
            return None
        removed = changes.old.select(columns)
        removed = removed.filter(_passes(removed, tests)) if tests else removed
        return StateRows(pa.concat_tables([without(new, changes.new, key), removed]), new)

    @cached_property
    def small(self) -> StateRows | None:
        """All rows of a small table; None if it is larger, or as `among`."""
        return self.among([], self._names, SMALL_ROWS) if self.rows <= SMALL_ROWS else None

    def _found(
        self, place: MirrorVersion, columns: list[str], tests: Sequence[Test], most: int
    ) -> pa.Table | None:
        table = self._opened(place)
        schema = lake.arrow_schema(table, columns)
        if tests and not any(len(values) for _, values in tests):
            return schema.empty_table()
        read = self._looked_up if stored_files.can_read(table) else self._queried
        found, count = [schema.empty_table()], 0
        for rows in read(table, schema, tests):
            found.append(rows)
            count += rows.num_rows
            if count > most:
                return None
        return pa.concat_tables(found)

    def _looked_up(
        self, table: DeltaTable, schema: pa.Schema, tests: Sequence[Test]
    ) -> Iterator[pa.Table]:
        """Yield the rows that pass the tests, from the table's files."""
        marks = {each.name for each in table.schema().fields} & {layout.CURRENT, layout.DELETED}
        read = lake.arrow_schema(table, [*schema.names, *sorted(marks)])
        of_tests = pa.schema([schema.field(each) for each in dict.fromkeys(c for c, _ in tests)])
        for path in self._files.follow(table):
            for group in self._files.groups(table, path):
                if not tests:
                    numbers = pa.arange(0, group.rows)
                elif any(_may_have(group, *test) for test in tests):
                    numbers = pc.indices_nonzero(_passes(group.read(of_tests), tests))
                else:
                    continue
                of_file = pc.add(numbers.cast(pa.int64()), group.first)
                alive = self._files.alive(table, path, of_file)
                numbers = numbers if alive is None else numbers.filter(alive)
                if len(numbers):
                    yield live_rows(group.take(read, numbers)).select(schema.names)

    def _queried(
        self, table: DeltaTable, schema: pa.Schema, tests: Sequence[Test]
    ) -> Iterator[pa.Table]:
        """Yield the same by delta-rs, which knows columns that are mapped, and partitions."""
        where = f"{live(table, _TABLE)}{_pushed(schema, tests)}"
        names = ", ".join(map(lake.quoted, schema.names))
        query = f"SELECT {names} FROM {_TABLE} WHERE {where}"  # noqa: S608 - quoted
        reader = QueryBuilder(_LATE).register(_TABLE, table).execute(query)
        for batch in pa.RecordBatchReader.from_stream(reader):
            rows = pa.table(batch).cast(schema)  # Arrow does not filter delta-rs' views of texts
            yield rows.filter(_passes(rows, tests)) if tests else rows

    def register_rows(self, rows: StateRows) -> None:
        """Make these rows the states' temporary views."""
        if self._registered.get(OLD) is rows:
            return
        new = self._frame(rows.new)
        old = new if rows.old is rows.new else self._frame(rows.old)
        for state, frame in ((OLD, old), (NEW, new)):
            frame.createOrReplaceTempView(quoted(relation(self._version.name, state)))
            self._registered[state] = rows

    def register(self, state: str) -> None:
        """Make all rows of a state its temporary view, unless they are."""
        if state in self._registered and self._registered[state] is None:
            return
        if state in {OLD, NEW}:
            place = {OLD: self._before, NEW: self._after}[state]
            made = {state: self._exact(self._read(place))}
        else:
            made = dict(zip((REMOVED, ADDED), self._difference(), strict=True))
        for each, rows in made.items():
            rows.createOrReplaceTempView(quoted(relation(self._version.name, each)))
            self._registered[each] = None

    @cached_property
    def has_same_columns(self) -> bool:
        """Whether both versions of the mirror have the columns that are read, as they are now.

        A column without values is added to a mirror with the next rows.
        """
        kinds = [
            {each.name: each.type for each in self._opened(place).schema().fields}
            for place in (self._before, self._after)
            if place is not None
        ]
        if not all(self._names.keys() <= each.keys() for each in kinds):
            return False
        return all(each[name] == kinds[0][name] for each in kinds for name in self._names)

    def _opened(self, place: MirrorVersion) -> DeltaTable:
        if place not in self._tables:
            self._tables[place] = self._mirrors.at(place.path, place.version)
        return self._tables[place]

    def _read(self, place: MirrorVersion | None) -> DataFrame:
        if place is None:
            return self._spark.createDataFrame(
                [], f"{_schema(self._version.columns)}, {layout.SEQ} bigint"
            )
        rows = self._read_plain(place)
        if rows is None:
            reader = self._spark.read.format("delta").option("versionAsOf", place.version)
            rows = reader.load(place.path)
            missing = [each for each in self._version.columns if each.name not in rows.columns]
            nulls = (f"CAST(NULL AS {of(each).spark}) AS {quoted(each.name)}" for each in missing)
            rows = rows.selectExpr("*", *nulls)
        if layout.CURRENT in rows.columns:
            rows = rows.where(layout.CURRENT)
        if layout.DELETED in rows.columns:
            rows = rows.where(f"{layout.DELETED} IS NOT TRUE")
        return rows

    def _read_plain(self, place: MirrorVersion) -> DataFrame | None:
        """Return the rows of the version's Parquet files; None if only Delta has them."""
        table = self._opened(place)
        found = plain.plain_files(table)
        there = [field.name for field in table.schema().fields]
        if found is None or not found.uris or _METADATA in there:
            return None
        fields = [_schema(self._version.columns), f"{layout.SEQ} bigint"]
        marks = [each for each in (layout.CURRENT, layout.DELETED) if each in there]
        fields += [f"{each} boolean" for each in marks]
        rows = self._spark.read.schema(", ".join(fields)).parquet(*found.uris)
        if not found.deleted.num_rows:
            return rows
        deleted = self._spark.createDataFrame(found.deleted, "file string, row bigint").alias("d")
        places = [f"{_METADATA}.file_name AS `#file`", f"{_METADATA}.row_index AS `#row`"]
        from pyspark.sql.functions import expr  # noqa: PLC0415 - pyspark takes a second to import

        same = expr("f.`#file` = d.file AND f.`#row` = d.row")
        kept = rows.selectExpr("*", *places).alias("f").join(deleted, same, "left_anti")
        return kept.drop("#file", "#row")

    def _difference(self) -> tuple[DataFrame, DataFrame]:
        """Return the rows that only the state before has, and those that only the one after has."""
        if self.changes is not None:
            return self._frame(self.changes.old), self._frame(self.changes.new)
        old, new = self._read(self._before), self._read(self._after)
        # Rows that DDL has changed keep their seqs.
        compared = [*self._names] if self._before and self._after else self._version.key
        same = " AND ".join(
            f"o.{quoted(each)} <=> n.{quoted(each)}" for each in (*compared, layout.SEQ)
        )
        one, other = old.alias("o"), new.alias("n")
        from pyspark.sql.functions import expr  # noqa: PLC0415 - pyspark takes a second to import

        return (
            self._exact(one.join(other, expr(same), "left_anti")),
            self._exact(other.join(one, expr(same), "left_anti")),
        )

    def _frame(self, rows: pa.Table) -> DataFrame:
        """Return rows with some of the table's columns."""
        there = {*rows.column_names}
        columns = [each for each in self._version.columns if each.name in there]
        names = [each.name for each in columns]
        is_exact = rows[layout.EXACT].null_count == rows.num_rows
        # Spark 4.2 takes a table that starts with an empty chunk for an empty one.
        plain = rows.select(names if is_exact else [*names, layout.EXACT]).combine_chunks()
        if is_exact:
            return self._spark.createDataFrame(plain, fields(columns))
        frame = self._spark.createDataFrame(plain, _schema(columns))
        return _exact(self._version.name, columns, frame)

    def _exact(self, rows: DataFrame) -> DataFrame:
        return _exact(self._version.name, self._version.columns, rows)


def fields(columns: Sequence[Column]) -> str:
    """Return columns and their types as Spark's SQL writes a schema."""
    return ", ".join(f"{quoted(each.name)} {of(each).spark}" for each in columns)


def _schema(columns: Sequence[Column]) -> str:
    return f"{fields(columns)}, {layout.EXACT} map<string, string>"


def _exact(table: str, columns: Sequence[Column], rows: DataFrame) -> DataFrame:
    """Return a table's columns; a value that is only in `_exact` raises an error."""
    return rows.selectExpr(*(_checked(table, each.name, of(each)) for each in columns))


def _checked(table: str, name: str, kind: PgType) -> str:
    if kind.mask or kind.name.removeprefix("_") not in INEXACT or kind.spark == "string":
        return quoted(name)
    message = string(f"{INEXACT_VALUE} in {table}.{name}.")
    return (
        f"CASE WHEN map_contains_key({layout.EXACT}, {string(name)})"
        f" THEN raise_error({message}) ELSE {quoted(name)} END AS {quoted(name)}"
    )


def _may_have(group: RowGroup, column: str, values: pa.Array) -> bool:
    """Return whether a row of the group can have one of the values, by their bounds."""
    kind, bounds = values.type, group.bounds(column)
    has_order = pa.types.is_integer(kind) or pa.types.is_string(kind)
    if bounds is None or not has_order or values.null_count:
        return True
    low, high = (pc.less(values, bounds[0]), pc.greater(values, bounds[1]))
    return not pc.all(pc.or_(low, high)).as_py()


def _pushed(schema: pa.Schema, tests: Sequence[Test]) -> str:
    """Return what delta-rs skips files and pages by: rows that pass the tests pass it, too."""
    found = []
    for column, values in tests:
        wanted = set(values.drop_null().to_pylist())
        text = among(schema, column, wanted) if wanted else "FALSE"
        if not text:
            return ""
        null = f" OR {lake.quoted(column)} IS NULL" if values.null_count else ""
        found.append(f"{text}{null}")
    return f" AND ({' OR '.join(found)})" if found else ""


def _passes(rows: pa.Table, tests: Sequence[Test]) -> pa.ChunkedArray:
    """Return whether each row has a value that a test names."""
    found = None
    for column, values in tests:
        of_rows, wanted = rows[column], values
        if pa.types.is_integer(values.type):
            of_rows, wanted = of_rows.cast(pa.int64()), values.cast(pa.int64())
        else:
            of_rows = of_rows.cast(values.type)
        each = pc.is_in(of_rows, value_set=wanted)
        found = each if found is None else pc.or_(found, each)
    return found
