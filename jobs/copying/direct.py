"""Direct mode: copy a table's ranges into its Delta mirror, bypassing the log.

Groups of ranges become Delta commits, in order. A commit's `txnVersion` holds generation and group
under one `txnAppId` for all generations: so Delta itself skips a group that is already there, and
one of an older generation, however late its writer is. The first group of a generation replaces
everything in the table; the last one's `userMetadata` has the table's frontier: the snapshot's
consistent point. Until then the table has no frontier, and no follower treats it as complete.

When Delta has a group, its ranges are recorded in the log, like those of any table; if the job is
killed between the two steps, the next run finds the commit and records it. The table's topic stays
empty up to the frontier.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError, FencedError, GapError
from cdc.log.publisher import Publisher
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.records import RangeRecord, SnapshotPlan
from cdc.snapshot.initial.task import masks
from cdc.source.pinned import connect_for_rows, portable_config
from lockstep.jobs.copying import mirror_writers
from lockstep.jobs.copying.data_source import SnapshotReader, SnapshotSource, spark_schema, table_of
from lockstep.jobs.copying.mirror_writers import MirrorRows
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.lake import CommitInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.snapshot.initial.records import PageRange
    from lockstep.jobs.copying.data_source import CopiedTable

# The size of a group's pages: large enough that the seconds per commit do not matter, small enough
# to repeat after a failure.
GROUP_BYTES: Final = 2 << 30
_GENERATION_BITS: Final = 32


@dataclass(frozen=True)
class RangeGroup:
    """The ranges of one Delta commit."""

    number: int
    of: int
    ranges: tuple[PageRange, ...]

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.of


def copy(
    spark: SparkSession, config: Config, config_file: Path, plan: SnapshotPlan
) -> list[RangeRecord]:
    """Copy the remaining ranges of the plan's direct tables; return what was recorded. Blocks."""
    names = sorted(
        {
            f"{version.schema}.{version.table}"
            for planned in plan.tables
            if planned.kind == "direct"
            for version in [plan.schemas[planned.schema_id]]
        }
    )
    if not names:
        return []
    spark.dataSource.register(SnapshotSource)
    with closing(CopyLog(config, plan)) as log:
        return [
            record
            for name in names
            for record in MirrorCopy(spark, config, config_file, plan, table_of(plan, name)).fill(
                log
            )
        ]


def groups(ranges: Sequence[PageRange]) -> list[RangeGroup]:
    """Return the ranges in groups: the same for the same plan, whatever is already done."""
    found: list[list[PageRange]] = []
    total = 0
    for each in ranges:
        size = ((each.end_page or 1) - (each.first_page or 0)) * 8_192
        if not found or total + size > GROUP_BYTES:
            found.append([])
            total = 0
        found[-1].append(each)
        total += size
    return [RangeGroup(number, len(found), tuple(each)) for number, each in enumerate(found)]


class CopyLog:
    """The log's side: which of the plan's ranges it has, and the records to write."""

    def __init__(self, config: Config, plan: SnapshotPlan) -> None:
        self._config = config
        # Task 0's producer: its own ranges are already copied to the log, and a new generation
        # fences it.
        self._publisher = Publisher(config, "snapshot.0")
        self._publisher.open()
        known = topic.read(config)
        state = known.state
        if state is None or (state.stage, state.token) != ("running", plan.token):
            raise FencedError(
                f"generation {plan.generation} of the snapshot is no longer being copied",
                hint="another coordinator has started a new one, or it is done; this one stops",
            )
        self.done = known.done(plan)

    def lacks(self, group: RangeGroup) -> bool:
        """Return whether the log lacks the record of any range of the group."""
        return any(("rows", each.table, each.number) not in self.done for each in group.ranges)

    def record(self, records: list[RangeRecord]) -> None:
        """Write the records to the log, in one Kafka transaction."""
        for each in records:
            self._publisher.add(*topic.range_record(self._config, each))
        self._publisher.flush()
        self._publisher.commit()

    def close(self) -> None:
        """Abort an open transaction."""
        if self._publisher.started:
            self._publisher.abort()


class MirrorCopy:
    """One table's mirror."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        config_file: Path,
        plan: SnapshotPlan,
        table: CopiedTable,
    ) -> None:
        if config.delta.path is None:
            raise ConfigError(
                "tables are to be copied directly, and delta.path is not set",
                hint="set delta.path, where the mirrors lie; or snapshot: log",
            )
        self._config, self._plan, self._table = config, plan, table
        version = table.version
        self.path = delta_layout.path(config.delta.path, config.prefix, version.topic)
        names = [column.name for column in version.columns]
        self._writer = mirror_writers.writer(spark, config, config_file, self.path, names)
        self._app = f"snapshot-{config.pipeline}-{version.schema}.{version.table}"

    def fill(self, log: CopyLog) -> Iterator[RangeRecord]:
        """Write every group that is not recorded, in order; yield the records."""
        left = [group for group in groups(self._table.ranges) if log.lacks(group)]
        for group in left:
            began = time.monotonic()
            self.write(group)
            records = self.records(group, time.monotonic() - began)
            log.record(records)
            yield from records

    def write(self, group: RangeGroup) -> None:
        """Commit the group's rows; do nothing if Delta has the group, or a newer generation."""
        plan, config = self._plan, self._config
        table = replace(self._table, ranges=group.ranges)
        with closing(connect_for_rows(config)) as connection:
            hidden = masks(config, connection, table.version)
            schema = spark_schema(config, table.version, hidden)
            reader = SnapshotReader(portable_config(config, connection), table, hidden, schema)
        self._writer.write(
            MirrorRows(table, schema, reader, replaces=group.number == 0),
            CommitInfo(
                self._app, plan.generation << _GENERATION_BITS | group.number, self._facts(group)
            ),
        )

    def _facts(self, group: RangeGroup) -> dict[str, object]:
        plan = self._plan
        return {
            **self._group(group),
            "epoch": plan.epoch,
            "groups": group.of,
            "frontier": str(plan.lsn) if group.is_last else None,
        }

    def _group(self, group: RangeGroup) -> dict[str, object]:
        """The fields that distinguish this group from those of other generations and pipelines."""
        plan = self._plan
        return {
            "pipeline": plan.pipeline,
            "generation": plan.generation,
            "lsn": str(plan.lsn),
            "group": group.number,
        }

    def records(self, group: RangeGroup, seconds: float) -> list[RangeRecord]:
        """Return the records of the group's ranges, from the commit's metrics.

        The first record has the group's rows and bytes. Raises GapError if Delta skipped the group.
        """
        metrics = self._committed(group)
        if metrics is None:
            raise GapError(
                f"{self.path} has a snapshot that is not an older one of this pipeline: the rows"
                " were not written",
                hint="it is another pipeline's, or from before `cdc teardown`: move it away, or"
                " choose another delta.path",
            )
        rows, size = int(metrics["numOutputRows"]), int(metrics["numOutputBytes"])
        return [
            RangeRecord(
                generation=self._plan.generation,
                table=each.table,
                number=each.number,
                rows=0 if position else rows,
                bytes=0 if position else size,
                ends=(),
                seconds=0.0 if position else round(seconds, 3),
            )
            for position, each in enumerate(group.ranges)
        ]

    def _committed(self, group: RangeGroup) -> Mapping[str, str] | None:
        """Return the metrics of the commit that holds the group; None if there is none."""
        wanted = self._group(group)
        for user_metadata, metrics in self._writer.commits():
            found = delta_layout.facts(user_metadata)
            if {key: found.get(key) for key in wanted} == wanted:
                return metrics
        return None
