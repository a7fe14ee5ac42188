"""Archive a large cut in executors: each task reads, checks and writes some partitions' records.

Tasks read with librdkafka, as the driver does for small cuts: of a large partition one task takes
all, in the order of its offsets. It returns what it has read, the actions that add its files, and
what differs from the frontiers' digests; the driver commits. A task that is repeated writes its
files again under other names; Spark uses the result of one attempt, and no commit names the files
of another.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.log.ranges import RangeReader
from lockstep.jobs.archiving.rows import CutRows
from lockstep.jobs.archiving.writing import ArchiveWriter
from lockstep.jobs.copying.driving import translated
from lockstep.jobs.cuts.task_ranges import by_task
from lockstep.jobs.spark.garbage import collect_seldom
from lockstep.jobs.spark.kafka_options import carried
from lockstep.sinks.delta.actions import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange, Partition
    from cdc.verify.digests import DigestDifference, SpanCheck
    from lockstep.sinks.delta.actions import Action

# How long executors may take to end what is cancelled, and how often they are asked to.
_STOP_SECONDS: Final = 20.0
_ASK_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 0.02


class TaskRange(NamedTuple):
    """What a task reads of one partition, and what that is compared with."""

    place: Partition
    wanted: OffsetRange
    check: SpanCheck


class TaskPart(NamedTuple):
    """What a task has archived of one partition."""

    place: Partition
    events: int
    records: int
    root: str  # of the Merkle tree over its records
    differences: list[DigestDifference]


class TaskResult(NamedTuple):
    """What a task has archived, and the actions that add its files."""

    parts: list[TaskPart]
    actions: list[Action]


class CutTasks:
    """Executors' work on a cut, which starts when the object is created."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        number: int,
        ranges: Mapping[Partition, tuple[OffsetRange, int]],
        checks: Mapping[Partition, SpanCheck],
        before: CutTasks | None,
    ) -> None:
        """Write the ranges' records to files, as those of the cut with this number.

        Each range is given with about how many events it has.
        Spark runs tasks in the order of their jobs: those of the cut `before` come first.
        """
        self._spark, self._before = spark, before
        self._group = f"archive-{config.pipeline}-{number}-{time.monotonic_ns()}"
        self._title = f"archive of {config.pipeline}, cut {number}"
        tasks = [
            [TaskRange(place, wanted, checks[place]) for place, wanted in each.items()]
            for each in by_task(ranges)
        ]
        archive = config.archive.path or "", dict(config.archive.storage)
        do = partial(_archived, carried(config), archive, config.prefix, number)
        pool = ThreadPoolExecutor(1, "archive-cut")
        self._ended = pool.submit(self._run, tasks, do)
        pool.shutdown(wait=False)

    def _run(
        self, tasks: list[list[TaskRange]], do: Callable[[list[TaskRange]], TaskResult]
    ) -> list[TaskResult]:
        context = self._spark.sparkContext
        context.setJobGroup(self._group, self._title, interruptOnCancel=True)
        results = context.parallelize(tasks, len(tasks)).map(do)
        while self._before is not None and not self._before.has_job:
            time.sleep(_LOOK_SECONDS)
        self._before = None
        return results.collect()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    @property
    def has_job(self) -> bool:
        """Whether Spark knows its tasks."""
        tracker = self._spark.sparkContext.statusTracker()
        return self.has_ended or bool(tracker.getJobIdsForGroup(self._group))

    def results(self) -> list[TaskResult]:
        """Return what each task returns, once all have ended; raise what one has raised."""
        try:
            return self._ended.result()
        except Exception as error:
            raise translated(error) from error

    def stop(self) -> None:
        """End the work. What it has written no commit names."""
        until = time.monotonic() + _STOP_SECONDS
        while not self._ended.done() and time.monotonic() < until:
            # Once is not enough: the job may not be known to Spark yet.
            with suppress(Exception):  # the JVM may have ended
                self._spark.sparkContext.cancelJobGroup(self._group)
            wait_for([self._ended], _ASK_SECONDS)


def _archived(
    config: Config,
    archive: tuple[str, dict[str, str]],
    prefix: str,
    number: int,
    ranges: list[TaskRange],
) -> TaskResult:
    """Archive a task's ranges; runs in an executor."""
    collect_seldom()
    writer = ArchiveWriter(Files(*archive))
    checks = {each.place: each.check for each in ranges}
    rows = {place: CutRows(prefix, number, *place) for place in checks}
    with closing(RangeReader(config)) as log:
        for place, read in log.columns({each.place: each.wanted for each in ranges}):
            checks[place].add(*read)
            writer.add(rows[place].add(*read))
    parts = [
        TaskPart(place, its.events, its.tree.count, its.tree.root().hex(), checks[place].finish())
        for place, its in rows.items()
    ]
    return TaskResult(parts, writer.finish())
