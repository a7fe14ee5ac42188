"""Fold and write slices in executors; the driver commits.

A task that is repeated writes its files again under other names; Spark uses the result of one
attempt, and no commit names the files of another.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from lockstep.jobs.apply.buckets import in_arrow
from lockstep.jobs.compacting.layout import TableCount
from lockstep.jobs.compacting.slices import Slice
from lockstep.jobs.compacting.writing import written
from lockstep.jobs.copying.driving import translated
from lockstep.sinks.delta.actions import Files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from lockstep.jobs.compacting.slices import Past
    from lockstep.sinks.delta.actions import Action

_RESULT: Final = "result string"


def compact(
    spark: SparkSession, past: Past, parts: Sequence[Slice]
) -> tuple[list[TableCount], list[Action]]:
    """Return what slices hold, and the actions that add their files."""
    frame = spark.createDataFrame(
        [(number, json.dumps(part)) for number, part in enumerate(parts)],
        "number int, slice string",
    )
    frame = frame.repartitionByRange(len(parts), "number").select("slice")
    try:
        rows = in_arrow(frame, partial(_compacted, past), _RESULT).collect()
    except Exception as error:
        raise translated(error) from error
    counts: list[TableCount] = []
    actions: list[Action] = []
    for row in rows:
        found = json.loads(row.result)
        counts += [msgspec.convert(each, TableCount) for each in found["counts"]]
        actions += found["actions"]
    return counts, actions


def _compacted(past: Past, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write slices; runs in an executor."""
    files = Files(past.bases, past.storage)
    for batch in batches:
        for text in batch.column(0).to_pylist():
            counts, actions = written(past, files, [msgspec.json.decode(text, type=Slice)])
            result = json.dumps({"counts": counts, "actions": actions})
            yield pa.RecordBatch.from_pydict({"result": [result]})
