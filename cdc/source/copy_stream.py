"""The rows of a table by `COPY … TO STDOUT (FORMAT binary)`, in chunks of many rows.

A chunk is what one read of the connection returned: consecutive CopyData messages, a row in each,
the last perhaps not complete yet, and padding as in `cdc.decode.frames`. The format's header and
trailer are removed. The consumer of a chunk reports with `taken` where it stopped.

    'd'  length  columns  length  value  length  value …      (-1: NULL)
     1      4       2        4              4

The bytes are read by `cdc.source.wire`, which leaves the connection in the state that libpq knows:
it starts and ends between two commands.

Memory is limited to one read, or one row, for any table size. Reads block for as long as Postgres
needs.

https://www.postgresql.org/docs/current/sql-copy.html (binary format)
"""

from __future__ import annotations

from struct import Struct, pack
from typing import TYPE_CHECKING, Final

from cdc.decode.frames import COPY_DATA, HEADER_SIZE, content_end, length
from cdc.errors import ProtocolError
from cdc.source.connection import translated
from cdc.source.wire import MessageBuffer, raise_error, wire

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from cdc.source.connection import Connection


# Of a row: its message's type and length, and its column count.
head = Struct(">BIH").unpack_from
HEAD_SIZE: Final = 7

_COPY_OUT, _COPY_DONE, _COMPLETE, _READY, _ERROR = b"HcCZE"
# ParameterStatus, NoticeResponse and NotificationResponse may arrive at any time, ParseComplete and
# BindComplete before the rows.
_IGNORED: Final = frozenset(b"SNA12")
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_HEADER: Final = _SIGNATURE + bytes(8)  # no flags, no extension
_TRAILER: Final = pack(">cIh", b"d", 6, -1)


class CopyStream:
    """One COPY's rows. Close it before the connection is used again."""

    def __init__(self, connection: Connection, query: str) -> None:
        """Send `query`, a COPY to STDOUT in binary format."""
        self._doing = "reading rows by COPY"
        self._pgconn = connection.pgconn
        self._buffer = MessageBuffer()
        self._started = self._ended = False
        self._error: bytes | None = None
        self._wire = wire(connection, replication=False)
        with translated(self._doing):
            self._wire.start(query.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._wire.close()
        if not self._ended:  # what still arrives can't be distinguished from the next answer
            self._pgconn.finish()

    def read(self) -> bytes:
        """Return a chunk that starts with a complete message; nothing once all rows are read.

        Raises the server's own error where it ended the COPY.
        """
        while not self._ended:
            while not (chunk := self._buffer.take()):
                with translated(self._doing):
                    self._buffer.add(self._wire.read())
            if self._started and chunk[0] == COPY_DATA:
                return chunk
            self.taken(chunk, 0)
        return b""

    def taken(self, chunk: bytes, at: int) -> None:
        """Process what is in a chunk after `at`: the rest of a row, or messages that are no row.

        Raises ProtocolError at a complete row: the caller stopped there because it could not read
        it.
        """
        end, stopped_at = content_end(chunk), at
        while end - at >= HEADER_SIZE:
            stop = at + 1 + length(chunk, at)[0]
            if stop > end:
                break
            if chunk[at] == COPY_DATA and self._started and chunk[at:stop] != _TRAILER:
                if at == stopped_at:
                    raise ProtocolError(f"a message of {stop - at} bytes that is no row")
                break
            at = self._other(chunk, at, stop)
        if rest := chunk[at:end]:
            self._buffer.add(rest)

    def _other(self, chunk: bytes, at: int, stop: int) -> int:
        """Process a complete message that is no row; return where the next one is."""
        kind = chunk[at]
        if kind == COPY_DATA:
            if self._started:  # the trailer
                return stop
            return self._begin(chunk, at, stop)
        if kind == _ERROR:
            self._error = chunk[at:stop]
        elif kind == _READY:
            self._ended = True
            if self._error:
                with translated(self._doing):
                    raise_error(self._error)
        elif kind not in _IGNORED and kind not in (_COPY_OUT, _COPY_DONE, _COMPLETE):
            raise ProtocolError(f"a message of type {bytes([kind])!r} in a COPY")
        return stop

    def _begin(self, chunk: bytes, at: int, stop: int) -> int:
        """Process the format's header; the first row may follow it in the same message."""
        body = at + HEADER_SIZE
        if chunk[body : body + len(_HEADER)] != _HEADER:
            raise ProtocolError("a COPY that begins with another header than the binary format's")
        self._started = True
        body += len(_HEADER)
        if body < stop:
            self._buffer.add(pack(">cI", b"d", 4 + stop - body) + chunk[body:stop])
            self._buffer.add(chunk[stop : content_end(chunk)])
            return content_end(chunk)
        return stop
