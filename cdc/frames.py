"""The frames of a replication stream, as they lie behind one another in a chunk of bytes.

A chunk is what a read of the connection gave: protocol messages one after another, the last of them
perhaps not whole yet, and `PADDING` zero bytes, so that what walks it may read a few bytes past an
end without asking first. A frame is a CopyData message that holds XLogData; it is never cut out of
its chunk, since a slice for each row would cost more than to pass two offsets.

    'd'  length  'w'  start LSN  end LSN  server clock  pgoutput message
     1      4     1       8         8          8        tag …

https://www.postgresql.org/docs/current/protocol-message-formats.html (CopyData)
https://www.postgresql.org/docs/current/protocol-replication.html (XLogData)
"""

from __future__ import annotations

from struct import Struct
from typing import Final

PADDING: Final = bytes(48)
PAD: Final = len(PADDING)

# A message's type byte and length, which counts itself but not the type byte.
HEADER_SIZE: Final = 5
length = Struct(">xI").unpack_from

COPY_DATA, XLOG_DATA, KEEPALIVE = b"dwk"

# Of a frame: the message's type and length, 'w', the start LSN.
head = Struct(">BIBQ").unpack_from
# Where the pgoutput message stands in a frame, tag first.
PAYLOAD: Final = 30
# In a stream block every message but a few has its transaction's xid behind the tag.
XID_SIZE: Final = 4


# What tells a row: from the tag to the column count stand relation id, kind of tuple and count. The
# kind tells a new row from one with an old image; all are known or not in one look-up.
ROW_END: Final = PAYLOAD + 8


def row_behind_xid(chunk: bytes, at: int) -> bytes:
    """Return what tells a row in a stream block, without the xid in its middle."""
    tag = at + PAYLOAD
    return chunk[tag : tag + 1] + chunk[tag + 1 + XID_SIZE : at + ROW_END + XID_SIZE]


def whole(chunk: bytes) -> int:
    """Return where the chunk's bytes end and its padding begins."""
    return len(chunk) - PAD
