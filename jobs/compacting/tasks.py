"""Fold slices in executors, and write them to a base or a store; the driver commits.

A task that is repeated writes its files again under other names; Spark uses the result of one
attempt, and no commit names the files of another.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from lockstep.jobs.compacting.changes import PastChanges
from lockstep.jobs.compacting.slices import Slice
from lockstep.jobs.compacting.writing import written
from lockstep.jobs.copying.driving import translated
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.sinks.delta import buckets
from lockstep.sinks.delta.actions import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from lockstep.jobs.compacting.slices import Past
    from lockstep.sinks.contract import Sink
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.targets import Target

_RESULT: Final = "result string"
_decode: Final = msgspec.json.Decoder(Slice).decode


def compact(spark: SparkSession, past: Past, parts: Sequence[Slice]) -> list[Action]:
    """Fold slices and write them; return the actions that add the files."""
    results = _results(spark, partial(_compacted, past), parts)
    return [action for found in results for action in found["actions"]]


def _compacted(past: Past, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write slices; runs in an executor."""
    files = Files(past.bases, past.storage)
    for batch in batches:
        for text in batch.column(0).to_pylist():
            actions = written(past, files, [_decode(text)])
            yield pa.RecordBatch.from_pydict({"result": [json.dumps({"actions": actions})]})


class Restore(NamedTuple):
    """Writes slices to a store: to the files of a `target`, or by the sink's own `write`."""

    past: Past
    complete_rows: bool
    target: Target | None
    sink: Sink

    def written(self, reader: PastChanges, part: Slice) -> list[Action]:
        """Write a slice; return the actions for the target's commit."""
        changes = reader.changes(part, complete_rows=self.complete_rows)
        if self.target is None:
            for each in changes:
                self.sink.write(each)
            return []
        pieces = list(buckets.written(self.target, changes))
        assert not any(piece.path for piece in pieces), "an empty store has no rows to replace"
        return [json.loads(piece.data) for piece in pieces]


def restore(spark: SparkSession, task: Restore, parts: Sequence[Slice]) -> list[Action]:
    """Write slices to a store; return the actions for the target's commit."""
    return [
        action
        for found in _results(spark, partial(_restored, task), parts)
        for action in found["actions"]
    ]


def _restored(task: Restore, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write slices; runs in an executor."""
    reader = PastChanges(task.past)
    for batch in batches:
        for text in batch.column(0).to_pylist():
            actions = task.written(reader, _decode(text))
            yield pa.RecordBatch.from_pydict({"result": [json.dumps({"actions": actions})]})
    task.sink.close()


def _results(
    spark: SparkSession,
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    parts: Sequence[Slice],
) -> Iterator[dict[str, Any]]:
    """Yield what executors return for each slice."""
    frame = spark.createDataFrame(
        [(number, json.dumps(part)) for number, part in enumerate(parts)],
        "number int, slice string",
    )
    frame = frame.repartitionByRange(max(1, len(parts)), "number").select("slice")
    try:
        rows = in_arrow(frame, task, _RESULT).collect()
    except Exception as error:
        raise translated(error) from error
    yield from (json.loads(row.result) for row in rows)
