"""HTTP to servers that may be hostile: a request takes limited time and memory.

A socket's timeout counts for each read alone: a server that sends a byte now and then, or an answer
without an end, would hold a connection for ever. So connecting, every read and every write get what
is left of the request's time, and of an answer a limited number of bytes is read. A redirect is an
answer like any other. `SSL_CERT_FILE` names a certificate authority of one's own.
"""

from __future__ import annotations

import select
import time
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from io import BufferedReader, RawIOBase
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import socket
    import ssl

# Written at once, so that a server that reads slowly is noticed.
_PIECE_BYTES: Final = 65_536
# Before the answer; reading many takes more of a processor than of the request's time.
_MOST_HINTS: Final = 100


class AnswerTooLongError(HTTPException):
    """More has arrived of an answer than its connection reads."""


class _Reader(RawIOBase):
    """Reads an answer until its deadline (monotonic); raises TimeoutError or AnswerTooLongError."""

    def __init__(self, sock: socket.socket, deadline: float, most_bytes: int) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)
        self._left = most_bytes

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
    def __init__(self, deadline: float, most_bytes: int, sock: socket.socket, **given: Any) -> None:  # noqa: ANN401 - as the base class
        super().__init__(sock, **given)
        self.fp.close()
        self.fp = BufferedReader(_Reader(sock, deadline, most_bytes))

    def begin(self) -> None:
        super().begin()
        hints = 0
        while 100 <= self.status < 200:  # noqa: PLR2004 - as in the RFC
            hints += 1
            if hints > _MOST_HINTS:
                raise HTTPException("hints without an answer")
            self.headers = self.msg = None  # type: ignore[assignment]
            super().begin()


class LimitedConnection(HTTPConnection):
    """A connection to one address: each request and its answer take `seconds` at most.

    Of headers and body of an answer together `most_bytes` are read. With `tls`, the certificate
    must be valid for `name`, whatever the address.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        seconds: float,
        most_bytes: int,
        tls: ssl.SSLContext | None = None,
        name: str = "",
    ) -> None:
        super().__init__(address, port)
        self._seconds, self._most_bytes = seconds, most_bytes
        self._tls, self._name = tls, name
        self._deadline = 0.0

    @property
    def idle(self) -> bool:
        """Whether another request may be sent: its server has neither closed it nor sent more."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def connect(self) -> None:
        self.timeout = _left(self._deadline)
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)

    def request(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - as the base class
        self._deadline = time.monotonic() + self._seconds
        self.response_class = partial(_Response, self._deadline, self._most_bytes)  # type: ignore[assignment]
        super().request(*given, **named)

    def send(self, data: Any) -> None:  # noqa: ANN401 - as the base class
        if self.sock is None:
            self.connect()
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            self.sock.settimeout(_left(self._deadline))
            super().send(view[start : start + _PIECE_BYTES])


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request's time is over")
    return left
