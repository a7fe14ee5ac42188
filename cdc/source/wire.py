"""The bytes of a replication connection, in chunks.

libpq returns one message per call and copies each three times: a microsecond per row, a sixth of
the time that the daemon spends on one. So once libpq has opened the connection, which includes TLS,
passwords and host lists, this module exchanges the few messages that streaming needs on the socket
itself, reading many rows at a time. Where the bytes on the socket are not the protocol's own (TLS
or GSS encryption), libpq reads, and its messages are joined into the same chunks.

Nothing blocks but `start`.

https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-COPY
https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from struct import pack
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import psycopg
from psycopg import errors, pq

from cdc.decode.frames import HEADER_SIZE, length
from cdc.errors import ProtocolError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

# The maximum size of one read: some five milliseconds' worth of rows.
READ_BYTES: Final = 256 << 10
# A walsender that finds the socket full waits and then sends much at once, which costs half as much
# per row as sending each row as it is produced. A larger buffer would seldom be full.
BUFFER_BYTES: Final = 128 << 10
# Linux' SO_BUF_LOCK, which Python has no name for: 0 lets the kernel size the buffer again.
_BUF_LOCK: Final = 72
# How long the server may take to answer the command that starts the stream.
_START_SECONDS: Final = 60.0

_COPY_BOTH, _COPY_DATA, _COPY_DONE, _ERROR, _NOTICE = b"WdcEN"
# What the server may send at any time, or after the end of a copy; not used here.
_IGNORED: Final = frozenset(b"SCZA")

Fields = dict[str, str]  # of an error or a notice, by their one-letter codes


class Wire(Protocol):
    """A started replication connection."""

    def start(self, command: bytes) -> None:
        """Send the command and return when the server streams. Raises psycopg's errors."""

    def read(self) -> bytes:
        """Return the bytes that have arrived, complete messages or not; empty if there are none."""

    def send(self, data: bytes) -> None:
        """Send a CopyData message, or what the socket accepts of it; the rest is sent later."""

    def make_room(self) -> None:
        """Let arriving data accumulate in the kernel while nothing reads it."""

    def other(self, message: bytes) -> None:
        """Process a message that is not CopyData. Raises what ended the stream."""

    def close(self) -> None:
        """Release what is not the connection's own."""


def wire(connection: psycopg.Connection[tuple[object, ...]], notice: Callable[[str], None]) -> Wire:
    """Return the connection's wire; `notice` gets the text of the server's warnings."""
    pgconn = connection.pgconn
    if pgconn.ssl_in_use or pgconn.used_gssapi:
        return _Libpq(connection, notice)
    return _Socket(pgconn, notice)


class _Socket:
    """The connection's own socket, once libpq has opened it."""

    def __init__(self, pgconn: pq.abc.PGconn, notice: Callable[[str], None]) -> None:
        # A descriptor of its own, since both owners close theirs; libpq keeps the connection.
        self._socket = socket.socket(fileno=os.dup(pgconn.socket))
        self._socket.settimeout(0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._roomy = False
        self._notice = notice
        self._unsent = b""
        self._begun = b""  # what arrived after the answer to the command

    def start(self, command: bytes) -> None:
        query = command + b"\0"
        self._put(b"Q" + pack(">I", 4 + len(query)) + query)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        came, at = b"", 0
        while True:
            while len(came) - at >= HEADER_SIZE:
                end = at + 1 + length(came, at)[0]
                if len(came) < end:
                    break
                if came[at] == _COPY_BOTH:
                    self._begun = came[end:]
                    return
                self.other(came[at:end])
                at = end
            if not poll.poll(_START_SECONDS * 1_000):
                raise psycopg.OperationalError("the server does not answer START_REPLICATION")
            came, at = came[at:] + self.read(), 0

    def read(self) -> bytes:
        if self._begun:
            begun, self._begun = self._begun, b""
            return begun
        if self._unsent:
            self._put(b"")
        try:
            came = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise psycopg.OperationalError(f"the connection broke: {error.strerror}") from error
        if not came:
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        if self._roomy and len(came) < READ_BYTES:  # what had accumulated has been read
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            self._roomy = False
        return came

    def make_room(self) -> None:
        # Linux 6.6 and later drop what a buffer of a fixed size has no room for, and with it the
        # peer's acknowledgements until the socket is read: our feedback is then not sent, and a
        # walsender that receives none gives up. A buffer that may grow drops nothing.
        if not self._roomy:
            self._roomy = True
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * BUFFER_BYTES)
            with suppress(OSError):  # Linux before 5.14 knows no such option
                self._socket.setsockopt(socket.SOL_SOCKET, _BUF_LOCK, 0)

    def send(self, data: bytes) -> None:
        self._put(b"d" + pack(">I", 4 + len(data)) + data)

    def _put(self, data: bytes) -> None:
        self._unsent += data
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return  # the server is busy sending; it reads ours before it times out
        except OSError as error:
            raise psycopg.OperationalError(f"the connection broke: {error.strerror}") from error
        self._unsent = self._unsent[sent:]

    def other(self, message: bytes) -> None:
        kind = message[0]
        if kind == _ERROR:
            raise_error(fields(message))
        if kind == _NOTICE:
            self._notice(fields(message).get("M", ""))
        elif kind == _COPY_DONE:
            raise _ended()
        elif kind not in _IGNORED:
            raise ProtocolError(f"a message of type {bytes([kind])!r} in a replication stream")

    def close(self) -> None:
        self._socket.close()


class _Libpq:
    """libpq's own calls, where only libpq can read the socket's data."""

    def __init__(
        self,
        connection: psycopg.Connection[tuple[object, ...]],
        notice: Callable[[str], None],
    ) -> None:
        self._pgconn = connection.pgconn
        connection.add_notice_handler(lambda d: notice(d.message_primary or ""))

    def start(self, command: bytes) -> None:
        result = self._pgconn.exec_(command)
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise errors.error_from_result(result)
        self._pgconn.nonblocking = 1

    def read(self) -> bytes:
        parts: list[bytes] = []
        get, size = self._pgconn.get_copy_data, 0
        unread = True  # libpq reads the socket only when asked, some 16 KiB at a time
        while size < READ_BYTES:
            n, data = get(1)
            if n > 0:
                parts += (pack(">cI", b"d", 4 + n), data.tobytes())
                size += n
                unread = True
            elif n == 0 and unread:
                self._pgconn.consume_input()
                unread = False
            elif n == 0 or parts:
                break
            else:
                self._end()
        return b"".join(parts)

    def make_room(self) -> None:
        """Nothing to do: the kernel sizes its buffer."""

    def send(self, data: bytes) -> None:
        self._pgconn.put_copy_data(data)
        self._pgconn.flush()

    def other(self, message: bytes) -> None:
        raise ProtocolError(f"{len(message)} bytes that are no CopyData in libpq's hands")

    def _end(self) -> NoReturn:
        """Raise what ended the stream: the real error is in the connection's last result."""
        result = self._pgconn.get_result()
        if result and result.status == pq.ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result)
        raise _ended()

    def close(self) -> None:
        """Nothing to do: the connection does it."""


def fields(message: bytes) -> Fields:
    """Return the fields of an ErrorResponse or NoticeResponse; each is a code and a C string."""
    fields = message[HEADER_SIZE:].split(b"\0")
    return {chr(field[0]): field[1:].decode(errors="replace") for field in fields if field}


def raise_error(fields: Fields) -> NoReturn:
    """Raise psycopg's error for the SQLSTATE, as libpq's path does."""
    text = f"{fields.get('S', 'ERROR')}:  {fields.get('M', '')}"
    try:
        kind = errors.lookup(fields.get("C", ""))
    except KeyError:
        kind = psycopg.DatabaseError
    error = kind(text)
    error.sqlstate = fields.get("C") or None
    raise error


def _ended() -> UnavailableError:
    return UnavailableError(
        "Postgres ended the replication stream",
        hint="it is shutting down or was told to; the daemon connects again by itself",
    )
