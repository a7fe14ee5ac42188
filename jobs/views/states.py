"""The states of the tables around a cut, as temporary views in a Spark session.

A table before the cut, after it, and the rows that only one of these has (`jobs.views.plans`). The
rows that differ are read from the files that changed, in this process; where the commits do not
show these, Spark compares both versions.

A value that does not fit its column's type in a mirror is NULL there (docs/DELTA.md): a query that
reads such a value fails with its table and column, because its answer would be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable

from lockstep.jobs.documents.mirror import live_rows, without
from lockstep.jobs.views.plans import ADDED, NEW, OLD, REMOVED
from lockstep.jobs.views.translating import relation
from lockstep.jobs.views.types import INEXACT, Type, of
from lockstep.jobs.views.values import quoted, string
from lockstep.sinks.delta import difference as delta_difference
from lockstep.sinks.delta import layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from lockstep.jobs.documents.mirror import MirrorVersion
    from lockstep.sinks.contract import Version

# In the message of the error that a query raises for a value that is not in its mirror's column.
INEXACT_VALUE: Final = "lockstep: no exact value"


class TableStates:
    """One table around a cut."""

    def __init__(
        self,
        spark: SparkSession,
        version: Version,
        before: MirrorVersion | None,
        after: MirrorVersion | None,
        storage: Mapping[str, str],
    ) -> None:
        self._spark, self._version, self._storage = spark, version, dict(storage)
        self._before, self._after = before, after
        self._registered = set[str]()

    @property
    def differ(self) -> bool:
        """Whether the cut may have changed the table."""
        return self._before != self._after

    @property
    def rows(self) -> int:
        """How many rows its files have after the cut, deleted ones among them."""
        if self._after is None:
            return 0
        files = pa.table(self._opened(self._after).get_add_actions())
        return sum(each or 0 for each in files["num_records"].to_pylist())

    def register(self, state: str) -> None:
        """Make a state a temporary view, unless it is one."""
        if state in self._registered:
            return
        if state in {OLD, NEW}:
            place = {OLD: self._before, NEW: self._after}[state]
            made = {state: self._exact(self._read(place))}
        else:
            made = dict(zip((REMOVED, ADDED), self._difference(), strict=True))
        for each, rows in made.items():
            rows.createOrReplaceTempView(quoted(relation(self._version.name, each)))
            self._registered.add(each)

    def has_same_columns(self) -> bool:
        """Return whether both versions of the mirror have the table's columns, as they are now."""
        for place in (self._before, self._after):
            if place is not None:
                there = {each.name for each in self._opened(place).schema().fields}
                if not {each.name for each in self._version.columns} <= there:
                    return False
        if self._before is None or self._after is None:
            return True
        one, other = (
            {each.name: each.type for each in self._opened(place).schema().fields}
            for place in (self._before, self._after)
        )
        return all(one[each.name] == other[each.name] for each in self._version.columns)

    def _opened(self, place: MirrorVersion) -> DeltaTable:
        return DeltaTable(place.path, place.version, storage_options=self._storage or None)

    def _read(self, place: MirrorVersion | None) -> DataFrame:
        if place is None:
            return self._spark.createDataFrame([], f"{self._schema()}, {layout.SEQ} bigint")
        reader = self._spark.read.format("delta").option("versionAsOf", place.version)
        rows = reader.load(place.path)
        if layout.CURRENT in rows.columns:
            rows = rows.where(layout.CURRENT)
        if layout.DELETED in rows.columns:
            rows = rows.where(f"{layout.DELETED} IS NOT TRUE")
        return rows

    def _difference(self) -> tuple[DataFrame, DataFrame]:
        """Return the rows that only the state before has, and those that only the one after has."""
        if self._before is not None and self._after is not None:
            columns = [each.name for each in self._version.columns]
            columns += [layout.SEQ, layout.EXACT, layout.CURRENT, layout.DELETED]
            found = delta_difference.between(
                self._opened(self._before), self._opened(self._after), columns
            )
            if found is not None:
                key = [*self._version.key, layout.SEQ]
                old, new = (live_rows(side) for side in found)
                return self._frame(without(old, new, key)), self._frame(without(new, old, key))
        old, new = self._read(self._before), self._read(self._after)
        same = " AND ".join(
            f"o.{quoted(each)} <=> n.{quoted(each)}" for each in (*self._version.key, layout.SEQ)
        )
        one, other = old.alias("o"), new.alias("n")
        from pyspark.sql.functions import expr  # noqa: PLC0415 - pyspark takes a second to import

        return (
            self._exact(one.join(other, expr(same), "left_anti")),
            self._exact(other.join(one, expr(same), "left_anti")),
        )

    def _frame(self, rows: pa.Table) -> DataFrame:
        names = [each.name for each in self._version.columns]
        # Spark 4.2 takes a table that starts with an empty chunk for an empty one.
        plain = rows.select([*names, layout.EXACT]).combine_chunks()
        return self._exact(self._spark.createDataFrame(plain, self._schema()))

    def _schema(self) -> str:
        columns = [f"{quoted(each.name)} {of(each).spark}" for each in self._version.columns]
        return ", ".join([*columns, f"{layout.EXACT} map<string, string>"])

    def _exact(self, rows: DataFrame) -> DataFrame:
        """Return the table's columns; a value that is only in `_exact` raises an error."""
        return rows.selectExpr(
            *(self._checked(each.name, of(each)) for each in self._version.columns)
        )

    def _checked(self, name: str, kind: Type) -> str:
        if kind.mask or kind.name.removeprefix("_") not in INEXACT or kind.spark == "string":
            return quoted(name)
        message = string(f"{INEXACT_VALUE} in {self._version.name}.{name}.")
        return (
            f"CASE WHEN map_contains_key({layout.EXACT}, {string(name)})"
            f" THEN raise_error({message}) ELSE {quoted(name)} END AS {quoted(name)}"
        )
