"""Write a large cut's part of Delta mirrors in executors, which the driver then commits.

Each task reduces its keys to their net changes, or of a history takes every change, writes these to
files and finds the rows that they replace (`sinks.delta.buckets`). The positions of these rows are
divided among tasks by file, which write the deletion vectors. The driver receives the actions of
the commits: its memory depends on the number of files, not of changes.

The cut's events are in buckets (`jobs.apply.divided`), of which a task reduces one at a time. Where
buckets do not do, Spark divides the events themselves among tasks by a hash of their keys, after
`jobs.apply.cut_events`, and sorts them by key and seq: what does not fit into memory is sorted on
disk.

A task that is repeated writes its files again under other names. Spark uses the result of one
attempt, and no commit names the files of another.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import msgspec
import pyarrow as pa

from cdc.errors import UnavailableError
from lockstep.jobs.apply.cut_events import among, prepared
from lockstep.jobs.apply.divided import events_of
from lockstep.jobs.cuts.by_key import by_key, every
from lockstep.jobs.cuts.pieces import pieces
from lockstep.jobs.cuts.reduce import newest, parsed
from lockstep.jobs.spark.garbage import collect_seldom
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.jobs.spark.shuffle import shuffled
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta import buckets
from lockstep.sinks.delta.targets import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark import SparkContext
    from pyspark.sql import DataFrame

    from lockstep.jobs.apply.cut_events import TableShare
    from lockstep.jobs.apply.divided import Buckets, Divided
    from lockstep.jobs.cuts.reduce import Bounds, Events
    from lockstep.jobs.spark.shuffle import Pieces as Shuffled
    from lockstep.sinks.contract import Change, Version
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.targets import Target

# The events of a task: a repeated one loses their work, and each compares the mirror's keys.
TASK_BYTES: Final = 256 << 20
# The events of a table with fewer go to one task: small files are slow to read.
_SPREAD_BYTES: Final = 8 << 20
# How many events are reduced at a time. Four times as many take 150 MB more, and as much CPU time.
PIECE_EVENTS: Final = 5_000
PIECES: Final = "place string, path string, rows long, data binary"
ACTIONS: Final = "place string, action binary"


def write(
    events: DataFrame,
    shares: Mapping[str, TableShare],
    bounds: Bounds,
    letters: DataFrame | None = None,
) -> dict[str, list[Action]]:
    """Write the events of these topics; return each one's actions.

    `events` has the columns `topic`, `key` and `value`; `letters` as in `prepared`.
    """
    size = sum(share.bytes for share in shares.values())
    tasks = max(cores(events), -(-size // TASK_BYTES))
    spread = [topic for topic, share in shares.items() if share.bytes >= _SPREAD_BYTES]
    of_topic = f"pmod(hash(topic), {tasks})"
    if spread:
        of_topic = f"IF({among(spread)}, pmod(hash(key), {tasks}), {of_topic})"
    targets = {share.target.place: share.target for share in shares.values()}
    sorted_ = (
        prepared(events, shares, letters)
        .selectExpr("*", f"{of_topic} task")
        .repartitionById(tasks, "task")
        .sortWithinPartitions("topic", "key", "seq")
        .select("topic", "key", "value")
    )
    found = in_arrow(sorted_, partial(_written, dict(shares), bounds), PIECES)
    ended = [piece for target in targets.values() for piece in files_to_end(target)]
    if ended:
        found = found.union(events.sparkSession.createDataFrame(ended, PIECES))
    by_place: dict[str, list[Action]] = {}
    for row in actions(found, targets).collect():
        by_place.setdefault(row.place, []).append(json.loads(bytes(row.action)))
    return {topic: by_place.get(share.target.place, []) for topic, share in shares.items()}


def write_divided(
    context: SparkContext, events: Divided, shares: Mapping[str, TableShare], bounds: Bounds
) -> dict[str, list[Action]]:
    """Write the events of these topics, which are in buckets; return each one's actions."""
    if not shares or events.pieces is None:
        return {}
    tables = {topic: events.tables[topic] for topic in shares}
    targets = {share.target.place: share.target for share in shares.values()}
    tasks = max(
        context.defaultParallelism,
        -(-sum(share.bytes for share in shares.values()) // TASK_BYTES),
    )
    write = partial(_written_buckets, dict(shares), bounds, tables, tasks)
    found = shuffled(events.pieces.coalesce(tasks), write, tasks)
    by_place: dict[str, list[Action]] = {}
    taken = 0
    for place, action, many in found.mapPartitions(partial(_marked_pieces, targets)).collect():
        if place:
            by_place.setdefault(place, []).append(json.loads(action))
        taken += many
    expected = sum(map(events.events, shares))
    if taken != expected:
        raise UnavailableError(
            f"tasks took {taken} of {expected} events that others had read before",
            hint="the log has lost events meanwhile, or executors were lost: the cut is repeated",
        )
    return {topic: by_place.get(share.target.place, []) for topic, share in shares.items()}


def cores(frame: DataFrame) -> int:
    """Return how many tasks run at the same time."""
    return int(frame.sparkSession.sparkContext.defaultParallelism)


def actions(pieces: DataFrame, targets: Mapping[str, Target]) -> DataFrame:
    """Return the actions, by `place`, of pieces of all tasks."""
    by_file = pieces.repartition(cores(pieces), "place", "path")
    by_file = by_file.sortWithinPartitions("place", "path")
    return in_arrow(by_file, partial(_marked, targets), ACTIONS)


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
    """Yield each topic of a task's events, which are sorted by it, with its events."""
    events = (event for batch in batches for event in zip(*batch.to_pydict().values(), strict=True))
    for topic, mine in groupby(events, itemgetter(0)):
        yield topic, ((key, value) for _, key, value in mine)


def written(
    share: TableShare, bounds: Bounds, records: Iterable[tuple[bytes | None, bytes | None]]
) -> Iterator[Piece]:
    """Write some keys of a table; `records` are their events, sorted by key and seq."""
    reduce = every if share.target.is_history else by_key
    changes = reduce(pieces(records, most=PIECE_EVENTS), bounds)
    return buckets.written(share.target, (Changes(_versions(share), each) for each in changes))


def _written_buckets(
    shares: Mapping[str, TableShare],
    bounds: Bounds,
    tables: Mapping[str, Buckets],
    tasks: int,
    task: int,
    pieces: Iterable[bytes],
) -> Shuffled:
    """Write a task's buckets; runs in an executor. Yields pieces by their files."""
    collect_seldom()
    found: Iterable[Piece] = ()
    if task == 0:
        found = (piece for share in shares.values() for piece in files_to_end(share.target))
    for piece in chain(found, written_buckets(shares, bounds, tables, pieces)):
        yield crc32(f"{piece.place} {piece.path}".encode()) % tasks, _encode(piece)


def written_buckets(
    shares: Mapping[str, TableShare],
    bounds: Bounds,
    tables: Mapping[str, Buckets],
    pieces: Iterable[bytes],
) -> Iterator[Piece]:
    """Write some buckets; the last piece has no place, and as `rows` the number of events."""
    taken = 0

    def changes(share: TableShare, some: Iterable[list[Events]]) -> Iterator[list[Change]]:
        nonlocal taken
        for bucket in some:
            taken += sum(len(values) for _, values in bucket)
            yield from _changes_of(share, bounds, bucket)

    for topic, some in events_of(pieces, tables):
        share = shares[topic]
        versions = _versions(share)
        found = (Changes(versions, each) for each in changes(share, some))
        yield from buckets.written(share.target, found)
    yield Piece("", "", taken, b"")


def _changes_of(share: TableShare, bounds: Bounds, bucket: list[Events]) -> Iterator[list[Change]]:
    """Yield the changes of a bucket, which has all events of its keys, in any order."""
    if share.target.is_history:
        events = chain.from_iterable(zip(*each, strict=True) for each in bucket)
        in_order = sorted(events, key=lambda event: (event[0], parsed(event[1]).source.seq))
        yield from every(pieces(in_order, most=PIECE_EVENTS), bounds)
    elif share.truncated is None:
        yield newest(bucket, bounds).changes
    else:
        yield newest([_above(share.truncated, each) for each in bucket], bounds).changes


def _above(seq: int, events: Events) -> Events:
    """Return the events above a seq."""
    left = [each for each in zip(*events, strict=True) if parsed(each[1]).source.seq > seq]
    return [key for key, _ in left], [value for _, value in left]


def _versions(share: TableShare) -> tuple[Version, ...]:
    return tuple(share.versions[each] for each in sorted(share.versions))


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


def _marked_pieces(
    targets: Mapping[str, Target], pieces: Iterable[bytes]
) -> Iterator[tuple[str, bytes, int]]:
    """Yield a task's actions, each with its place, and numbers of events; runs in an executor."""
    found = sorted(map(_decode, pieces), key=itemgetter(0, 1))
    placed = [piece for piece in found if piece.place]
    yield "", b"", sum(piece.rows for piece in found if not piece.place)
    for place, action in buckets.marked(targets, placed):
        yield place, action, 0


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Piece).decode


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
