"""A plan's tasks as Spark tasks: each runs `cdc.snapshot.initial.task` in an executor.

Rows go from Postgres to Kafka inside the executor's Python; Spark only transfers the records of
finished ranges. If an executor is lost, Spark safely retries its task: the next attempt fences the
previous one, and reads from the log which ranges are done.

The configuration is pickled into what Spark sends to executors: its secrets are in no setting,
plan, page or log of Spark's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext

from cdc import errors
from cdc.errors import CDCError, InvariantError
from cdc.snapshot.initial.task import run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.snapshot.initial.records import RangeRecord, SnapshotPlan

# The first try included; spark.task.maxFailures has the same default.
_TRIES: Final = 4
# A fenced attempt is retried: the one that fenced it may have been a dead executor's last.
_PASSING: Final = (errors.UnavailableError, errors.FencedError, errors.OutcomeUnknownError)


@dataclass(frozen=True)
class Failure:
    """A task's final failure, as text, and which of our errors it is."""

    kind: str
    what: str
    hint: str

    def error(self) -> CDCError:
        """Return the error."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, CDCError):
            return kind(self.what, hint=self.hint)
        return InvariantError(self.what, hint=self.hint)


def copy(
    spark: SparkSession, config: Config, plan: SnapshotPlan, tasks: list[int]
) -> list[RangeRecord]:
    """Return what the tasks wrote to the log, once all have ended. Raises a task's error.

    `config` must be self-contained (`cdc.source.pinned.portable_config`).
    """
    if not tasks:
        return []
    context = spark.sparkContext
    context.setJobDescription(f"snapshot {plan.pipeline}, generation {plan.generation}")
    numbers = context.parallelize(tasks, len(tasks))
    records = []
    for each in numbers.mapPartitions(partial(copy_ranges, config, plan)).collect():
        if isinstance(each, Failure):
            raise each.error()
        records.append(each)
    return records


def copy_ranges(
    config: Config, plan: SnapshotPlan, numbers: Iterator[int]
) -> Iterator[RangeRecord | Failure]:
    """Copy a task's ranges in an executor; yield each one's record, or why the task failed."""
    for number in numbers:
        try:
            yield from run_task(config, plan, number)
        except CDCError as error:
            context = TaskContext.get()
            last = context is None or context.attemptNumber() + 1 >= _TRIES
            if isinstance(error, _PASSING) and not last:
                raise
            yield Failure(type(error).__name__, error.what, error.hint)
