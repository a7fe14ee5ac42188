"""The states of one chunk of an incremental snapshot, from its request to its rows in the log.

    Requested -> Low -> Read -> High -> Published
    and from each of them -> Discarded

Pure: `advance` takes a state and an event, and returns the next state and the effects, which the
caller carries out in their order. The fetcher writes the low watermark, reads the rows and writes
the high watermark; the loop meets both watermarks in the stream, later. So the rows may arrive
before the stream has reached the low watermark, and `Requested` keeps them until then; they are
always known at the high one.

A chunk is published with the commit of the transaction that wrote its high watermark, or not at
all: whatever may have made its rows out of date discards it, and its range is read again. A
discarded chunk ignores everything that is still on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from cdc.decode.pg_snapshot import PgSnapshot
from cdc.snapshot.incremental.reconcile import ChunkChanges
from cdc.snapshot.incremental.records import TableName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.log.records import SchemaRecord
    from cdc.source.chunks import Chunk

# -- states ----------------------------------------------------------------------------------------


class Requested(Struct, frozen=True):
    """The fetcher reads it; the stream has not reached its low watermark."""

    chunk: Chunk | None = None


class Low(Struct, frozen=True):
    """The stream is after its low watermark: the table's changes are recorded."""

    lsn: int  # where the low watermark was committed
    relation_id: int
    schema_id: int | None  # the table's version there
    changes: ChunkChanges  # filled in place: a state per row change would copy them


class Read(Struct, frozen=True):
    """The stream is after its low watermark, and its rows were read."""

    low: Low
    chunk: Chunk


class High(Struct, frozen=True):
    """The stream is at its high watermark, and agrees; it is published with the commit."""

    lsn: int  # of the high watermark's message
    changes: ChunkChanges
    chunk: Chunk


class Published(Struct, frozen=True):
    """Its rows are in the log."""


class Discarded(Struct, frozen=True):
    """Its rows are not used."""


State: TypeAlias = Requested | Low | Read | High | Published | Discarded

# -- events ----------------------------------------------------------------------------------------


class LowReached(Struct, frozen=True):
    """The stream is at the low watermark."""

    lsn: int
    relation_id: int
    schema_id: int | None  # the table's version, if the stream has described it


class RowsRead(Struct, frozen=True):
    """The fetcher has read the rows."""

    chunk: Chunk


class HighReached(Struct, frozen=True):
    """The stream is at the high watermark."""

    lsn: int
    decoded: Mapping[int, int]  # commit LSNs by xid, of what may be invisible to a SELECT
    version: SchemaRecord | None  # the table's, if the stream has described it


class Committing(Struct, frozen=True):
    """The transaction that wrote the high watermark commits."""

    version: SchemaRecord
    table: TableName  # as the snapshot knows it
    key: tuple[str, ...] | None  # of the snapshot's earlier chunks, if there are any


class Dropped(Struct, frozen=True):
    """The snapshot has ended, or reads this range again."""


Event: TypeAlias = LowReached | RowsRead | HighReached | Committing | Dropped

# -- effects ---------------------------------------------------------------------------------------


class RecordChanges(Struct, frozen=True):
    """Add the table's changes to `changes` from here on."""

    relation_id: int
    changes: ChunkChanges


class StopRecording(Struct, frozen=True):
    """Add no more changes."""

    relation_id: int
    changes: ChunkChanges


class ReadOn(Struct, frozen=True):
    """The next chunk may be read: this one's end is known."""

    chunk: Chunk


class AwaitCommit(Struct, frozen=True):
    """Send `Committing` when the current transaction commits; describe the table before that."""

    describe: Chunk | None  # as the catalog had the table; None: as the stream has described it


class Publish(Struct, frozen=True):
    """Publish the rows as changes of the current transaction, reconciled with `changes`."""

    lsn: int
    changes: ChunkChanges
    chunk: Chunk


class Retry(Struct, frozen=True):
    """Read this range again, and what was requested after it."""

    why: str


class Restart(Struct, frozen=True):
    """Read from the start again: the table has another name or key."""

    table: TableName
    key: tuple[str, ...]
    why: str


class Fail(Struct, frozen=True):
    """End the snapshot."""

    what: str
    hint: str


Effect: TypeAlias = (
    RecordChanges | StopRecording | ReadOn | AwaitCommit | Publish | Retry | Restart | Fail
)
Transition: TypeAlias = tuple[State, tuple[Effect, ...]]

# -- transitions -----------------------------------------------------------------------------------


def advance(state: State, event: Event) -> Transition:  # noqa: PLR0911 - a return per transition
    """Return the state after the event, and what the caller must do."""
    match state, event:
        case Requested(chunk), LowReached(lsn, relation_id, schema_id):
            low = Low(lsn, relation_id, schema_id, ChunkChanges())
            recording = (RecordChanges(relation_id, low.changes),)
            return (low if chunk is None else Read(low, chunk)), recording
        case Requested(None), RowsRead(chunk):
            return Requested(chunk), (ReadOn(chunk),)
        case Low(), RowsRead(chunk):
            return Read(state, chunk), (ReadOn(chunk),)
        case Read(), HighReached():
            return _at_high(state, event)
        case ((Requested() | Low()), HighReached()):
            raise AssertionError("a high watermark is written after the low one and the rows")
        case High(), Committing():
            return _at_commit(state, event)
        case ((Low() | Read(Low())), Dropped()):
            low = state.low if isinstance(state, Read) else state
            return Discarded(), (StopRecording(low.relation_id, low.changes),)
        case ((Requested() | High()), Dropped()):
            return Discarded(), ()
        case _:
            # A copy of a low watermark: the first one counts, or changes would be missing. Rows
            # that are known already. And everything that reaches a chunk that is over.
            return state, ()


def _at_high(state: Read, event: HighReached) -> Transition:
    low, chunk, version = state.low, state.chunk, event.version
    stop = StopRecording(low.relation_id, low.changes)
    snapshot = PgSnapshot.parse(chunk.snapshot)
    late = [xid for xid, lsn in event.decoded.items() if lsn < low.lsn and not snapshot.sees(xid)]
    if late:
        return Discarded(), (
            stop,
            Retry(
                f"waits for transaction {late[0]}: its commit is in the log and not visible yet, as"
                " while it waits for a synchronous standby"
            ),
        )
    if low.changes.overflowed:
        return Discarded(), (stop, Retry("too much changed while a chunk was read"))
    high = High(event.lsn, low.changes, chunk)
    if version is not None and describes(version, chunk):
        return high, (stop, AwaitCommit(None))
    if version is not None and low.schema_id != version.schema_id:
        return Discarded(), (stop, Retry("the table was changed while a chunk was read"))
    return high, (stop, AwaitCommit(chunk))


def _at_commit(state: High, event: Committing) -> Transition:
    chunk, version = state.chunk, event.version
    if set(version.key) != set(chunk.key):
        fail = Fail(
            f"the key of {event.table} is {', '.join(version.key)} in the stream, and"
            f" {', '.join(chunk.key)} in the catalog",
            "run it again after the table's next change",
        )
        return Discarded(), (fail,)
    table = TableName(chunk.described.schema, chunk.described.name)
    if table != event.table or event.key not in (None, chunk.key):
        why = "the table was renamed, or its key changed: reading starts over"
        return Discarded(), (Restart(table, chunk.key, why),)
    return Published(), (Publish(state.lsn, state.changes, chunk),)


def describes(version: SchemaRecord, chunk: Chunk) -> bool:
    """Whether the stream has described the table as the catalog had it during the chunk."""
    table = chunk.described
    in_stream = tuple((c.name, c.type_id, c.type_modifier) for c in version.columns)
    return (
        (version.schema, version.table) == (table.schema, table.name)
        and version.replica_identity == table.replica_identity
        and in_stream == tuple((c.name, c.type_id, c.type_modifier) for c in table.columns)
        and set(version.key) == set(chunk.key)
        and version.where == table.published.where
        and _same_columns(version, chunk)
    )


def _same_columns(version: SchemaRecord, chunk: Chunk) -> bool:
    """Whether the columns of these names are the same columns, as far as that is known.

    Where one is masked it must be known: a name may have passed to another column.
    """
    pairs = zip(version.columns, chunk.described.columns, strict=True)
    masked = any(column.mask for column in version.columns)
    return all(
        ours.attnum == found.attnum or (ours.attnum is None and not masked) for ours, found in pairs
    )
