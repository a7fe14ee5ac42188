"""A chunk at its high watermark: whether the stream agrees on its table; its rows as events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.decode import messages
from cdc.snapshot.incremental.visibility import Snapshot, row_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.encode.routes import Table
    from cdc.log.records import SchemaRecord
    from cdc.sequence.sequencer import Sequencer
    from cdc.snapshot.incremental.job import Flight
    from cdc.snapshot.incremental.records import Key
    from cdc.source.chunks import Chunk


def alike(version: SchemaRecord, chunk: Chunk) -> bool:
    """Whether the stream has described the table as the catalog had it during the chunk."""
    table = chunk.described
    told = tuple((c.name, c.type_id, c.type_modifier) for c in version.columns)
    return (
        (version.schema, version.table) == (table.schema, table.name)
        and version.replica_identity == table.replica_identity
        and told == tuple((c.name, c.type_id, c.type_modifier) for c in table.columns)
        and set(version.key) == set(chunk.key)
        and version.where == table.published.where
        and _numbered_alike(version, chunk)
    )


def _numbered_alike(version: SchemaRecord, chunk: Chunk) -> bool:
    """Whether the columns of these names are the same columns, as far as that is known.

    Where one is masked it must be known: a name may have passed to another column.
    """
    pairs = zip(version.columns, chunk.described.columns, strict=True)
    masked = any(column.mask for column in version.columns)
    return all(
        told.attnum == found.attnum or (told.attnum is None and not masked) for told, found in pairs
    )


def relation(chunk: Chunk) -> messages.Relation:
    """Return the relation message that the stream would send for the chunk's table."""
    table = chunk.described
    return messages.Relation(
        table.oid,
        table.schema,
        table.name,
        messages.ReplicaIdentity(table.replica_identity),
        tuple(
            messages.Column(each.key, each.name, each.type_id, each.type_modifier, each.attnum)
            for each in table.columns
        ),
    )


def last_key(chunk: Chunk) -> Key | None:
    """Return the key of the chunk's last row."""
    if not chunk.rows:
        return None
    names_ = [column.name for column in chunk.described.columns]
    values = row_values(chunk.rows[-1], 2, len(names_))
    return tuple((values[names_.index(name)] or b"").decode() for name in chunk.key)


def publish(sequencer: Sequencer, table: Table, flight: Flight, lsn: int) -> Iterator[None]:
    """Publish a chunk's rows as changes of the current transaction; yield after each.

    Before the first row of a snapshot with `anew`, the table is emptied: followers may have rows
    that the source no longer has.
    """
    chunk, window = flight.chunk, flight.window
    assert chunk is not None
    assert window is not None
    if flight.empties:
        place = (sequencer.seq + 1, sequencer.ordinal + 1, *sequencer.said)
        sequencer.publish(table, None, table.encoder.truncate(lsn, *place))
    snapshot = Snapshot.parse(chunk.snapshot)
    if window.emptied(snapshot):
        return
    encoder, keys = table.encoder, window.keys
    event = encoder.copied_format(lsn, *sequencer.said)
    touched = {}
    for row in chunk.rows:
        seq, ordinal = sequencer.seq + 1, sequencer.ordinal + 1
        key, value = encoder.copied(row, 2, len(row), event, seq, ordinal)
        assert key is not None, "a table with a key"
        if key in keys:
            touched[key] = encoder.copied_values(row, 2, len(row))
            continue
        sequencer.publish(table, key, value)
        yield
    for key, values in window.settle(touched, snapshot).items():
        seq, ordinal = sequencer.seq + 1, sequencer.ordinal + 1
        sequencer.publish(table, key, event % (*values, ordinal, seq))
        yield
