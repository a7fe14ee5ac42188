"""Archive a large cut in executors: each reads, checks and writes one partition's records.

The Kafka reader gives a task one partition in the order of its offsets. The task returns its span,
the actions that add its files, and what differs from the frontiers' digests; the driver commits. A
task that is repeated writes its files again under other names; Spark uses the result of one
attempt, and no commit names the files of another.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from lockstep.jobs.archiving.rows import CutRows
from lockstep.jobs.archiving.writing import ArchiveWriter
from lockstep.jobs.copying.driving import translated
from lockstep.jobs.spark.kafka_options import reading
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.sinks.delta.actions import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange, Partition
    from cdc.verify.digests import SpanCheck

_RESULT: Final = "result string"
_ARROW_BYTES: Final = "8m"
_ARROW_ROWS: Final = 10_000
# How long executors may take to end what is cancelled, and how often they are asked to.
_STOP_SECONDS: Final = 20.0
_ASK_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 0.02


class CutTasks:
    """Executors' work on a cut, which starts when the object is created."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        number: int,
        ranges: Mapping[Partition, OffsetRange],
        checks: Mapping[Partition, SpanCheck],
        before: CutTasks | None,
    ) -> None:
        """Write the ranges' records to files, as those of the cut with this number.

        Spark runs tasks in the order of their jobs: those of the cut `before` come first.
        """
        self._spark, self._before = spark, before
        self._group = f"archive-{config.pipeline}-{number}-{time.monotonic_ns()}"
        self._title = f"archive of {config.pipeline}, cut {number}"
        place = (config.archive.path or "", dict(config.archive.storage))
        task = partial(_archived, place, config.prefix, number, dict(checks))
        pool = ThreadPoolExecutor(1, "archive-cut")
        self._ended = pool.submit(self._run, reading(config, ranges), task)
        pool.shutdown(wait=False)

    def _run(
        self,
        options: dict[str, str],
        task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    ) -> list[dict[str, Any]]:
        spark = self._spark
        spark.sparkContext.setJobGroup(self._group, self._title, interruptOnCancel=True)
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(_ARROW_ROWS))
        spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", _ARROW_BYTES)
        frame = spark.read.format("kafka").options(**options).load()
        frame = frame.select("topic", "partition", "offset", "key", "value")
        frame = in_arrow(frame, task, _RESULT)
        while self._before is not None and not self._before.has_job:
            time.sleep(_LOOK_SECONDS)
        self._before = None
        return [json.loads(row.result) for row in frame.collect()]

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    @property
    def has_job(self) -> bool:
        """Whether Spark knows its tasks."""
        tracker = self._spark.sparkContext.statusTracker()
        return self.has_ended or bool(tracker.getJobIdsForGroup(self._group))

    def results(self) -> list[dict[str, Any]]:
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
    place: tuple[str, dict[str, str]],
    prefix: str,
    number: int,
    checks: dict[Partition, SpanCheck],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Archive what a task reads; runs in an executor."""
    writer = ArchiveWriter(Files(*place))
    rows: CutRows | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        if rows is None:
            topic, partition = batch["topic"][0].as_py(), batch["partition"][0].as_py()
            rows, check = CutRows(prefix, number, topic, partition), checks[topic, partition]
        # Of the other columns no object is made for each record.
        read = [batch[name].to_pylist() for name in ("offset", "key", "value")]
        check.add(*read)
        writer.add(rows.add(*read))
    if rows is None:
        return
    result = {
        "topic": topic,
        "partition": partition,
        "events": rows.events,
        "records": rows.tree.count,
        "root": rows.tree.root().hex(),
        "actions": writer.finish(),
        "differences": [[found.what, found.is_short] for found in check.finish()],
    }
    yield pa.RecordBatch.from_pydict({"result": [json.dumps(result)]})
