"""Apply a batch to a mirror by Spark's MERGE: for tables whose keys do not fit into memory.

Deletion vectors, so that no file is rewritten for a few rows; the condition has the touched keys as
literals, so that Delta skips files without any of them. A MERGE takes seconds, even for few rows.

It also writes the mirrors whose features only delta-spark supports, whatever their size.

The result is the same as with the other appliers (`sinks.delta.merge`, `sinks.delta.vectors`).
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import date
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from delta.exceptions import DeltaConcurrentModificationException
from delta.tables import DeltaTable as SparkTable
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql.types import StructType

from cdc.errors import (
    UnavailableError,
    gist,
)
from lockstep.jobs.spark.session import SparkEndedError, has_ended, with_jars
from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import features as delta_features
from lockstep.sinks.delta import lake as delta_lake
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.layout import EXACT, SEQ
from lockstep.sinks.delta.merge import IS_DELETE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deltalake import DeltaTable
    from pyspark.sql import Column

    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.work import Work

# A column of the source only: the names of the columns that keep their stored value.
_KEPT: Final = "_kept"
# How many keys the condition lists as literals; for more keys it has their bounds.
_LITERALS: Final = 1_000
_MERGE: Final = {
    # The source is local, so every read of it returns the same rows.
    "spark.databricks.delta.merge.materializeSource": "none",
    "spark.databricks.delta.schema.autoMerge.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
}
# The conditions of errors that no attempt can avoid.
_UNSUPPORTED: Final = re.compile(
    r"DELTA_(UNSUPPORTED|FEATURE|INVALID_PROTOCOL|CANNOT_MODIFY_APPEND)"
)
_TXN: Final = "spark.databricks.delta.write.txn"
_USER_METADATA: Final = "spark.databricks.delta.commitInfo.userMetadata"


class SparkMerge:
    """The applier, in the active session or else its own."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage

    def apply(self, table: DeltaTable, work: Work, commit: CommitInfo) -> None:
        """Apply the work in one commit."""
        if delta_actions.is_plain(table):
            files = delta_actions.Files(table.table_uri, self._storage)
            with delta_lake.translated(table.table_uri):
                if enabling := delta_actions.enabling(table):
                    about = commit._replace(upto=None)
                    delta_actions.commit(files, table, enabling, "ADD FEATURE", about)
        transaction = {f"{_TXN}AppId": commit.app, f"{_TXN}Version": str(commit.upto)}
        with _writing(table, commit.facts, transaction) as spark:
            if work.truncated is None:
                self._merge(spark, _uri(table), work)
            else:
                rows = work.batch.rows.filter(pc.invert(work.batch.deleted))
                frame = spark.createDataFrame(rows)
                frame.write.format("delta").mode("overwrite").save(_uri(table))

    def alter(
        self,
        table: DeltaTable,
        facts: Mapping[str, object],
        *,
        columns: Sequence[Mapping[str, object]] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add columns, as a schema has them in JSON, or set properties."""
        kinds = StructType.fromJson({"fields": list(columns)})
        added = ", ".join(f"{_name(each.name)} {each.dataType.simpleString()}" for each in kinds)
        values = ", ".join(f"{_text(name)} = {_text(each)}" for name, each in properties.items())
        with _writing(table, facts) as spark:
            if added:
                spark.sql(f"ALTER TABLE delta.{_name(_uri(table))} ADD COLUMNS ({added})")
            if values:
                spark.sql(f"ALTER TABLE delta.{_name(_uri(table))} SET TBLPROPERTIES ({values})")

    def maintain(self, table: DeltaTable, cluster: Sequence[str], hours: int | None) -> None:
        """Join small files; delete files that were removed so many hours ago, if given."""
        settings = {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}
        facts = delta_lake.newest_facts(table)
        with _writing(table, facts, settings) as spark:
            mirror = SparkTable.forPath(spark, _uri(table))
            # One that is clustered by its own columns stays so.
            (detail,) = mirror.detail().collect()
            if cluster and not detail["clusteringColumns"]:
                mirror.optimize().executeZOrderBy(*cluster)
            else:
                mirror.optimize().executeCompaction()
            if hours is not None:
                mirror.vacuum(hours)

    @staticmethod
    def _merge(spark: SparkSession, uri: str, work: Work) -> None:
        rows = work.batch.rows
        source = spark.createDataFrame(_with_marks(work)).alias("s")
        newer = _s(SEQ) > _t(SEQ)
        is_there = ~_s(IS_DELETE)
        values: dict[str, str | Column] = {_name(name): _s(name) for name in rows.column_names}
        kept = set(work.batch.unchanged)
        set_ = values | {_name(name): _or_stored(name) for name in kept}
        if kept:
            set_[_name(EXACT)] = _exact()
        merge = SparkTable.forPath(spark, uri).alias("t")
        builder = merge.merge(source, _on(work))
        if pc.any(work.batch.deleted).as_py():
            if work.soft:
                marks: dict[str, str | Column] = {
                    _name(name): _s(name) for name in delta_layout.MARKED
                }
                builder = builder.whenMatchedUpdate(newer & _s(IS_DELETE), marks)
            else:
                builder = builder.whenMatchedDelete(newer & _s(IS_DELETE))
        builder = builder.whenMatchedUpdate(newer & is_there, set_)
        builder.whenNotMatchedInsert(is_there, values).execute()


@contextmanager
def _writing(
    table: DeltaTable, facts: Mapping[str, object], more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[SparkSession]:
    """Yield a session whose commits have the facts; translate errors, and load what it wrote."""
    # A new session, so that these settings apply to one commit only and to no other thread.
    spark = (SparkSession.getActiveSession() or with_jars("delta")).newSession()
    metadata = {_USER_METADATA: delta_layout.metadata(**facts)}
    for name, value in (_MERGE | metadata | dict(more)).items():
        spark.conf.set(name, value)
    try:
        yield spark
    except DeltaConcurrentModificationException as error:
        raise delta_lake.ConflictError(f"{table.table_uri}: another commit was first") from error
    except (PySparkException, Py4JError, ConnectionError) as error:
        if has_ended(error):
            raise SparkEndedError from error
        if _UNSUPPORTED.search(str(error)):
            raise delta_features.refusal(table.table_uri, gist(error)) from error
        raise UnavailableError(
            f"{table.table_uri}: {gist(error)}",
            hint="the follower tries again; Spark's own log has the complete error",
        ) from error
    with delta_lake.translated(table.table_uri):
        table.update_incremental()


def _uri(table: DeltaTable) -> str:
    """Return the table's address as Spark has it."""
    return table.table_uri.replace("s3://", "s3a://", 1)


def _text(value: str) -> str:
    """Return a text as SQL has it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_marks(work: Work) -> pa.Table:
    batch = work.batch
    kept: list[list[str]] = [[] for _ in range(batch.rows.num_rows)]
    for name, where in batch.unchanged.items():
        for row in pc.indices_nonzero(where).to_pylist():
            kept[row].append(name)
    marked = batch.rows.append_column(IS_DELETE, batch.deleted)
    return marked.append_column(_KEPT, pa.array(kept, pa.list_(pa.string())))


def _on(work: Work) -> Column:
    """Return the condition that two rows have the same key."""
    rows, conditions = work.batch.rows, []
    for name in work.key:
        if not rows[name].null_count:
            conditions.append(_t(name) == _s(name))
            if (bound := _bound(rows[name], name)) is not None:
                conditions.append(bound)
            continue
        odd = [F.element_at(side(EXACT), F.lit(name)) for side in (_t, _s)]
        same_text = _t(name).isNotNull() | odd[0].eqNullSafe(odd[1])
        conditions.append(_t(name).eqNullSafe(_s(name)) & same_text)
    combined = conditions[0]
    for each in conditions[1:]:
        combined &= each
    return combined


def _bound(values: pa.ChunkedArray, name: str) -> Column | None:
    """Return the condition on stored keys, in literals, by which Delta skips files."""
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind)):
        return None
    if len(values) <= _LITERALS:
        return _t(name).isin([_literal(each) for each in values.unique().to_pylist()])
    found = pc.min_max(values)
    least, most = (_literal(found[each].as_py()) for each in ("min", "max"))
    return _t(name).between(least, most)


def _literal(value: int | str | date) -> Column:
    return F.lit(value)


def _or_stored(name: str) -> Column:
    return F.when(F.array_contains(_s(_KEPT), name), _t(name)).otherwise(_s(name))


def _exact() -> Column:
    """Return `_exact` with the stored texts of the columns that keep their value."""
    nothing = F.expr("cast(map() as map<string,string>)")
    stored = F.coalesce(_t(EXACT), nothing)
    kept = F.map_filter(stored, lambda name, _: F.array_contains(_s(_KEPT), name))
    combined = F.map_concat(kept, F.coalesce(_s(EXACT), nothing))
    return F.when(F.size(combined) > 0, combined)


def _name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _t(name: str) -> Column:
    return F.col(f"t.{_name(name)}")


def _s(name: str) -> Column:
    return F.col(f"s.{_name(name)}")
