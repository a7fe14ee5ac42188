"""HTTP connections to receivers that may be hostile: a request takes limited time and memory.

A socket's timeout counts for each read alone: a receiver that sends a byte now and then, or an
answer without an end, would hold a connection for ever. So every read and every write gets what is
left of the request's time, and of an answer only `MOST_ANSWER_BYTES` are read.
"""

from __future__ import annotations

import time
from functools import partial
from http.client import HTTPException, HTTPResponse
from io import BufferedReader, RawIOBase
from typing import TYPE_CHECKING, Any, Final

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

if TYPE_CHECKING:
    import socket

# Of headers and body together: a status and a few words are an answer.
MOST_ANSWER_BYTES: Final = 65_536
# Written at once, so that a receiver that reads slowly is noticed.
_PIECE_BYTES: Final = 65_536


class AnswerTooLongError(HTTPException):
    """More than `MOST_ANSWER_BYTES` have arrived of an answer."""


class _Reader(RawIOBase):
    """Reads an answer until its deadline (monotonic); raises TimeoutError or AnswerTooLongError."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)
        self._left = MOST_ANSWER_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - as the base class
        if self._left <= 0:
            raise AnswerTooLongError
        self._sock.settimeout(_left(self._deadline))
        count = self._raw.readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= count
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, deadline: float, sock: socket.socket, **given: Any) -> None:  # noqa: ANN401 - as the base class
        super().__init__(sock, **given)
        self.fp.close()
        self.fp = BufferedReader(_Reader(sock, deadline))


class _Connection(HTTPConnection):
    def __init__(self, *given: Any, seconds: float, **named: Any) -> None:  # noqa: ANN401 - as the base class
        super().__init__(*given, **named)
        self._seconds = seconds
        self._deadline = 0.0

    def request(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - as the base class
        self._deadline = time.monotonic() + self._seconds
        self.response_class = partial(_Response, self._deadline)  # type: ignore[assignment]
        super().request(*given, **named)

    def send(self, data: Any) -> None:  # noqa: ANN401 - as the base class
        if self.sock is None:
            self.connect()
        assert self.sock is not None
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            self.sock.settimeout(_left(self._deadline))
            super().send(view[start : start + _PIECE_BYTES])


class _TLSConnection(_Connection, HTTPSConnection):
    pass


class Pool(urllib3.HTTPConnectionPool):
    """Connections to one address; a request and its answer take at most `seconds` each time."""

    ConnectionCls = _Connection


class TLSPool(urllib3.HTTPSConnectionPool):
    """The same by TLS."""

    ConnectionCls = _TLSConnection


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request's time is over")
    return left
