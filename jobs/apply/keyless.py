"""Write a large cut's part of tables without a key in executors, which the driver then commits.

As `jobs.apply.buckets` does it by keys. Rows that are only added are written in the order of the
log. Where rows are updated or deleted, the cut's rows are divided among tasks by a hash of their
values (`sinks.delta.keyless_buckets`). Other tasks hash the rows of the mirror's files, which are
joined with the hashes of the rows to delete. Spark sorts on disk what does not fit into memory.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import StorageLevel

from lockstep.jobs.apply import buckets as by_key
from lockstep.jobs.apply.cut_events import among, prepared
from lockstep.jobs.cuts.by_key import every
from lockstep.jobs.cuts.pieces import pieces
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta import buckets, keyless_buckets
from lockstep.sinks.delta.keyless_buckets import Half, Taken
from lockstep.sinks.delta.targets import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame, Row

    from lockstep.jobs.apply.cut_events import TableShare
    from lockstep.jobs.cuts.reduce import Bounds
    from lockstep.sinks.contract import Change, Version
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.columns import ColumnReader
    from lockstep.sinks.delta.targets import Target

_HALVES: Final = "topic string, id binary, seq long, is_new boolean, data binary"
_FOUND: Final = "place string, path string, rows long, data binary, taken boolean"
_STORED: Final = "place string, path string, rows long, data binary, id binary"


def write(
    events: DataFrame,
    shares: Mapping[str, TableShare],
    bounds: Bounds,
    letters: DataFrame | None = None,
) -> dict[str, list[Action]]:
    """Write the events of these topics; return each one's actions. As `buckets.write`."""
    size = sum(share.bytes for share in shares.values())
    tasks = max(1, -(-size // by_key.TASK_BYTES))
    ordered = (
        prepared(events, shares, letters)
        .repartitionByRange(tasks, "topic", "seq")
        .sortWithinPartitions("topic", "seq")
        .select("topic", "key", "value")
    )
    found: dict[str, list[Action]] = {topic: [] for topic in shares}
    added = {topic: share for topic, share in shares.items() if not share.has_old}
    if added:
        mine = ordered.where(among(added))
        for row in in_arrow(mine, partial(_added, added, bounds), by_key.ACTIONS).collect():
            found[row.place].append(json.loads(bytes(row.action)))
    replaced = {topic: share for topic, share in shares.items() if share.has_old}
    if replaced:
        of_place = {share.target.place: topic for topic, share in replaced.items()}
        mine = ordered.where(among(replaced))
        for row in _replaced(mine, replaced, bounds, max(tasks, by_key.cores(events))):
            found[of_place[row.place]].append(json.loads(bytes(row.action)))
    return found


def _replaced(
    events: DataFrame, shares: Mapping[str, TableShare], bounds: Bounds, tasks: int
) -> list[Row]:
    """Return the actions of tables of which rows are updated or deleted."""
    halves = in_arrow(events, partial(_halves, shares, bounds), _HALVES)
    by_id = halves.repartition(tasks, "topic", "id").sortWithinPartitions(
        "topic", "id", halves.seq.desc(), halves.is_new.desc()
    )
    # Its tasks write files, and its rows are used twice.
    found = in_arrow(by_id, partial(_resolved, shares), _FOUND).persist(StorageLevel.DISK_ONLY)
    targets = {share.target.place: share.target for share in shares.values()}
    files = [
        (target.place, path)
        for target in targets.values()
        if not target.replaces
        for path in target.files
    ]
    all_pieces = found.where("NOT taken").select(*_names(by_key.PIECES))
    if files:
        spark = events.sparkSession
        paths = spark.createDataFrame(files, "place string, path string")
        stored = in_arrow(
            paths.repartition(len(files), "place", "path"), partial(_stored, targets), _STORED
        )
        taken = found.where("taken").selectExpr("place", "data id", "rows most")
        hits = stored.join(taken, ["place", "id"]).selectExpr(
            *_names(by_key.PIECES),
            "most",
            "row_number() OVER (PARTITION BY place, id ORDER BY path DESC, data DESC) number",
        )
        hits = hits.where("number <= most").select(*_names(by_key.PIECES))
        all_pieces = all_pieces.union(hits)
    try:
        return by_key.actions(all_pieces, targets).collect()
    finally:
        found.unpersist()


def _names(columns: str) -> list[str]:
    return [each.split()[0] for each in columns.split(", ")]


# -- in executors ----------------------------------------------------------------------------------


def changes_of(
    share: TableShare, bounds: Bounds, records: Iterable[tuple[bytes | None, bytes | None]]
) -> Iterator[Changes]:
    """Yield the changes of a table's events, a few at a time."""
    for some in every(pieces(records, most=by_key.PIECE_EVENTS), bounds):
        yield Changes(_versions(share), some)


def _added(
    shares: Mapping[str, TableShare], bounds: Bounds, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a task's rows, which replace none."""
    for topic, records in by_key.by_topic(batches):
        share = shares[topic]
        changes = (one for some in changes_of(share, bounds, records) for one in some.changes)
        rows = (one for one in changes if one.op != "t" and one.seq > share.target.seq)
        for action in written(share, rows):
            row = {"place": topic, "action": action}
            yield pa.RecordBatch.from_pylist([row], by_key.schema(by_key.ACTIONS))


def _halves(
    shares: Mapping[str, TableShare], bounds: Bounds, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the halves of a task's changes."""
    readers: dict[str, dict[int, ColumnReader]] = {}
    for topic, records in by_key.by_topic(batches):
        mine = readers.setdefault(topic, {})
        for changes in changes_of(shares[topic], bounds, records):
            found = keyless_buckets.halves(shares[topic].target, changes, mine)
            rows = [{"topic": topic, **half._asdict()} for half in found]
            yield pa.RecordBatch.from_pylist(rows, by_key.schema(_HALVES))


def _resolved(
    shares: Mapping[str, TableShare], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a task's new rows that remain; yield their files, and the stored rows to delete."""
    rows = (row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True))
    for topic, mine in groupby(rows, itemgetter(0)):
        share = shares[topic]
        for piece, is_taken in resolved(share, (Half(*row[1:]) for row in mine)):
            row = {**piece._asdict(), "taken": is_taken}
            yield pa.RecordBatch.from_pylist([row], by_key.schema(_FOUND))


def resolved(share: TableShare, halves: Iterable[Half]) -> Iterator[tuple[Piece, bool]]:
    """Write the new rows that remain of sorted halves; yield pieces.

    The files' actions; and, with True, the hash of stored rows to delete, and their number.
    """
    return _written(share, keyless_buckets.resolved(halves))


def written(share: TableShare, changes: Iterable[Change]) -> Iterator[bytes]:
    """Write new rows; yield the actions of their files."""
    return (piece.data for piece, _ in _written(share, changes))


def _written(share: TableShare, found: Iterable[Change | Taken]) -> Iterator[tuple[Piece, bool]]:
    place = share.target.place
    with buckets.parts_of(share.target) as parts:
        writing = keyless_buckets.KeylessWriting(share.target, _versions(share), parts)
        for each in found:
            if isinstance(each, Taken):
                yield Piece(place, "", each.rows, each.id), True
            else:
                writing.add(each)
        writing.flush()
    for file in parts.done:
        yield Piece(place, "", file.rows, json.dumps(file.action).encode()), False


def _versions(share: TableShare) -> tuple[Version, ...]:
    return tuple(share.versions[each] for each in sorted(share.versions))


def _stored(
    targets: Mapping[str, Target], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the hashes of the rows of a task's files."""
    for batch in batches:
        for row in batch.to_pylist():
            yield from keyless_buckets.hashed(targets[row["place"]], row["path"])
