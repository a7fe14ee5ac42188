"""The rows of a table by `COPY … TO STDOUT (FORMAT binary)`, in chunks of many rows.

A chunk is what one read of the connection returned: consecutive CopyData messages, a row in each,
the last perhaps not complete yet, and padding as in `cdc.decode.frames`. The format's header and trailer
are removed. The consumer of a chunk reports with `taken` where it stopped.

    'd'  length  columns  length  value  length  value …      (-1: NULL)
     1      4       2        4              4

As `cdc.source.wire` does for a stream, this reads the socket itself once libpq has sent what comes
before, and leaves the connection in the state that libpq knows: it starts and ends between two
commands. Where the socket is encrypted, libpq reads.

Memory is limited to one read, or one row, for any table size. Reads block for as long as Postgres
needs.

https://www.postgresql.org/docs/current/sql-copy.html (binary format)
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from struct import Struct, pack
from typing import TYPE_CHECKING, Final, Protocol

import psycopg
from psycopg import errors, pq

from cdc.decode.frames import COPY_DATA, HEADER_SIZE, PADDING, length, whole
from cdc.errors import ProtocolError
from cdc.source.connection import translated
from cdc.source.wire import BUFFER_BYTES, READ_BYTES, fields, raise_error

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from cdc.source.catalog import Connection

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


class _Wire(Protocol):
    def read(self) -> bytes: ...

    def close(self) -> None: ...


class Copying:
    """One COPY's rows. Close it before the connection is used again."""

    def __init__(self, connection: Connection, query: str) -> None:
        """Send `query`, a COPY to STDOUT in binary format."""
        self._doing = "reading rows by COPY"
        self._pgconn = connection.pgconn
        self._parts: list[bytes] = []
        self._have, self._need = 0, HEADER_SIZE
        self._begun = self._ended = False
        self._error: bytes | None = None
        encrypted = self._pgconn.ssl_in_use or self._pgconn.used_gssapi
        with translated(self._doing):
            self._wire: _Wire = (_Libpq if encrypted else _Socket)(self._pgconn, query.encode())

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
            while self._have < self._need:
                with translated(self._doing):
                    self._take(self._wire.read())
            chunk = b"".join((*self._parts, PADDING))
            self._parts, self._have, self._need = [], 0, HEADER_SIZE
            if self._begun and chunk[0] == COPY_DATA:
                return chunk
            self.taken(chunk, 0)
        return b""

    def taken(self, chunk: bytes, at: int) -> None:
        """Process what is in a chunk after `at`: the rest of a row, or messages that are no row.

        Raises ProtocolError at a complete row: the caller stopped there because it could not read
        it.
        """
        end, stopped_at = whole(chunk), at
        while end - at >= HEADER_SIZE:
            stop = at + 1 + length(chunk, at)[0]
            if stop > end:
                break
            if chunk[at] == COPY_DATA and self._begun and chunk[at:stop] != _TRAILER:
                if at == stopped_at:
                    raise ProtocolError(f"a message of {stop - at} bytes that is no row")
                break
            at = self._other(chunk, at, stop)
        if rest := chunk[at:end]:
            self._take(rest)

    def _take(self, part: bytes) -> None:
        # A row may be a gigabyte: its parts are put together once, when all of them have arrived.
        self._parts.append(part)
        self._have += len(part)
        if self._need == HEADER_SIZE <= self._have:
            if len(self._parts) > 1:
                self._parts = [b"".join(self._parts)]
            self._need = 1 + length(self._parts[0])[0]

    def _other(self, chunk: bytes, at: int, stop: int) -> int:
        """Process a complete message that is no row; return where the next one is."""
        kind = chunk[at]
        if kind == COPY_DATA:
            if self._begun:  # the trailer
                return stop
            return self._begin(chunk, at, stop)
        if kind == _ERROR:
            self._error = chunk[at:stop]
        elif kind == _READY:
            self._ended = True
            if self._error:
                with translated(self._doing):
                    raise_error(fields(self._error))
        elif kind not in _IGNORED and kind not in (_COPY_OUT, _COPY_DONE, _COMPLETE):
            raise ProtocolError(f"a message of type {bytes([kind])!r} in a COPY")
        return stop

    def _begin(self, chunk: bytes, at: int, stop: int) -> int:
        """Process the format's header; the first row may follow it in the same message."""
        body = at + HEADER_SIZE
        if chunk[body : body + len(_HEADER)] != _HEADER:
            raise ProtocolError("a COPY that begins with another header than the binary format's")
        self._begun = True
        body += len(_HEADER)
        if body < stop:
            self._take(pack(">cI", b"d", 4 + stop - body) + chunk[body:stop])
            self._take(chunk[stop : whole(chunk)])
            return whole(chunk)
        return stop


class _Socket:
    """The connection's own socket, from one command to the end of its answer."""

    def __init__(self, pgconn: pq.abc.PGconn, query: bytes) -> None:
        # A descriptor of its own, since both owners close theirs; libpq keeps the connection.
        self._socket = socket.socket(fileno=os.dup(pgconn.socket))
        self._socket.settimeout(None)
        with suppress(OSError):  # a Unix socket has its own sizes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        try:
            self._socket.sendall(_extended(query))
        except OSError as error:
            raise _broken(error) from error

    def read(self) -> bytes:
        try:
            came = self._socket.recv(READ_BYTES)
        except OSError as error:
            raise _broken(error) from error
        if not came:
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return came

    def close(self) -> None:
        os.set_blocking(self._socket.fileno(), False)  # as libpq had set it
        self._socket.close()


class _Libpq:
    """libpq's own calls, where only libpq can read the socket's data."""

    def __init__(self, pgconn: pq.abc.PGconn, query: bytes) -> None:
        self._pgconn = pgconn
        result = pgconn.exec_params(query, None)
        if result.status != pq.ExecStatus.COPY_OUT:
            raise errors.error_from_result(result)

    def read(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while size < READ_BYTES:
            n, data = self._pgconn.get_copy_data(0)
            if n < 0:
                parts.append(self._end())
                break
            parts += (pack(">cI", b"d", 4 + n), bytes(data))
            size += n
        return b"".join(parts)

    def _end(self) -> bytes:
        """Return ReadyForQuery, which libpq has consumed; raise what ended the COPY."""
        failed = None
        while (result := self._pgconn.get_result()) is not None:
            if result.status != pq.ExecStatus.COMMAND_OK:
                failed = failed or result
        if failed:
            raise errors.error_from_result(failed)
        return pack(">cIc", b"Z", 5, b"T")

    def close(self) -> None:
        """Nothing to do: the connection does it."""


def _extended(query: bytes) -> bytes:
    """Return Parse, Bind, Execute and Sync: for one statement, where Query would accept several."""
    parse = b"\0" + query + b"\0" + pack(">H", 0)
    bind = b"\0\0" + pack(">HHH", 0, 0, 0)
    execute = b"\0" + pack(">I", 0)
    messages = ((b"P", parse), (b"B", bind), (b"E", execute), (b"S", b""))
    return b"".join(kind + pack(">I", 4 + len(body)) + body for kind, body in messages)


def _broken(error: OSError) -> psycopg.OperationalError:
    return psycopg.OperationalError(f"the connection broke: {error.strerror}")
