"""Write a group's rows into a mirror and commit them: two ways with the same result.

If Python can access the storage as Spark does, the tasks that read the rows also write the table's
files, and the driver commits the files of the attempts that Spark accepts: rows do not pass through
the JVM, which would take more time than everything else. A failed attempt leaves a file that no
commit names. Otherwise (storage credentials that only Spark has, HDFS, mapped columns, unknown
table features) Spark's own writer is used.

Both set the commit's `txnVersion`, and do not change a table that has already reached it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pyarrow as pa
from delta.tables import DeltaTable as SparkTable
from pyspark.sql.pandas.types import to_arrow_schema

from cdc.errors import ConfigError, StoreLostError
from lockstep.jobs.copying.data_source import NAME, as_option
from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import features as delta_features
from lockstep.sinks.delta import lake as delta_lake
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta import log as delta_log
from lockstep.sinks.delta.actions import Action, Files
from lockstep.sinks.delta.lake import CommitInfo, ConflictError
from lockstep.sinks.delta.parts import Parts, WrittenFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from cdc.config import Config
    from lockstep.jobs.copying.data_source import CopiedTable, SnapshotReader

_NEWEST: Final = 10
# How many commits are searched at most: only our own are of interest.
_HISTORY: Final = 1_000
_TRIES: Final = 10
_CHECKPOINT_EVERY: Final = 100


class MirrorRows(NamedTuple):
    """Rows of a table that are committed together."""

    table: CopiedTable
    schema: StructType
    reader: SnapshotReader
    replaces: bool  # everything in the mirror


class MirrorWriter(Protocol):
    """Writes one mirror."""

    def write(self, rows: MirrorRows, commit: CommitInfo) -> None:
        """Commit the rows; do nothing if the table has reached the commit's version."""

    def commits(self) -> Iterator[tuple[str | None, Mapping[str, str]]]:
        """Yield the `userMetadata` and the metrics of the table's commits, newest first."""


class BySpark:
    """Spark's own writer."""

    def __init__(self, spark: SparkSession, config_file: Path, path: str) -> None:
        self._spark, self._file, self._path = spark, config_file, path

    def write(self, rows: MirrorRows, commit: CommitInfo) -> None:
        frame = self._spark.read.format(NAME).schema(rows.schema)
        options = {
            "txnAppId": commit.app,
            "txnVersion": str(commit.upto),
            "userMetadata": delta_layout.metadata(**commit.facts),
            **delta_layout.properties(rows.schema.fieldNames()),
        }
        if rows.replaces:
            options["overwriteSchema"] = "true"
        mode = "overwrite" if rows.replaces else "append"
        read = frame.options(config=str(self._file), planned=as_option(rows.table)).load()
        read.write.format("delta").mode(mode).options(**options).save(self._path)

    def commits(self) -> Iterator[tuple[str | None, Mapping[str, str]]]:
        history = SparkTable.forPath(self._spark, self._path).history(_HISTORY)
        for row in history.select("userMetadata", "operationMetrics").toLocalIterator():
            yield row["userMetadata"], row["operationMetrics"]


class ByTasks:
    """Files written by the tasks that read the rows, and our own commit."""

    def __init__(self, spark: SparkSession, path: str, storage: Mapping[str, str]) -> None:
        self._spark, self._path, self._storage = spark, path, storage

    def suits(self, columns: list[str]) -> bool:
        """Return whether the mirror can be written this way."""
        table = delta_lake.opened(self._path, self._storage)
        return not delta_layout.properties(columns) and (
            table is None or delta_actions.is_plain(table)
        )

    def write(self, rows: MirrorRows, commit: CommitInfo) -> None:
        table = delta_lake.opened(self._path, self._storage)
        if not _is_older(table, commit):
            return
        parts = self.write_files(rows)
        for _ in range(_TRIES):
            # Opened after the rows were read: the commit is based on exactly this version.
            table = delta_lake.opened(self._path, self._storage)
            if not _is_older(table, commit):
                return
            with suppress(ConflictError):
                self.commit(table, rows, parts, commit)
                return
        raise delta_lake.busy(self._path)

    def commits(self) -> Iterator[tuple[str | None, Mapping[str, str]]]:
        table = delta_lake.opened(self._path, self._storage)
        if table is None:
            return
        known = 0
        # The wanted commit is mostly among the newest; each one costs a file read.
        for many in (_NEWEST, _HISTORY):
            history = table.history(many)
            for commit in history[known:]:
                yield commit.get("userMetadata"), commit.get("operationMetrics") or {}
            known = len(history)

    def write_files(self, rows: MirrorRows) -> list[WrittenFile]:
        """Return the files of the attempts that Spark accepts."""
        shares = rows.reader.partitions()
        tasks = self._spark.sparkContext.parallelize(shares, len(shares))
        schema = to_arrow_schema(rows.schema, timezone="UTC")
        write = partial(_write, rows.reader, schema, self._path, dict(self._storage))
        return tasks.mapPartitions(write).collect()

    def commit(
        self,
        table: DeltaTable | None,
        rows: MirrorRows,
        parts: list[WrittenFile],
        commit: CommitInfo,
    ) -> None:
        if table is None and not rows.replaces:
            raise StoreLostError(f"the Delta table {self._path} is missing")
        if table is not None:
            delta_features.expect_ours(table)
        files = Files(self._path, self._storage)
        if any(files.size(part.path) != part.bytes for part in parts):
            raise ConfigError(
                f"{self._path}: the driver does not find the files that tasks wrote",
                hint="the driver and all executors must share that file system; or use an object"
                " store",
            )
        actions: list[Action] = []
        if rows.replaces:
            actions += _born(json.loads(rows.schema.json()), table)
            actions += _removals(table)
        actions += [part.action for part in parts]
        about = {
            "operation": "WRITE",
            "operationParameters": {
                "mode": "Overwrite" if rows.replaces else "Append",
                "partitionBy": "[]",
            },
            "operationMetrics": {
                "numFiles": str(len(parts)),
                "numOutputRows": str(sum(part.rows for part in parts)),
                "numOutputBytes": str(sum(part.bytes for part in parts)),
            },
        }
        version = table.version() + 1 if table else 0
        delta_actions.put_version(files, version, actions, about, commit)
        if table is not None and version % _CHECKPOINT_EVERY == 0:
            table.update_incremental()
            table.create_checkpoint()


def writer(
    spark: SparkSession, config: Config, config_file: Path, path: str, columns: list[str]
) -> MirrorWriter:
    """Return the writer for the mirror at `path` with these columns."""
    place = _reached(spark, config, path)
    if place is not None:
        by_tasks = ByTasks(spark, *place)
        if by_tasks.suits(columns):
            return by_tasks
    return BySpark(spark, config_file, path)


def _reached(
    spark: SparkSession, config: Config, path: str
) -> tuple[str, Mapping[str, str]] | None:
    """Return the path and the options for access from Python; None if it has none."""
    if "://" in path and not path.startswith("file:"):
        # The follower that continues these mirrors has the storage options.
        for follower in config.followers.values():
            delta = follower.delta
            if delta and delta.storage and delta.path in {None, config.delta.path}:
                return path, delta.storage
        return None
    # A path without a scheme may be on HDFS, which Spark's settings show.
    jvm, context = spark._jvm, spark._jsc  # noqa: SLF001 - there is no other way to Hadoop's
    assert jvm is not None
    named = jvm.org.apache.hadoop.fs.Path(path)
    qualified = named.getFileSystem(context.hadoopConfiguration()).makeQualified(named).toUri()
    return (qualified.getPath(), {}) if qualified.getScheme() == "file" else None


def _write(
    reader: SnapshotReader,
    schema: pa.Schema,
    path: str,
    storage: Mapping[str, str],
    shares: Iterator[InputPartition],
) -> Iterator[WrittenFile]:
    """Read a task's share into files; runs in an executor."""
    for share in shares:
        with Parts(Files(path, storage), schema) as parts:
            for batch in reader.read(share):
                parts.add(batch)
        yield from parts.done


def _is_older(table: DeltaTable | None, commit: CommitInfo) -> bool:
    assert commit.upto is not None
    reached = delta_lake.newest_transaction(table, commit.app) if table else None
    return reached is None or reached < commit.upto


def _born(schema: dict[str, Any], table: DeltaTable | None) -> list[Action]:
    """Return the actions that create a table or set its schema: `protocol` and `metaData`."""
    with TemporaryDirectory() as folder:
        new = delta_lake.made(folder, schema, {}, properties={}, facts={})
        first = Path(folder, "_delta_log", f"{0:020d}.json").read_text("utf-8")
    if table is None:
        actions = map(json.loads, first.splitlines())
        return [each for each in actions if not each.keys().isdisjoint({"protocol", "metaData"})]
    # Our schemas need at most one feature.
    missing = {*(new.protocol().reader_features or ())} - {
        *(table.protocol().reader_features or ())
    }
    protocol = [delta_actions.with_feature(table, feature) for feature in missing]
    return [*protocol, delta_actions.described(table, schema, table.metadata().configuration)]


def _removals(table: DeltaTable | None) -> list[Action]:
    """Return the actions that remove all files of a table."""
    return [] if table is None else [*map(delta_actions.removal, delta_log.listed(table))]
