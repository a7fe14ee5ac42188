"""Archive a large cut in executors: each reads, checks and writes one partition's records.

The Kafka reader gives a task one partition in the order of its offsets. The task returns its span,
the actions that add its files, and what differs from the frontiers' digests; the driver commits. A
task that is repeated writes its files again under other names; Spark uses the result of one
attempt, and no commit names the files of another.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from lockstep.jobs.archiving.rows import CutRows
from lockstep.jobs.archiving.writing import ArchiveWriter
from lockstep.jobs.spark.kafka_options import reading
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.sinks.delta.actions import Files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange, Partition
    from cdc.verify.digests import SpanCheck

_RESULT: Final = "result string"
_ARROW_BYTES: Final = "8m"
_ARROW_ROWS: Final = 10_000


def archive(
    spark: SparkSession,
    config: Config,
    number: int,
    ranges: Mapping[Partition, OffsetRange],
    checks: Mapping[Partition, SpanCheck],
) -> list[dict[str, Any]]:
    """Write the ranges' records to files, as those of a cut; return what each task returns."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(_ARROW_ROWS))
    spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", _ARROW_BYTES)
    options = reading(config, ranges)
    frame = spark.read.format("kafka").options(**options).load()
    frame = frame.select("topic", "partition", "offset", "key", "value")
    place = (config.archive.path or "", dict(config.archive.storage))
    task = partial(_archived, place, config.prefix, number, dict(checks))
    return [json.loads(row.result) for row in in_arrow(frame, task, _RESULT).collect()]


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
        columns = batch.to_pydict()
        topic, partition = columns["topic"][0], columns["partition"][0]
        if rows is None:
            rows, check = CutRows(prefix, number, topic, partition), checks[topic, partition]
        read = columns["offset"], columns["key"], columns["value"]
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
