"""A plan's tasks as Spark tasks: each runs `cdc.snapshot.task` where an executor is.

Rows go from Postgres to Kafka inside the executor's Python; Spark carries nothing but the records
of finished ranges. A lost executor's task is given out again by Spark and is harmless: the next
attempt fences the last, and the log tells it which ranges are done.

The configuration travels pickled, in what Spark sends to executors: its secrets are in no setting,
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
from cdc.snapshot.task import run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.snapshot.records import Plan, RangeRecord

# With the first try; spark.task.maxFailures is the same by default.
_TRIES: Final = 4
# A fenced attempt is tried again: the one that fenced it may have been a dead executor's last.
_PASSING: Final = (errors.UnavailableError, errors.FencedError, errors.OutcomeUnknownError)


@dataclass(frozen=True)
class Failure:
    """How a task failed in vain, in words, and by which of our errors."""

    kind: str
    what: str
    hint: str

    def error(self) -> CDCError:
        """Return the error."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, CDCError):
            return kind(self.what, hint=self.hint)
        return InvariantError(self.what, hint=self.hint)


def copy(spark: SparkSession, config: Config, plan: Plan, tasks: list[int]) -> list[RangeRecord]:
    """Return what the tasks put into the log, when all have ended. Raises what ended one.

    `config` must hold what it needs (`cdc.source.pinned.carried`).
    """
    if not tasks:
        return []
    context = spark.sparkContext
    context.setJobDescription(f"snapshot {plan.pipeline}, generation {plan.generation}")
    numbers = context.parallelize(tasks, len(tasks))
    records = []
    for each in numbers.mapPartitions(partial(_copy, config, plan)).collect():
        if isinstance(each, Failure):
            raise each.error()
        records.append(each)
    return records


def _copy(config: Config, plan: Plan, numbers: Iterator[int]) -> Iterator[RangeRecord | Failure]:
    for number in numbers:
        try:
            yield from run_task(config, plan, number)
        except CDCError as error:
            context = TaskContext.get()
            last = context is None or context.attemptNumber() + 1 >= _TRIES
            if isinstance(error, _PASSING) and not last:
                raise
            yield Failure(type(error).__name__, error.what, error.hint)
