"""Rows of a COPY → keys, events and partitions: the snapshot's hot path.

Pure, as `cdc.sequence.sequencer` is for the stream. A row's seq follows from its position in the
range. Everything else in its event except the values is the same for every row of a snapshot, and
is in the format.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cdc.decode import frames
from cdc.decode.binary_copy import row_values
from cdc.encode.encoder import TIMES, TX
from cdc.encode.partition import SIZES, murmur2
from cdc.encode.unreadable import unreadable
from cdc.errors import CDCError, InvariantError, ProtocolError
from cdc.source.copy_stream import HEAD_SIZE, head

if TYPE_CHECKING:
    from cdc.encode.routes import TableRoute
    from cdc.events import LSN
    from cdc.log.batch import Batch
    from cdc.snapshot.initial.records import PageRange

_ORDINAL = 0  # before the first change that commits after the snapshot


def transaction(epoch: int, lsn: LSN, us: int) -> tuple[bytes, bytes]:
    """Return the members of every event of a snapshot as of `lsn` and `us` after 1970.

    Its identity and its times.
    """
    times = TIMES % (us // 1_000, us, us * 1_000)
    return TX % (times, b"null", epoch, lsn >> 32, lsn & 0xFFFFFFFF), times


class RangeRows:
    """The rows of one range, encoded and put into the batch."""

    def __init__(self, table: TableRoute, event: bytes, each: PageRange, batch: Batch) -> None:
        """`event` is the table's `copied_format`."""
        self.table, self._event, self._batch = table, event, batch
        self._first_seq, self._capacity = each.first_seq, each.capacity
        self._range = each
        self.rows = 0
        self.bytes = 0  # as Postgres sent them

    def feed(self, chunk: bytes) -> int:
        """Encode the rows of `chunk`; return the offset after the last complete row.

        Raises ProtocolError on bytes that are not a row of the table.
        """
        table, end = self.table, frames.content_end(chunk)
        plain = end <= self._batch.plain_bytes  # no row can be too large for its topic
        copied, event = table.encoder.copied, self._event
        columns = len(table.encoder.schema.columns)
        appends = table.partitions[0].appends
        partitions, hashed, sizes = len(table.partitions), murmur2, SIZES
        data = frames.COPY_DATA
        at, last, size, row, take = 0, end - HEAD_SIZE, 0, 0, head
        seq = first_seq = self._first_seq + self.rows
        try:
            # Local names, no call but the encoder's and the partitioner's: as in `Sequencer.feed`.
            while at <= last:
                kind, length, count = take(chunk, at)
                stop = at + 1 + length
                if stop > end or count != columns or kind != data:
                    break
                row = at + HEAD_SIZE
                key, value = copied(chunk, row, stop, event, seq, _ORDINAL)
                size += len(value)
                if plain:
                    number = 0
                    if key is not None:
                        number = hashed(None, key, sizes[len(key)], partitions, None, None)
                    appends[number]({"key": key, "value": value})
                else:
                    table.send(key, value)
                seq += 1
                at = stop
        except CDCError:
            raise
        except (struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
            raise self._unreadable(chunk, row, error) from error
        self.rows += seq - first_seq
        self.bytes += at
        self._batch.bytes += size
        if self.rows > self._capacity:
            raise InvariantError(
                f"a range of {self._capacity} seqs has {self.rows} rows; they would be another's"
            )
        return at

    def _unreadable(self, chunk: bytes, row: int, error: Exception) -> ProtocolError:
        """Return the error of a row, with its table, its column and its pages; no value."""
        encoder = self.table.encoder
        texts = row_values(chunk, row, len(encoder.schema.columns))
        found = unreadable(encoder, texts, error)
        first, end = self._range.first_page, self._range.end_page
        where = "" if first is None else f", in the pages from ctid ({first},0) to ({end},0)"
        return ProtocolError(f"{found.what}{where}", hint=found.hint)
