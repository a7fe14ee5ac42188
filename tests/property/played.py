"""A replication stream whose bytes come from a test: the real one without its connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from struct import pack
from types import SimpleNamespace
from typing import Any, Final

from cdc.config.model import Streaming
from cdc.source.stream import Stream

NO_WAKE_FD: Final = 0  # never polled


class Wire:
    """Returns the given pieces, one per read, then nothing; keeps what is sent."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = deque(pieces)
        self.sent: list[bytes] = []

    def start(self, command: bytes) -> None:
        """Do nothing: it has started."""

    def read(self) -> bytes:
        return self.pieces.popleft() if self.pieces else b""

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def make_room(self) -> None:
        """Do nothing: there is room."""

    def close(self) -> None:
        """Do nothing: no resource is open."""


class PlayedWalsender:
    """The walsender at the other end of a wire, which the test plays."""

    def __init__(self, wire: Any, descriptor: int = -1, timeout_seconds: float = 60.0) -> None:  # noqa: ANN401 - real or simulated
        self.wire, self._descriptor = wire, descriptor
        self._timeout_seconds = timeout_seconds

    def timeout_seconds(self) -> float:
        return self._timeout_seconds

    def start(self, command: str) -> int:
        self.wire.start(command.encode())
        return self._descriptor

    def close(self) -> None:
        self.wire.close()


def stream_on(walsender: PlayedWalsender, streaming: Streaming = "off") -> Stream:
    """Return the slot "s"'s stream of publication "p"."""
    return Stream(_settings(streaming), NO_WAKE_FD, walsender=walsender)  # type: ignore[arg-type]


def _settings(streaming: Streaming) -> Any:  # noqa: ANN401 - what the stream reads of a Config
    source = SimpleNamespace(streaming=streaming, origin="any")
    return SimpleNamespace(source=source, publication="p", slot="s")


class PlayedStream(Stream):
    """A stream that has started."""

    def __init__(self, pieces: Iterable[bytes], streaming: Streaming = "off") -> None:
        self.wire = Wire(pieces)
        walsender: Any = PlayedWalsender(self.wire)
        super().__init__(_settings(streaming), NO_WAKE_FD, walsender=walsender)


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
