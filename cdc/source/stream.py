"""The replication stream: chunks of frames in, feedback out, never blocking.

Holds the slot from `start` to `close`. Frames are returned in the order in which Postgres sent
them, many per chunk (`cdc.decode.frames`); messages that the reader of a chunk does not know are passed
back to `other`. Feedback is sent when a position is confirmed, when the server asks, and often
enough to avoid `wal_sender_timeout` whatever the rest of the process does: call `tick` at least
once a second.

https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import select
import struct
import time
from io import BytesIO
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import pq

from cdc.decode.frames import COPY_DATA, HEADER_SIZE, KEEPALIVE, PADDING, length
from cdc.errors import GapError, ProtocolError, SilentError
from cdc.events import LSN
from cdc.source.connection import connect, take_any_text, translate, translated
from cdc.source.timelines import System, parse_history
from cdc.source.wire import wire

if TYPE_CHECKING:
    from psycopg.rows import TupleRow

    from cdc.config import Config
    from cdc.config.model import Streaming

_KEEPALIVE: Final = struct.Struct(">QqB")  # WAL end, server clock, whether a reply is wanted
_FEEDBACK: Final = struct.Struct(">cQQQqB")
_POSTGRES_EPOCH_US: Final = 946_684_800_000_000
# The walsender's default timeout is 60 s; feedback every ten seconds is enough for it.
_FEEDBACK_SECONDS: Final = 10.0
# Where the server sets no timeout; its own default.
_SILENCE_SECONDS: Final = 60.0
# Nothing was read for this long: more than the time between two reads of a busy loop.
_UNREAD_SECONDS: Final = 0.25


# A longer message is assembled in one buffer.
LONG_BYTES: Final = 1 << 20

# The protocol version that each kind of streaming needs.
_PROTOCOLS: Final[dict[Streaming, int]] = {"off": 1, "on": 2, "parallel": 4}


class Stream:
    """One run of START_REPLICATION on the pipeline's slot."""

    _long: BytesIO | None = None  # a huge message while it arrives, in place of `_parts`

    def __init__(
        self, config: Config, wake_fd: int, *, whole: bool = False, patience: int = 1
    ) -> None:
        """Connect; with `whole`, transactions arrive only once they have committed.

        A walsender may be silent for `patience` times its timeout before it counts as dead.
        """
        self._config = config
        self.streaming: Streaming = "off" if whole else config.source.streaming
        self._connection = connect(config, replication=True)
        self._fatal: GapError | None = None
        # What was read and not yet used: parts of the next chunk, their size, and the size at which
        # a chunk holds one complete message.
        self._parts: list[bytes] = []
        self._have, self._need = 0, HEADER_SIZE
        self._poll, self._poll_wake = select.poll(), select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._poll_wake.register(wake_fd, select.POLLIN)
        timeout_seconds = self._sender_timeout() or _SILENCE_SECONDS
        self._feedback_seconds = min(_FEEDBACK_SECONDS, timeout_seconds / 3)
        # A walsender that is alive and was asked for a reply three times has sent something by
        # then.
        self._silence_seconds = timeout_seconds * patience
        self.received_lsn = LSN(0)  # of the newest frame
        self.keepalive_lsn = LSN(0)  # WAL end of the newest keepalive: all before it was sent
        self.reply_requested = False
        self.confirmed_lsn = LSN(0)
        self.feedback_at = self._heard_at = self._read_at = time.monotonic()
        self._wire = wire(self._connection, self._notice)

    def identify(self) -> System:
        """Return which system this is, its timeline, and its ancestors."""
        return identify(self._connection)

    def start(self) -> None:
        """Take the slot and start at its confirmed position; SlotBusyError if another has it."""
        slot, publication = self._config.slot, self._config.publication
        options = [
            f"proto_version '{_PROTOCOLS[self.streaming]}'",
            f"publication_names '{_quoted(publication)}'",
            "messages 'true'",
        ]
        if self.streaming != "off":
            options.append(f"streaming '{self.streaming}'")
        if self._config.source.origin == "none":
            options.append("origin 'none'")
        command = f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 ({", ".join(options)})'
        # After all other commands: their answers would arrive as bytes.
        take_any_text(self._connection, self._config)
        with translated(f'starting replication on slot "{slot}"'):
            self._wire.start(command.encode())
        self._poll.register(self._connection.pgconn.socket, select.POLLIN)

    def read(self) -> bytes:
        """Return a chunk that starts with a complete message, once one has arrived; else nothing.

        What of it is not used goes to `keep`. Raises the server's own error where it ended the
        stream.
        """
        try:
            came = self._wire.read()
        except psycopg.Error as error:
            raise translate(error, "reading the replication stream") from error
        if self._fatal:  # libpq gets it before we see the data that came with it
            raise self._fatal
        self._listen(heard=bool(came))
        if came:
            self._take(came)
        if self._have < self._need:
            return b""
        chunk = self._joined()
        self._parts, self._have = [], 0
        return chunk

    def _joined(self) -> bytes:
        """Return what was read and not used, padded."""
        if self._long is None:
            return b"".join((*self._parts, PADDING))
        long, self._long = self._long, None
        long.write(PADDING)
        return long.getvalue()  # the buffer's own bytes, without a copy

    def keep(self, chunk: bytes, at: int) -> None:
        """Put back what is in a chunk after `at`: it is returned again before the next data."""
        self._parts, self._have, self._need, self._long = [], 0, HEADER_SIZE, None
        if rest := chunk[at : len(chunk) - len(PADDING)]:
            self._take(rest)

    def _take(self, part: bytes) -> None:
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

    def other(self, chunk: bytes, at: int) -> int:
        """Process the complete message at `at` that is no frame; return where it ends."""
        end: int = at + 1 + length(chunk, at)[0]
        message = chunk[at:end]
        if message[0] != COPY_DATA:
            with translated("reading the replication stream"):
                self._wire.other(message)
        elif message[HEADER_SIZE : HEADER_SIZE + 1] == bytes([KEEPALIVE]):
            self._keepalive(message[HEADER_SIZE + 1 :])
        else:
            raise ProtocolError(f"a CopyData message of {len(message)} bytes that is no frame")
        if self._fatal:
            raise self._fatal
        return end

    def wait(self, seconds: float, *, for_frames: bool) -> None:
        """Return when the wake fd is readable, after `seconds`, or, if asked, when bytes arrive."""
        if not for_frames:
            self._heard_at = time.monotonic()  # silence counts only while we read
            if self._heard_at - self._read_at > _UNREAD_SECONDS:
                self._wire.make_room()
        (self._poll if for_frames else self._poll_wake).poll(seconds * 1_000)

    def _listen(self, *, heard: bool) -> None:
        """Notice a dead peer on a connection that is still open, as with a dead proxy between."""
        now = self._read_at = time.monotonic()
        if heard:
            self._heard_at = now
        elif now - self._heard_at > self._silence_seconds:
            raise SilentError(
                f"Postgres has been silent for {now - self._heard_at:.0f} s, though it was asked",
                hint="something between here and there drops packets; the daemon connects again",
            )

    def confirm(self, lsn: LSN) -> None:
        """Confirm to Postgres that it may discard WAL below `lsn`. Never decreases."""
        if lsn > self.confirmed_lsn:
            self.confirmed_lsn = lsn
            self._feedback()

    def tick(self) -> None:
        """Send feedback if it is due, and ask for a reply."""
        if time.monotonic() - self.feedback_at >= self._feedback_seconds:
            self._feedback(ask=True)

    def close(self) -> None:
        """Release the slot."""
        self._wire.close()
        self._connection.close()

    def _feedback(self, *, ask: bool = False) -> None:
        clock = time.time_ns() // 1_000 - _POSTGRES_EPOCH_US
        written, confirmed = max(self.received_lsn, self.confirmed_lsn), self.confirmed_lsn
        try:
            self._wire.send(_FEEDBACK.pack(b"r", written, confirmed, confirmed, clock, ask))
        except psycopg.Error as error:
            raise translate(error, "sending feedback to Postgres") from error
        self.feedback_at = time.monotonic()

    def _keepalive(self, body: bytes) -> None:
        if len(body) != _KEEPALIVE.size:
            raise ProtocolError(f"a keepalive of {len(body)} bytes")
        wal_end, _, reply = _KEEPALIVE.unpack(body)
        self.keepalive_lsn = LSN(wal_end)
        if reply:
            self.reply_requested = True
            self._feedback()

    def _notice(self, message: str) -> None:
        # Postgres 18 continues to stream when a publication is missing, and leaves out its rows.
        if "skipped loading publication" in message:
            self._fatal = GapError(
                f'the publication "{self._config.publication}" is gone: {message}',
                hint="changes since it was dropped are lost to the stream; recreate it with"
                " `cdc setup`, then re-snapshot its tables",
            )

    def _sender_timeout(self) -> float:
        """Return the server's wal_sender_timeout in seconds; 0 where it is switched off."""
        with translated("reading wal_sender_timeout"):
            return _seconds(_text(self._execute(b"SHOW wal_sender_timeout"), 0))

    def _execute(self, command: bytes) -> pq.abc.PGresult:
        result = self._connection.pgconn.exec_(command)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)
        return result


def identify(connection: psycopg.Connection[TupleRow]) -> System:
    """Return the system of a walsender, its timeline, and its ancestors."""
    with translated("IDENTIFY_SYSTEM"):
        row = connection.execute("IDENTIFY_SYSTEM").fetchone()
    assert row is not None, "a walsender always answers this"
    identifier, timeline = str(row[0]), int(row[1])
    if timeline == 1:
        return System(identifier, timeline)
    try:
        history = connection.execute(f"TIMELINE_HISTORY {timeline}".encode()).fetchone()
    except psycopg.errors.UndefinedFile:
        return System(identifier, timeline)
    except psycopg.Error as error:
        raise translate(error, f"asking for the history of timeline {timeline}") from error
    assert history is not None, "a walsender always answers this"
    text = history[1] if isinstance(history[1], str) else bytes(history[1]).decode()
    return System(identifier, timeline, parse_history(text))


def _text(result: pq.abc.PGresult, column: int) -> str:
    value = result.get_value(0, column)
    assert value is not None, "a walsender's answer has no NULL here"
    return bytes(value).decode()


def _seconds(setting: str) -> float:
    """Return a Postgres duration such as `1min` or `500ms` in seconds."""
    for unit, factor in (("ms", 0.001), ("min", 60.0), ("s", 1.0), ("h", 3600.0), ("d", 86400.0)):
        if setting.endswith(unit):
            return float(setting.removesuffix(unit)) * factor
    return float(setting) * 0.001


def _quoted(name: str) -> str:
    """Return a publication name as an identifier inside a string literal of the command."""
    return ('"' + name.replace('"', '""') + '"').replace("'", "''")
