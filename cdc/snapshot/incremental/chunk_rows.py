"""Publish a chunk's rows with the transaction that wrote its high watermark."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cdc.decode.binary_copy import row_values
from cdc.decode.pg_snapshot import PgSnapshot
from cdc.encode.unreadable import unreadable
from cdc.errors import CDCError

if TYPE_CHECKING:
    from cdc.encode.routes import TableRoute
    from cdc.sequence.sequencer import Sequencer
    from cdc.snapshot.incremental.chunk_state import Publish
    from cdc.snapshot.incremental.records import Key
    from cdc.source.chunks import Chunk


def last_key(chunk: Chunk) -> Key | None:
    """Return the key of the chunk's last row; raises UnicodeDecodeError where it is no text."""
    if not chunk.rows:
        return None
    names = [column.name for column in chunk.described.columns]
    values = row_values(chunk.rows[-1], 2, len(names))
    return tuple((values[names.index(name)] or b"").decode() for name in chunk.key)


def publish(sequencer: Sequencer, table: TableRoute, rows: Publish, *, empty_first: bool) -> int:
    """Publish a chunk's rows as changes of the current transaction; return how many.

    With `empty_first` the table is emptied before: followers may have rows that the source no
    longer has. Raises the CDCError of a row that can't be encoded, which names the column; the rows
    before it are published then.
    """
    try:
        return _publish(sequencer, table, rows, empty_first=empty_first)
    except CDCError:
        raise
    except (struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
        encoder = table.encoder
        columns = len(encoder.schema.columns)
        texts = (row_values(row, 2, columns) for row in rows.chunk.rows)
        bad = next((each for each in texts if encoder.at_fault(each) is not None), [])
        raise unreadable(encoder, bad, error) from error


def _publish(sequencer: Sequencer, table: TableRoute, rows: Publish, *, empty_first: bool) -> int:
    lsn, changes, chunk = rows.lsn, rows.changes, rows.chunk
    encoder, changed_keys = table.encoder, changes.keys
    if empty_first:
        position = (sequencer.seq + 1, sequencer.ordinal + 1, *sequencer.transaction_members)
        sequencer.publish(table, None, encoder.truncate(lsn, *position))
    snapshot = PgSnapshot.parse(chunk.snapshot)
    if changes.truncated_after(snapshot):
        return 0
    event = encoder.copied_format(lsn, *sequencer.transaction_members)
    count, changed = 0, {}
    for row in chunk.rows:
        seq, ordinal = sequencer.seq + 1, sequencer.ordinal + 1
        key, value = encoder.copied(row, 2, len(row), event, seq, ordinal)
        assert key is not None, "a table with a key"
        if key in changed_keys:
            changed[key] = encoder.copied_values(row, 2, len(row))
            continue
        sequencer.publish(table, key, value)
        count += 1
    for key, values in changes.reconcile(changed, snapshot).items():
        seq, ordinal = sequencer.seq + 1, sequencer.ordinal + 1
        sequencer.publish(table, key, event % (*values, ordinal, seq))
        count += 1
    return count
