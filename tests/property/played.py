"""A replication stream whose bytes come from a test: the real one without its connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from struct import pack
from typing import Any, Final

from cdc.config.model import Streaming
from cdc.decode.frames import HEADER_SIZE
from cdc.events import LSN
from cdc.source import stream
from cdc.source.stream import Stream
from cdc.source.wire import _Socket


class Wire:
    """Returns the given pieces, one per read, then nothing; keeps what is sent."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = deque(pieces)
        self.sent: list[bytes] = []
        self.notice: Any = None

    def start(self, command: bytes) -> None:
        """Do nothing: it has started."""

    def read(self) -> bytes:
        return self.pieces.popleft() if self.pieces else b""

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def make_room(self) -> None:
        """Do nothing: there is room."""

    def other(self, message: bytes) -> None:
        socket: Any = _Socket.__new__(_Socket)
        socket._notice = self.notice
        _Socket.other(socket, message)

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _now() -> float:
    """Return the stream's clock, which a test may have replaced."""
    now: float = vars(stream)["time"].monotonic()
    return now


class PlayedStream(Stream):
    """A stream that has started."""

    def __init__(self, pieces: Iterable[bytes], streaming: Streaming = "off") -> None:
        self.wire = self._wire = Wire(pieces)
        self.wire.notice = self._notice
        self.streaming = streaming
        self._parts, self._have, self._need = [], 0, HEADER_SIZE
        self._fatal = None
        self._config: Any = None
        self._feedback_seconds, self._silence_seconds = 10.0, 60.0
        self.received_lsn = self.keepalive_lsn = self.confirmed_lsn = LSN(0)
        self.reply_requested = False
        self.feedback_at = self._heard_at = self._read_at = _now()


def keepalive(wal_end: int, *, reply: bool = False) -> bytes:
    """Return a keepalive's bytes in the stream."""
    return pack(">cIcQqB", b"d", 22, b"k", wal_end, 0, reply)


NOTICE: Final = b"N" + pack(">I", 4 + 26) + b"SWARNING\0C01000\0Mmind it\0\0"


def cut(data: bytes, chance: Random, longest: int) -> list[bytes]:
    """Cut bytes into pieces of any length."""
    pieces, at = [], 0
    while at < len(data):
        size = chance.randint(1, longest)
        pieces.append(data[at : at + size])
        at += size
    return pieces
