"""Run a snapshot's tasks in the session of a Spark driver: a runner for `cdc.snapshot`.

The tasks that write to the log run first, then the tables that are copied directly into their
mirrors. Finished ranges are read from the log, as in every runner; Spark is only polled for its
end.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from cdc.errors import CDCError, ConfigError, UnavailableError, UnreadableError
from cdc.log.client import DAMAGED
from cdc.runtime import bugs
from cdc.snapshot.initial.topic import RangeTail
from cdc.source.pinned import connect_for_rows, portable_config
from lockstep.jobs.copying import direct, tasks

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.snapshot.initial.progress import SnapshotProgress
    from cdc.snapshot.initial.records import SnapshotPlan

# How many lines of a failure in Spark are kept to show where it is.
_PLACES: Final = 8
_NO_DELTA: Final = "DATA_SOURCE_NOT_FOUND"
# What Kafka's Java client, which reads for executors, says of a batch with another checksum.
_DAMAGED: Final = re.compile(
    r"Record batch for partition (\S+)-(\d+) at offset (\d+) is invalid, cause: (.*)"
)
_OURS: Final = re.compile(r"cdc\.errors\.(\w+): (.*)")
# Spark's message when a worker has not connected in PythonWorkerFactory's ten seconds.
_NO_ANSWER: Final = "failed to connect back"
_STOP_SECONDS: Final = 20.0


class InSession:
    """One run, which starts when the object is created."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        config_file: Path,
        plan: SnapshotPlan,
        left: list[int],
    ) -> None:
        """`left` has the tasks with remaining ranges."""
        self._spark, self._config, self._file, self._plan = spark, config, config_file, plan
        self._group = f"snapshot-{plan.pipeline}-{time.monotonic_ns()}"
        self._following = RangeTail(config, plan.generation)
        self._pool = ThreadPoolExecutor(1, "snapshot")
        self._ended: Future[None] = self._pool.submit(self._run, left)

    def turn(self, seconds: float, progress: SnapshotProgress) -> bool:
        """Wait at most `seconds`; return whether all is copied. Raises the error that ended it."""
        wait_for([self._ended], seconds)
        # Checked before the records are taken, so that its last records are included.
        ended = self._ended.done()
        for record in self._following.take():
            progress.finished(record)
        if ended:
            self._ended.result()
        return ended

    def stop(self) -> None:
        """End the run; open transactions are aborted."""
        if not self._ended.done():
            self._spark.sparkContext.cancelJobGroup(self._group)
            wait_for([self._ended], _STOP_SECONDS)
        self._pool.shutdown(wait=False)
        self._following.close()

    def _run(self, left: list[int]) -> None:
        spark, config, plan = self._spark, self._config, self._plan
        context = spark.sparkContext
        context.setJobGroup(
            self._group,
            f"snapshot of {plan.pipeline}, generation {plan.generation}",
            interruptOnCancel=True,
        )
        by_log = {
            number % plan.tasks
            for number, each in enumerate(plan.ranges())
            if plan.tables[each.table].kind == "log"
        }
        connection = connect_for_rows(config)
        with connection:
            carrying = portable_config(config, connection)
        try:
            tasks.copy(spark, carrying, plan, [task for task in left if task in by_log])
            direct.copy(spark, config, self._file, plan)
        except (PySparkException, Py4JError) as error:
            raise translated(error) from error


def is_ours(error: Exception) -> bool:
    """Return whether Spark reports an error of ours that a task has raised."""
    return _OURS.search(str(error)) is not None


def translated(error: Exception) -> CDCError:
    """Return Spark's error as ours: the last line of ours in a task's traceback decides."""
    text = str(error)
    if _NO_DELTA in text and "delta" in text:
        return ConfigError(
            "Spark does not know Delta Lake",
            hint='spark-submit --jars "$(cdc spark jars)" …',
        )
    ours = _OURS.findall(text)
    if ours:
        kind, what = ours[-1]
        if kind == UnreadableError.__name__:
            return UnreadableError(what, hint=DAMAGED)
        return tasks.Failure(kind, what, "Spark has tried it several times").error()
    if damaged := _DAMAGED.search(text):
        topic, number, offset, cause = damaged.groups()
        what = f"reading {topic} [{number}]: the batch at offset {offset} is damaged: {cause}"
        return UnreadableError(what, hint=DAMAGED)
    if _NO_ANSWER in text:
        return UnavailableError(
            "Spark gave up one of its Python workers: it had not answered within ten seconds of its"
            " start, Spark's limit",
            hint="the machine has too little CPU time for what runs on it: run less in one"
            " job, or elsewhere; it is started again",
        )
    places = " / ".join(bugs.places(text).splitlines()[:_PLACES])
    return UnavailableError(
        f"Spark could not do it: {places or type(error).__name__}",
        hint="see Spark's own log; what is done is kept, so submit the job again",
    )
