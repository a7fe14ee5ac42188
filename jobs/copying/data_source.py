"""The Spark data source `lockstep_snapshot`: a table as it was when the snapshot was taken.

Reads the ranges of a running snapshot's plan, with each connection pinned to the exported snapshot,
and returns the columns of a mirror (`sinks.delta.layout`) as Arrow batches. The plan comes from the
log, so the snapshot must be running.

    spark.dataSource.register(SnapshotSource)
    spark.read.format("lockstep_snapshot").option("config", "lockstep.yaml")
         .option("table", "public.users").load()

The driver reads the configuration file; executors get its content, passwords included, in the
pickled reader: it is in no option, plan or log of Spark's.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from cdc.config import load
from cdc.encode.masks import ColumnMask
from cdc.errors import ConfigError
from cdc.keyring.opening import ciphers_of
from cdc.log.records import SchemaRecord
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.rate import Pace
from cdc.snapshot.initial.records import PageRange, SnapshotPlan, SnapshotTable
from cdc.snapshot.initial.task import masks, prove, range_rows
from cdc.source.pinned import connect_for_rows, pinned, portable_config, portable_dsn
from lockstep.jobs.copying import adbc
from lockstep.jobs.copying.arrow_rows import ArrowRows, columns
from lockstep.sinks.delta import layout as delta_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from cdc.config import Config

NAME: Final = "lockstep_snapshot"


@dataclass(frozen=True)
class CopiedTable:
    """One published table's part of a plan: its version, its tables and ranges, by number."""

    version: SchemaRecord
    tables: dict[int, SnapshotTable]
    ranges: tuple[PageRange, ...]
    snapshot: str
    tasks: int
    lsn: int
    taken_at_us: int


def table_of(plan: SnapshotPlan, name: str) -> CopiedTable:
    """Return the plan's part for the table `schema.table`; raise ConfigError if it has none."""
    for version in plan.schemas.values():
        if f"{version.schema}.{version.table}" == name:
            break
    else:
        raise ConfigError(
            f"the running snapshot has no table {name}",
            hint="name it as the configuration does, schema.table; `cdc status` lists them",
        )
    tables = {
        index: planned
        for index, planned in enumerate(plan.tables)
        if planned.schema_id == version.schema_id
    }
    ranges = tuple(each for index, planned in tables.items() for each in planned.ranges(index))
    return CopiedTable(
        version, tables, ranges, plan.snapshot, plan.tasks, int(plan.lsn), plan.taken_at_us
    )


@dataclass
class Ranges(InputPartition):
    """The ranges that one Spark task reads."""

    ranges: tuple[PageRange, ...]

    def __init__(self, ranges: tuple[PageRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges


class SnapshotSource(DataSource):
    """Options: `config`, a path, and `table`; or `planned`, in place of the log's plan."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        config, table = self._asked()
        with closing(connect_for_rows(config)) as connection:
            return spark_schema(config, table.version, masks(config, connection, table.version))

    def reader(self, schema: StructType) -> DataSourceReader:
        config, table = self._asked()
        with closing(connect_for_rows(config)) as connection:
            hidden = masks(config, connection, table.version)
            return SnapshotReader(portable_config(config, connection), table, hidden, schema)

    def _asked(self) -> tuple[Config, CopiedTable]:
        config = load(Path(self.options.get("config", "lockstep.yaml")))
        if planned := self.options.get("planned"):
            return config, _from_option(planned)
        return config, table_of(_running(config), self.options["table"])


def as_option(table: CopiedTable) -> str:
    """Return a table as the data source's option `planned`. It holds no secrets."""
    return b64encode(pickle.dumps(table)).decode()


def _from_option(text: str) -> CopiedTable:
    table = pickle.loads(b64decode(text))  # noqa: S301 - of `as_option`'s making
    assert isinstance(table, CopiedTable)
    return table


def _running(config: Config) -> SnapshotPlan:
    plan = topic.read(config).plan
    if plan is None:
        raise ConfigError(
            f"no snapshot of the pipeline {config.pipeline} is running",
            hint="this data source reads what a running snapshot plans: start one first",
        )
    return plan


def spark_schema(
    config: Config, version: SchemaRecord, hidden: Sequence[ColumnMask | None]
) -> StructType:
    """Return the schema of a table version's mirror."""
    parts = columns(version, list(hidden), money_digits=config.values.money_fraction_digits)
    named = [(part.name, part.type) for part in parts]
    return StructType.fromJson(delta_layout.schema(named, f"{version.schema}.{version.table}"))


class SnapshotReader(DataSourceReader):
    """Plans in the driver, reads in executors."""

    def __init__(
        self,
        config: Config,
        table: CopiedTable,
        hidden: list[ColumnMask | None],
        schema: StructType,
    ) -> None:
        self._config, self._table, self._hidden, self._schema = config, table, hidden, schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition per task, with ranges dealt out in turn to mix their sizes."""
        many = max(1, min(self._table.tasks, len(self._table.ranges)))
        return [Ranges(self._table.ranges[task::many]) for task in range(many)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Ranges)
        config, table = self._config, self._table
        schema = to_arrow_schema(self._schema, timezone="UTC")
        ciphers = ciphers_of(config)
        rows = ArrowRows(
            columns(table.version, self._hidden, money_digits=config.values.money_fraction_digits),
            schema,
            lsn=table.lsn,
            at_us=table.taken_at_us,
            ciphers=ciphers,
        )
        pace = Pace(config.snapshot, table.tasks)
        with (
            closing(connect_for_rows(config)) as connection,
            closing(adbc.Reading(portable_dsn(connection))) as reading,
        ):
            for each in partition.ranges:
                planned = table.tables[each.table]
                rows.seq = each.first_seq
                # The lock that one connection holds protects what the other reads.
                with pinned(connection, table.snapshot):
                    prove(connection, planned)
                    query = rows.query(planned.outputs, range_rows(planned, each))
                    for batch in reading.batches(query, table.snapshot):
                        pace.wait(batch.num_rows, batch.nbytes)
                        yield rows.batch(batch)
                assert rows.seq <= each.first_seq + each.capacity, "a range's block holds its rows"
        if ciphers:
            ciphers.make_durable()
