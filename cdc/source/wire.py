"""The messages of a Postgres connection as bytes: those of a replication stream, or of a COPY.

libpq returns one message per call and copies each three times: a microsecond per row, a sixth of
the time that the daemon spends on one. So once libpq has opened the connection, which includes TLS,
passwords and host lists, this module exchanges the few messages that are needed on the socket
itself, reading many rows at a time. Where the bytes on the socket are not the protocol's own (TLS
or GSS encryption), libpq reads, and its messages are joined into the same bytes.

A `MessageBuffer` turns the bytes into chunks that start with a complete message
(`cdc.decode.frames`).

https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-COPY
https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from io import BytesIO
from struct import pack
from typing import Any, Final, NoReturn, Protocol

import psycopg
from psycopg import errors, pq

from cdc.decode.frames import HEADER_SIZE, PADDING, content_end, length

# The maximum size of one read: some five milliseconds' worth of rows.
READ_BYTES: Final = 256 << 10
# A walsender that finds the socket full waits and then sends much at once, which costs half as much
# per row as sending each row as it is produced. A larger buffer would seldom be full.
BUFFER_BYTES: Final = 128 << 10
# A longer message is assembled in one buffer.
LONG_BYTES: Final = 1 << 20
# Linux' SO_BUF_LOCK, which Python has no name for: 0 lets the kernel size the buffer again.
_BUF_LOCK: Final = 72

Fields = dict[str, str]  # of an error or a notice, by their one-letter codes


class Wire(Protocol):
    """A connection that runs one command; its answer is read as the protocol's messages."""

    def start(self, command: bytes) -> None:
        """Send the command; the answer begins with what is read next. Raises psycopg's errors."""

    def read(self) -> bytes:
        """Return bytes that have arrived, complete messages or not. Raises psycopg's errors.

        Of a replication stream none if nothing has arrived; a COPY's are waited for.
        """

    def send(self, data: bytes) -> None:
        """Send a CopyData message, or what the socket accepts of it; the rest is sent later."""

    def make_room(self) -> None:
        """Let arriving data accumulate in the kernel while nothing reads it."""

    def close(self) -> None:
        """Release what is not the connection's own."""


def wire(connection: psycopg.Connection[Any], *, replication: bool) -> Wire:
    """Return the connection's wire: for a walsender's stream, or for one COPY to STDOUT.

    A walsender takes commands by the simple protocol only, and its stream is read without blocking.
    A COPY is sent by the extended protocol and read blocking.
    """
    pgconn = connection.pgconn
    if pgconn.ssl_in_use or pgconn.used_gssapi:
        return _Libpq(connection, replication=replication)
    return _Socket(pgconn, replication=replication)


class MessageBuffer:
    """What was read and not used, as chunks that start with a complete message."""

    def __init__(self) -> None:
        # Parts of the next chunk, their size, and the size at which it has one complete message.
        self._parts: list[bytes] = []
        self._have, self._need = 0, HEADER_SIZE
        self._long: BytesIO | None = None  # a huge message while it arrives, in place of `_parts`

    def add(self, part: bytes) -> None:
        """Append bytes that were read."""
        self._have += len(part)
        if self._long is not None:
            self._long.write(part)
            return
        self._parts.append(part)
        if self._need == HEADER_SIZE <= self._have:
            if len(self._parts) > 1:
                self._parts = [b"".join(self._parts)]
            self._need = 1 + length(self._parts[0])[0]
            if self._need > LONG_BYTES:
                # A row may be a gigabyte: its parts are joined as they arrive, so that it is never
                # held twice.
                self._long = BytesIO()
                self._long.write(self._parts.pop())

    def take(self) -> bytes:
        """Return everything, padded, if it starts with a complete message; else no bytes."""
        if self._have < self._need:
            return b""
        if self._long is None:
            chunk = b"".join((*self._parts, PADDING))
        else:
            self._long.write(PADDING)
            chunk = self._long.getvalue()  # the buffer's own bytes, without a copy
        self._clear()
        return chunk

    def keep(self, chunk: bytes, at: int) -> None:
        """Put back what is in a chunk after `at`: it is returned again before the next data."""
        self._clear()
        if rest := chunk[at : content_end(chunk)]:
            self.add(rest)

    def _clear(self) -> None:
        self._parts, self._have, self._need, self._long = [], 0, HEADER_SIZE, None


class _Socket:
    """The connection's own socket, once libpq has opened it."""

    def __init__(self, pgconn: pq.abc.PGconn, *, replication: bool) -> None:
        # A descriptor of its own, since both owners close theirs; libpq keeps the connection.
        self._socket = socket.socket(fileno=os.dup(pgconn.socket))
        self._socket.settimeout(0 if replication else None)
        with suppress(OSError):  # a Unix socket has its own sizes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._request = _simple if replication else _extended
        self._roomy = False
        self._unsent = b""

    def start(self, command: bytes) -> None:
        self._put(self._request(command))

    def read(self) -> bytes:
        if self._unsent:
            self._put(b"")
        try:
            came = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise _broken(error) from error
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
        self._put(_message(b"d", data))

    def _put(self, data: bytes) -> None:
        self._unsent += data
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return  # the server is busy sending; it reads ours before it times out
        except OSError as error:
            raise _broken(error) from error
        self._unsent = self._unsent[sent:]

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            os.set_blocking(self._socket.fileno(), False)  # as libpq had set it
            self._socket.close()


class _Libpq:
    """libpq's own calls, where only libpq can read the socket's data.

    What libpq processes itself is returned as the server had sent it: the answer to the command,
    notices, and the end.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, replication: bool) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._replication = replication
        self._came: list[bytes] = []
        self._ended = False
        connection.add_notice_handler(self._notice)

    def start(self, command: bytes) -> None:
        if self._replication:
            result, answer = self._pgconn.exec_(command), pq.ExecStatus.COPY_BOTH
        else:
            result, answer = self._pgconn.exec_params(command, None), pq.ExecStatus.COPY_OUT
        if result.status != answer:
            raise errors.error_from_result(result)
        self._came.append(_message(b"W" if self._replication else b"H"))
        if self._replication:
            self._pgconn.nonblocking = 1

    def read(self) -> bytes:
        came, self._came = self._came, []
        if came:
            return b"".join(came)
        get, size = self._pgconn.get_copy_data, 0
        unread = True  # libpq reads the socket only when asked, some 16 KiB at a time
        parts: list[bytes] = []
        while size < READ_BYTES and not self._ended:
            n, data = get(1 if self._replication else 0)
            if n > 0:
                parts += (pack(">cI", b"d", 4 + n), data.tobytes())
                size += n
                unread = True
            elif n < 0:
                self._ended = True
            elif unread:
                self._pgconn.consume_input()
                unread = False
            else:
                break
        if self._ended and not parts:
            parts.append(self._end())
        came, self._came = self._came, []  # notices that preceded these
        return b"".join((*came, *parts))

    def make_room(self) -> None:
        """Nothing to do: the kernel sizes its buffer."""

    def send(self, data: bytes) -> None:
        self._pgconn.put_copy_data(data)
        self._pgconn.flush()

    def _notice(self, diagnostic: errors.Diagnostic) -> None:
        text = (diagnostic.message_primary or "").encode()
        self._came.append(_message(b"N", b"M" + text + b"\0\0"))

    def _end(self) -> bytes:
        """Return CopyDone and ReadyForQuery, which libpq has consumed; raise the server's error."""
        while (result := self._pgconn.get_result()) is not None:
            if result.status == pq.ExecStatus.COPY_IN:
                break  # a stream of which only the server's half has ended
            if result.status != pq.ExecStatus.COMMAND_OK:
                raise errors.error_from_result(result)
        return _message(b"c") + _message(b"Z", b"T")

    def close(self) -> None:
        self._connection.remove_notice_handler(self._notice)


def fields(message: bytes) -> Fields:
    """Return the fields of an ErrorResponse or NoticeResponse; each is a code and a C string."""
    fields = message[HEADER_SIZE:].split(b"\0")
    return {chr(field[0]): field[1:].decode(errors="replace") for field in fields if field}


def raise_error(message: bytes) -> NoReturn:
    """Raise psycopg's error for an ErrorResponse, by its SQLSTATE, as libpq's path does."""
    found = fields(message)
    text = f"{found.get('S', 'ERROR')}:  {found.get('M', '')}"
    try:
        kind = errors.lookup(found.get("C", ""))
    except KeyError:
        kind = psycopg.DatabaseError
    error = kind(text)
    error.sqlstate = found.get("C") or None
    raise error


def _message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + pack(">I", 4 + len(body)) + body


def _simple(command: bytes) -> bytes:
    """Return Query."""
    return _message(b"Q", command + b"\0")


def _extended(query: bytes) -> bytes:
    """Return Parse, Bind, Execute and Sync: for one statement, where Query would accept several."""
    parse = b"\0" + query + b"\0" + pack(">H", 0)
    bind = b"\0\0" + pack(">HHH", 0, 0, 0)
    execute = b"\0" + pack(">I", 0)
    messages = ((b"P", parse), (b"B", bind), (b"E", execute), (b"S", b""))
    return b"".join(_message(kind, body) for kind, body in messages)


def _broken(error: OSError) -> psycopg.OperationalError:
    return psycopg.OperationalError(f"the connection broke: {error.strerror}")
