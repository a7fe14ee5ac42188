"""The frames of a replication stream, one after another in a chunk of bytes.

A chunk is the result of one read of the connection: protocol messages one after another, the last
possibly incomplete, and `PADDING` zero bytes, so that code may read a few bytes past an end without
a check. A frame is a CopyData message that holds XLogData; it is never copied out of its chunk,
since a slice for each row would cost more than passing two offsets.

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

COPY_DATA, XLOG_DATA, PRIMARY_KEEPALIVE = b"dwk"

# Of a frame: the message's type and length, 'w', the start LSN.
head = Struct(">BIBQ").unpack_from
# The offset of the pgoutput message in a frame; its first byte is the tag.
PAYLOAD: Final = 30
# In a stream block every message but a few has its transaction's xid after the tag.
XID_SIZE: Final = 4


# The bytes that identify a row message: tag, relation id, kind of tuple and column count. The kind
# distinguishes a new row from one with an old image; one look-up checks all of them.
ROW_END: Final = PAYLOAD + 8


def row_head_without_xid(chunk: bytes, at: int) -> bytes:
    """Return the bytes that identify a row in a stream block, without the xid in their middle."""
    tag = at + PAYLOAD
    return chunk[tag : tag + 1] + chunk[tag + 1 + XID_SIZE : at + ROW_END + XID_SIZE]


def content_end(chunk: bytes) -> int:
    """Return where the chunk's bytes end and its padding starts."""
    return len(chunk) - PAD
