"""The replication stream: frames in, feedback out, never blocking.

Holds the slot from `start` to `close`. Frames come out in the order Postgres sent them; keepalives
are taken in here. Feedback goes out when a position is confirmed, when the server asks, and in
time to keep `wal_sender_timeout` away whatever the rest of the process does: `tick` is to be called
at least once a second.

https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import select
import struct
import time
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import pq

from cdc.errors import GapError, UnavailableError
from cdc.events import LSN
from cdc.source.connection import connect, translate, translated
from cdc.source.timelines import System, parse_history

if TYPE_CHECKING:
    from cdc.config import Config

# Enough rows to spread a turn's fixed costs, few enough that a turn takes some 10 ms.
MAX_FRAMES: Final = 2_000
# Rows can be large: a turn holds at most about this much of them.
MAX_BYTES: Final = 4 << 20

_KEEPALIVE_SIZE: Final = 18  # 'k', WAL end, server clock, whether a reply is wanted
_KEEPALIVE: Final = struct.Struct(">cQqB")
_FEEDBACK: Final = struct.Struct(">cQQQqB")
_POSTGRES_EPOCH_US: Final = 946_684_800_000_000
# The walsender's default timeout is 60 s; ten seconds are due to us in any case.
_FEEDBACK_SECONDS: Final = 10.0
# Where the server sets no timeout; its own default.
_SILENCE_SECONDS: Final = 60.0


class Stream:
    """One run of START_REPLICATION on the pipeline's slot."""

    def __init__(self, config: Config, wake_fd: int) -> None:
        self._config = config
        self._connection = connect(config, replication=True)
        self._connection.add_notice_handler(self._notice)
        self._pgconn = self._connection.pgconn
        self._fatal: GapError | None = None
        self._poll, self._poll_wake = select.poll(), select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._poll_wake.register(wake_fd, select.POLLIN)
        timeout_seconds = self._sender_timeout() or _SILENCE_SECONDS
        self._feedback_seconds = min(_FEEDBACK_SECONDS, timeout_seconds / 3)
        # Asked for a reply three times, a walsender that lives has sent something by then.
        self._silence_seconds = timeout_seconds
        self.received_lsn = LSN(0)  # end of the newest frame
        self.keepalive_lsn = LSN(0)  # WAL end of the newest keepalive: all before it was sent
        self.reply_requested = False
        self.confirmed_lsn = LSN(0)
        self.feedback_at = self._heard_at = time.monotonic()

    def identify(self) -> System:
        """Return which system this is, its timeline, and where that came from."""
        with translated("IDENTIFY_SYSTEM"):
            result = self._execute(b"IDENTIFY_SYSTEM")
        identifier, timeline = _text(result, 0), int(_text(result, 1))
        if timeline == 1:
            return System(identifier, timeline)
        try:
            history = self._execute(f"TIMELINE_HISTORY {timeline}".encode())
        except psycopg.errors.UndefinedFile:
            return System(identifier, timeline)
        except psycopg.Error as error:
            raise translate(error, f"asking for the history of timeline {timeline}") from error
        return System(identifier, timeline, parse_history(_text(history, 1)))

    def start(self) -> None:
        """Take the slot and begin at its confirmed position; SlotBusyError if another has it."""
        slot, publication = self._config.slot, self._config.publication
        command = (
            f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0'
            f" (proto_version '1', publication_names '{_quoted(publication)}')"
        )
        with translated(f'starting replication on slot "{slot}"'):
            self._execute(command.encode(), pq.ExecStatus.COPY_BOTH)
        self._pgconn.nonblocking = 1
        self._poll.register(self._pgconn.socket, select.POLLIN)

    def read(self) -> list[bytes]:
        """Return the frames that have arrived, at most about MAX_FRAMES or MAX_BYTES of them.

        Raises the server's own error where it ended the stream.
        """
        frames: list[bytes] = []
        append, get, size = frames.append, self._pgconn.get_copy_data, 0
        unread = True  # libpq reads the socket only when asked, some 16 KiB at a time
        try:
            while size < MAX_BYTES and len(frames) < MAX_FRAMES:
                n, data = get(1)
                if n > _KEEPALIVE_SIZE:
                    append(data.tobytes())
                    size += n
                    unread = True
                elif n == _KEEPALIVE_SIZE:
                    self._keepalive(data.tobytes())
                elif n == 0 and unread:
                    self._pgconn.consume_input()
                    unread = False
                elif n == 0:
                    break
                else:
                    self._ended()
        except psycopg.Error as error:
            raise translate(error, "reading the replication stream") from error
        if self._fatal:
            raise self._fatal
        self._listen(heard=bool(frames))
        if frames:
            self.received_lsn = max(self.received_lsn, LSN.from_bytes(frames[-1][9:17], "big"))
        return frames

    def wait(self, seconds: float, *, for_frames: bool) -> None:
        """Return when the wake fd is readable, after `seconds`, or, if asked, when bytes arrive."""
        if not for_frames:
            self._heard_at = time.monotonic()  # silence counts only while we listen
        (self._poll if for_frames else self._poll_wake).poll(seconds * 1_000)

    def _listen(self, *, heard: bool) -> None:
        """Notice a peer that is gone though the connection stands, as behind a dead proxy."""
        now = time.monotonic()
        if heard:
            self._heard_at = now
        elif now - self._heard_at > self._silence_seconds:
            raise UnavailableError(
                f"Postgres has been silent for {now - self._heard_at:.0f} s, though it was asked",
                hint="something between here and there drops packets; the daemon connects again",
            )

    def confirm(self, lsn: LSN) -> None:
        """Tell Postgres that it may forget WAL below `lsn`. Never goes back."""
        if lsn > self.confirmed_lsn:
            self.confirmed_lsn = lsn
            self._feedback()

    def tick(self) -> None:
        """Send feedback if it is due, and ask for a sign of life."""
        if time.monotonic() - self.feedback_at >= self._feedback_seconds:
            self._feedback(ask=True)

    def close(self) -> None:
        """Give the slot back."""
        self._connection.close()

    def _feedback(self, *, ask: bool = False) -> None:
        clock = time.time_ns() // 1_000 - _POSTGRES_EPOCH_US
        written, confirmed = max(self.received_lsn, self.confirmed_lsn), self.confirmed_lsn
        try:
            self._pgconn.put_copy_data(
                _FEEDBACK.pack(b"r", written, confirmed, confirmed, clock, ask)
            )
            self._pgconn.flush()
        except psycopg.Error as error:
            raise translate(error, "sending feedback to Postgres") from error
        self.feedback_at = time.monotonic()

    def _keepalive(self, frame: bytes) -> None:
        _, wal_end, _, reply = _KEEPALIVE.unpack(frame)
        self.keepalive_lsn = LSN(wal_end)
        self._heard_at = time.monotonic()
        if reply:
            self.reply_requested = True
            self._feedback()

    def _ended(self) -> None:
        """Raise what ended the stream: the true error stands in the connection's last result."""
        result = self._pgconn.get_result()
        if result and result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)
        raise UnavailableError(
            "Postgres ended the replication stream",
            hint="it is shutting down or was told to; the daemon connects again by itself",
        )

    def _notice(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        # Postgres 18 streams on without a publication that is gone, and leaves out its rows.
        message = diagnostic.message_primary or ""
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

    def _execute(
        self, command: bytes, expected: pq.ExecStatus = pq.ExecStatus.TUPLES_OK
    ) -> pq.abc.PGresult:
        result = self._pgconn.exec_(command)
        if result.status != expected:
            raise psycopg.errors.error_from_result(result)
        return result


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
