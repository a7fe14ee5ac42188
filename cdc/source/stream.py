"""The replication stream: chunks of frames in, feedback out, never blocking.

Holds the slot from `start` to `close`. Frames are returned in the order in which Postgres sent
them, many per chunk (`cdc.decode.frames`); messages that the reader of a chunk does not know are
passed back to `other`. Feedback is sent when a position is confirmed, when the server asks, and
often enough to avoid `wal_sender_timeout` whatever the rest of the process does: call `tick` at
least once a second.

https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from cdc.decode.frames import COPY_DATA, HEADER_SIZE, PRIMARY_KEEPALIVE, length
from cdc.decode.replication import PrimaryKeepalive, status_update
from cdc.errors import CDCError, GapError, ProtocolError, SilentError, UnavailableError
from cdc.events import LSN
from cdc.source.connection import connect, take_any_text, translate, translated
from cdc.source.timelines import System, parse_history
from cdc.source.wire import MessageBuffer, fields, raise_error, wire

if TYPE_CHECKING:
    from psycopg.rows import TupleRow

    from cdc.config import Config
    from cdc.config.model import Streaming
    from cdc.source.wire import Wire

_COPY_BOTH, _COPY_DONE, _ERROR, _NOTICE = b"WcEN"
# What the server may send at any time, or after the end of a copy; not used here.
_IGNORED: Final = frozenset(b"SCZA")
# How long the server may take to answer the command that starts the stream.
START_SECONDS: Final = 60.0
# The walsender's default timeout is 60 s; feedback every ten seconds is enough for it.
_FEEDBACK_SECONDS: Final = 10.0
_READING: Final = "reading the replication stream"
# A walsender that must stop and waits for a standby of synchronized_standby_slots fails instead:
# with the first if that standby's slot is inactive or invalidated, with the second if it is missing
# (`StandbySlotsHaveCaughtup` in slot.c). It is no loss; where our own slot is lost, or the server's
# state is another one that a person must change, the next START_REPLICATION is refused for it.
_NOT_IN_STATE, _INVALID_PARAMETER, _STANDBY_SLOTS = "55000", "22023", "synchronized_standby_slots"
# Where the server sets no timeout; its own default.
_SILENCE_SECONDS: Final = 60.0
# Nothing was read for this long: more than the time between two reads of a busy loop.
UNREAD_SECONDS: Final = 0.25

# The protocol version that each kind of streaming needs.
_PROTOCOLS: Final[dict[Streaming, int]] = {"off": 1, "on": 2, "parallel": 4}


class Walsender:
    """A replication connection: its answers to commands, and the wire of its stream."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._connection = connect(config, replication=True)
        self.wire: Wire = wire(self._connection, replication=True)

    def identify(self) -> System:
        return identify(self._connection)

    def timeout_seconds(self) -> float:
        """Return the server's wal_sender_timeout; 0 where it is switched off."""
        with translated("reading wal_sender_timeout"):
            row = self._connection.execute(
                "SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_sender_timeout'"
            ).fetchone()
        assert row is not None, "a walsender always answers this"
        return float(row[0])

    def start(self, command: str) -> int:
        """Send the command that starts the stream; return the socket's descriptor."""
        # After all other commands: their answers would arrive as bytes.
        take_any_text(self._connection, self._config)
        self.wire.start(command.encode())
        return self._connection.pgconn.socket

    def close(self) -> None:
        """Release the slot."""
        self.wire.close()
        self._connection.close()


class Stream:
    """One run of START_REPLICATION on the pipeline's slot."""

    def __init__(
        self,
        config: Config,
        wake_fd: int,
        *,
        committed_only: bool = False,
        patience: int = 1,
        walsender: Walsender | None = None,
    ) -> None:
        """Connect; with `committed_only`, transactions arrive only once they have committed.

        A walsender may be silent for `patience` times its timeout before it counts as dead.
        """
        self._config = config
        self.streaming: Streaming = "off" if committed_only else config.source.streaming
        self._walsender = walsender or Walsender(config)
        self._wire = self._walsender.wire
        self._buffer = MessageBuffer()
        self._poll, self._poll_wake = select.poll(), select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._poll_wake.register(wake_fd, select.POLLIN)
        timeout_seconds = self._walsender.timeout_seconds() or _SILENCE_SECONDS
        self._feedback_seconds = min(_FEEDBACK_SECONDS, timeout_seconds / 3)
        # A walsender that is alive and was asked for a reply three times has sent something by
        # then.
        self._silence_seconds = timeout_seconds * patience
        self.received_lsn = LSN(0)  # of the newest frame
        self.keepalive_lsn = LSN(0)  # WAL end of the newest keepalive: all before it was sent
        self.reply_requested = False
        self.confirmed_lsn = LSN(0)
        self.feedback_at = self._received_at = self._read_at = time.monotonic()

    def identify(self) -> System:
        return self._walsender.identify()

    def start(self) -> None:
        """Take the slot and start at its confirmed position; SlotBusyError if another has it."""
        # An identifier inside a string literal of the command.
        publication = sql.Identifier(self._config.publication).as_string().replace("'", "''")
        options = [
            f"proto_version '{_PROTOCOLS[self.streaming]}'",
            f"publication_names '{publication}'",
            "messages 'true'",
        ]
        if self.streaming != "off":
            options.append(f"streaming '{self.streaming}'")
        if self._config.source.origin == "none":
            options.append("origin 'none'")
        slot = self._config.slot
        command = f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 ({", ".join(options)})'
        with translated(f'starting replication on slot "{slot}"'):
            descriptor = self._walsender.start(command)
            self._await_start(descriptor)
        self._poll.register(descriptor, select.POLLIN)

    def _await_start(self, descriptor: int) -> None:
        """Return when the server streams; what it sent after its answer is read later."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            while chunk := self._buffer.take():
                end: int = 1 + length(chunk)[0]
                self._buffer.keep(chunk, end)
                if chunk[0] == _COPY_BOTH:
                    return
                self._message(chunk[:end])
            if came := self._wire.read():
                self._buffer.add(came)
            elif not poll.poll(START_SECONDS * 1_000):
                raise psycopg.OperationalError("the server does not answer START_REPLICATION")

    def read(self) -> bytes:
        """Return a chunk that starts with a complete message, once one has arrived; else nothing.

        What of it is not used goes to `keep`. Raises the server's own error where it ended the
        stream.
        """
        try:
            came = self._wire.read()
        except psycopg.Error as error:
            raise _end(error) from error
        self._listen(received=bool(came))
        if came:
            self._buffer.add(came)
        return self._buffer.take()

    def keep(self, chunk: bytes, at: int) -> None:
        """Put back what is in a chunk after `at`: it is returned again before the next data."""
        self._buffer.keep(chunk, at)

    def other(self, chunk: bytes, at: int) -> int:
        """Process the complete message at `at` that is no frame; return where it ends."""
        end: int = at + 1 + length(chunk, at)[0]
        message = chunk[at:end]
        if message[0] != COPY_DATA:
            try:
                self._message(message)
            except psycopg.Error as error:
                raise _end(error) from error
        elif message[HEADER_SIZE : HEADER_SIZE + 1] == bytes([PRIMARY_KEEPALIVE]):
            self._keepalive(PrimaryKeepalive.decode(message[HEADER_SIZE + 1 :]))
        else:
            raise ProtocolError(f"a CopyData message of {len(message)} bytes that is no frame")
        return end

    def _message(self, message: bytes) -> None:
        """Process a message that is not CopyData. Raises what ended the stream."""
        kind = message[0]
        if kind == _ERROR:
            raise_error(message)
        if kind == _NOTICE:
            self._notice(fields(message).get("M", ""))
        elif kind == _COPY_DONE:
            raise UnavailableError(
                "Postgres ended the replication stream",
                hint="it is shutting down or an administrator ended it; the daemon connects again"
                " by itself",
            )
        elif kind not in _IGNORED:
            raise ProtocolError(f"a message of type {bytes([kind])!r} in a replication stream")

    def wait(self, seconds: float, *, for_frames: bool) -> None:
        """Return when the wake fd is readable, after `seconds`, or, if asked, when bytes arrive."""
        if not for_frames:
            self._received_at = time.monotonic()  # silence counts only while we read
            if self._received_at - self._read_at > UNREAD_SECONDS:
                self._wire.make_room()
        (self._poll if for_frames else self._poll_wake).poll(seconds * 1_000)

    def _listen(self, *, received: bool) -> None:
        """Notice a dead peer on a connection that is still open, as with a dead proxy between."""
        now = self._read_at = time.monotonic()
        if received:
            self._received_at = now
        elif now - self._received_at > self._silence_seconds:
            silent = now - self._received_at
            raise SilentError(
                f"Postgres has been silent for {silent:.0f} s, though it was asked",
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
        self._walsender.close()

    def _feedback(self, *, ask: bool = False) -> None:
        written = max(self.received_lsn, self.confirmed_lsn)
        clock_us = time.time_ns() // 1_000
        update = status_update(written, self.confirmed_lsn, clock_us, reply_requested=ask)
        try:
            self._wire.send(update)
        except psycopg.Error as error:
            raise translate(error, "sending feedback to Postgres") from error
        self.feedback_at = time.monotonic()

    def _keepalive(self, keepalive: PrimaryKeepalive) -> None:
        self.keepalive_lsn = keepalive.wal_end
        if keepalive.reply_requested:
            self.reply_requested = True
            self._feedback()

    def _notice(self, message: str) -> None:
        # Postgres 18 continues to stream when a publication is missing, and leaves out its rows.
        if "skipped loading publication" in message:
            raise GapError(
                f'the publication "{self._config.publication}" was dropped: {message}',
                hint="changes since then are lost to the stream; recreate it with `cdc setup`, then"
                " re-snapshot its tables",
            )


def _end(error: psycopg.Error) -> CDCError:
    """Return our error for the one that ended a stream that had started."""
    found, state = translate(error, _READING), error.sqlstate
    # The parameter's name is in the text in any language, and nothing else of that state is: a row
    # filter may raise it, for each time the row is read.
    of_standby = state == _INVALID_PARAMETER and _STANDBY_SLOTS in str(error)
    if state == _NOT_IN_STATE or of_standby:
        return UnavailableError(
            found.what,
            hint=f"the server stops, or a standby that {_STANDBY_SLOTS} names is down or has no"
            " slot; the daemon connects again by itself, and halts if its own slot is lost",
        )
    return found


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
