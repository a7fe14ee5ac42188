"""Write a large cut's part of Delta mirrors in executors, which the driver then commits.

One Spark job of three stages. The cut's events are divided among tasks by a hash of their keys, and
sorted by key and seq: what does not fit into memory is sorted on disk. Each task reduces its keys
to their net changes, or of a history takes every change, writes these to files and finds the rows
that they replace (`sinks.delta.buckets`). The positions of these rows are divided among tasks by
file, which write the deletion vectors. The driver receives the actions of the commits: its memory
depends on the number of files, not of changes.

A task that is repeated writes its files again under other names. Spark uses the result of one
attempt, and no commit names the files of another.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.functions import expr

from cdc.log.dead_letters import DeadLetterAssembler
from lockstep.jobs.cuts.by_key import by_key, every
from lockstep.jobs.cuts.pieces import pieces
from lockstep.jobs.cuts.reduce import parsed
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta import buckets
from lockstep.sinks.delta.targets import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lockstep.jobs.cuts.reduce import Bounds
    from lockstep.sinks.contract import Version
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.targets import Target

# The events of a task: a repeated one loses their work, and each compares the mirror's keys.
TASK_BYTES: Final = 256 << 20
# The events of a table with fewer go to one task: small files are slow to read.
_SPREAD_BYTES: Final = 8 << 20
# How many events are reduced at a time. Four times as many take 150 MB more, and as much CPU time.
PIECE_EVENTS: Final = 5_000
_MARK: Final = '"dead":{"id":'
PIECES: Final = "place string, path string, rows long, data binary"
ACTIONS: Final = "place string, action binary"
SEQ: Final = "CAST(get_json_object(CAST(value AS STRING), '$.source.seq') AS LONG)"


class TableShare(NamedTuple):
    """A table's part of a cut."""

    target: Target
    versions: Mapping[int, Version]
    truncated: int | None
    bytes: int
    has_old: bool = False  # rows without a key are updated or deleted


def write(
    events: DataFrame,
    shares: Mapping[str, TableShare],
    bounds: Bounds,
    letters: DataFrame | None = None,
) -> dict[str, list[Action]]:
    """Write the events of these topics; return each one's actions.

    `events` has the columns `topic`, `key` and `value`; `letters` are the cut's records of dead
    letters, with `offset`, `key` and `value`, if an event points to one.
    """
    parallel = events.sparkSession.sparkContext.defaultParallelism
    size = sum(share.bytes for share in shares.values())
    tasks = max(parallel, -(-size // TASK_BYTES))
    spread = [topic for topic, share in shares.items() if share.bytes >= _SPREAD_BYTES]
    of_topic = f"pmod(hash(topic), {tasks})"
    if spread:
        chosen = ", ".join(map(quoted, spread))
        of_topic = f"IF(topic IN ({chosen}), pmod(hash(key), {tasks}), {of_topic})"
    events = events.where("key IS NOT NULL").selectExpr("topic", "key", "value", f"{SEQ} seq")
    for topic, share in shares.items():
        if share.truncated is not None and not share.target.is_history:
            events = events.where(f"NOT (topic = {quoted(topic)} AND seq < {share.truncated})")
    named = ["topic", "key", "value"]
    if letters is not None:
        events = with_letters(events, letters)
        named.append("letter")
    targets = {share.target.place: share.target for share in shares.values()}
    sorted_ = (
        events.selectExpr("*", f"{of_topic} task")
        .repartitionById(tasks, "task")
        .sortWithinPartitions("topic", "key", "seq")
        .select(*named)
    )
    found = in_arrow(sorted_, partial(_written, dict(shares), bounds), PIECES)
    ended = [piece for target in targets.values() for piece in files_to_end(target)]
    if ended:
        found = found.union(events.sparkSession.createDataFrame(ended, PIECES))
    by_place: dict[str, list[Action]] = {}
    for row in actions(found, targets).collect():
        by_place.setdefault(row.place, []).append(json.loads(bytes(row.action)))
    return {topic: by_place.get(share.target.place, []) for topic, share in shares.items()}


def actions(pieces: DataFrame, targets: Mapping[str, Target]) -> DataFrame:
    """Return the actions, by `place`, of pieces of all tasks."""
    parallel = pieces.sparkSession.sparkContext.defaultParallelism
    by_file = pieces.repartition(parallel, "place", "path").sortWithinPartitions("place", "path")
    return in_arrow(by_file, partial(_marked, targets), ACTIONS)


def with_letters(events: DataFrame, letters: DataFrame) -> DataFrame:
    """Return events with the column `letter`: the records of the dead letter that one points to."""
    by_id = letters.groupBy(expr("get_json_object(CAST(key AS STRING), '$.id') id")).agg(
        expr("sort_array(collect_list(struct(offset, key, value))) letter")
    )
    # An event without a letter gets an id of its own key, so that they are divided among tasks.
    pointed = events.selectExpr(
        "*",
        f"""IF(contains(CAST(value AS STRING), '{_MARK}'),
            get_json_object(CAST(value AS STRING), '$.source.dead.id'),
            concat('-', hash(key))) id""",
    )
    return pointed.join(by_id, "id", "left")


def _written(
    shares: Mapping[str, TableShare], bounds: Bounds, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a task's keys; runs in an executor."""
    for topic, records in by_topic(batches):
        for piece in written(shares[topic], bounds, records):
            yield pa.RecordBatch.from_pylist([piece._asdict()], schema(PIECES))


def by_topic(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[tuple[str, Iterator[tuple[bytes | None, bytes]]]]:
    """Yield each topic of a task's events, which are sorted by it, and its complete events."""
    events = (event for batch in batches for event in zip(*batch.to_pydict().values(), strict=True))
    for topic, mine in groupby(events, itemgetter(0)):
        yield topic, ((key, complete(value, *letter)) for _, key, value, *letter in mine)


def complete(value: bytes, letter: list[dict[str, Any]] | None = None) -> bytes:
    """Return an event: that of the dead letter that it points to, whose records are given."""
    if _MARK.encode() not in value:
        return value
    letters = DeadLetterAssembler()
    for record in letter or ():
        letters.add(record["key"], record["value"])
    pointer = parsed(value).source.dead
    assert pointer is not None, "text inside a row has its quotes escaped"
    return letters.event(pointer)


def written(
    share: TableShare, bounds: Bounds, records: Iterable[tuple[bytes | None, bytes | None]]
) -> Iterator[Piece]:
    """Write some keys of a table; `records` are their events, sorted by key and seq."""
    reduce = every if share.target.is_history else by_key
    changes = reduce(pieces(records, most=PIECE_EVENTS), bounds)
    versions = tuple(share.versions[each] for each in sorted(share.versions))
    return buckets.written(share.target, (Changes(versions, each) for each in changes))


def files_to_end(target: Target) -> list[Piece]:
    """Return a piece for each file of which a truncate ends the valid rows, changed or not."""
    if target.replaces or not target.truncates:
        return []
    return [Piece(target.place, path, 0, b"") for path in target.files]


def _marked(
    targets: Mapping[str, Target], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Mark replaced rows of a task's files as deleted; runs in an executor."""
    rows = (row for batch in batches for row in batch.to_pylist())
    found = buckets.marked(targets, (Piece(**row) for row in rows))
    for place, action in found:
        yield pa.RecordBatch.from_pylist([{"place": place, "action": action}], schema(ACTIONS))


def schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of columns that are written as for Spark."""
    types: dict[str, Any] = {
        "string": pa.string(),
        "long": pa.int64(),
        "binary": pa.binary(),
        "boolean": pa.bool_(),
    }
    named = (each.split() for each in columns.split(", "))
    return pa.schema([(name, types[kind]) for name, kind in named])


def quoted(text: str) -> str:
    """Return a text as a literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
