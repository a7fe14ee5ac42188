"""One connection to one broker: a request, then its answer.

Any error on it ends it: `LostError` means that the answer to what was sent is unknown.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from typing import TYPE_CHECKING, Final

from cdc.log.direct import requests, sasl
from cdc.log.direct.requests import SASL_AUTHENTICATE, SASL_HANDSHAKE, Api, Error
from cdc.log.direct.wire import AnswerReader, MalformedError

if TYPE_CHECKING:
    from cdc.log.direct.requests import Broker
    from cdc.log.direct.security import Login, Security

# A broker that does not accept a connection is down, or too busy to serve a small batch.
_CONNECT_SECONDS: Final = 5.0
# The answers are a few kilobytes, Metadata's of some thousand partitions a few hundred: a length
# above this is invalid.
_ANSWER_BYTES_MAX: Final = 64 << 20
_LENGTH: Final = struct.Struct("!i")
_RECEIVE_BYTES: Final = 64 << 10
# The share of a login's lifetime after which it is renewed.
_RENEW_AT: Final = 0.8


class LostError(Exception):
    """The connection is lost; whether the broker executed the request is unknown."""


class LoginError(LostError):
    """The broker rejects our name and password."""


class Connection:
    """Connects and logs in when it is created; raises LostError if that fails."""

    def __init__(self, node: Broker, security: Security, client_id: str, seconds: float) -> None:
        """An answer may take `seconds`."""
        self._client_id = client_id.encode()
        self._number = 0
        self._api: Api | None = None  # what was asked and not answered
        self._expires_at = float("inf")
        try:
            self._socket = socket.create_connection(node, _CONNECT_SECONDS)
        except OSError as error:
            raise LostError(f"{node.host}:{node.port}: {error.strerror or error}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if security.tls:
                self._socket = security.tls.wrap_socket(self._socket, server_hostname=node.host)
            self._socket.settimeout(seconds)
            if security.login:
                self._log_in(security.login)
        except ssl.SSLError as error:
            self.close()
            raise LostError(f"{node.host}:{node.port}: TLS: {error.reason}") from error
        except OSError as error:
            self.close()
            raise LostError(f"{node.host}:{node.port}: {error.strerror or error}") from error
        except LostError:
            self.close()
            raise

    @property
    def stale(self) -> bool:
        """Whether its login is about to expire."""
        return time.monotonic() >= self._expires_at

    def ask(self, api: Api, body: bytes) -> AnswerReader:
        """Return the answer's body."""
        self.send(api, body)
        return self.receive()

    def send(self, api: Api, body: bytes) -> None:
        """Send a request; call `receive` next."""
        assert self._api is None, "one request at a time"
        self._number += 1
        self._api = api
        try:
            self._socket.sendall(requests.frame(api, self._number, self._client_id, body))
        except OSError as error:
            raise LostError(f"sending: {error.strerror or error}") from error

    def receive(self) -> AnswerReader:
        """Return the body of the answer to what was sent."""
        assert self._api is not None, "nothing was asked"
        try:
            reader = AnswerReader(self._read())
            number = requests.response_header(reader, self._api)
        except OSError as error:
            raise LostError(f"receiving: {error.strerror or error}") from error
        except MalformedError as error:
            raise LostError(f"receiving: {error}") from error
        if number != self._number:
            raise LostError(f"answer {number} to request {self._number}")
        self._api = None
        return reader

    def _read(self) -> bytes:
        received = self._some(_RECEIVE_BYTES)
        while len(received) < _LENGTH.size:
            received += self._some(_RECEIVE_BYTES)
        size = _LENGTH.unpack_from(received)[0] + _LENGTH.size
        if not _LENGTH.size < size <= _ANSWER_BYTES_MAX:
            raise LostError(f"an answer of {size} bytes")
        parts, left = [received], size - len(received)
        while left > 0:
            parts.append(self._some(min(left, _RECEIVE_BYTES)))
            left -= len(parts[-1])
        if left < 0:
            raise LostError("more than the one answer")
        return b"".join(parts)[_LENGTH.size :]

    def _some(self, most: int) -> bytes:
        received = self._socket.recv(most)
        if not received:
            raise LostError("the broker closed the connection")
        return received

    def _log_in(self, login: Login) -> None:
        body = requests.sasl_handshake(login.mechanism)
        if refused := requests.read_sasl_handshake(self.ask(SASL_HANDSHAKE, body)):
            raise LoginError(f"the broker does not take {login.mechanism} (error {refused.code})")
        steps = sasl.conversation(login)
        began_at = time.monotonic()
        try:
            token = next(steps)
            while True:
                answer = requests.read_sasl_authenticate(
                    self.ask(SASL_AUTHENTICATE, requests.sasl_authenticate(token))
                )
                if isinstance(answer, Error):
                    raise LoginError(f"the broker refuses the login (error {answer.code})")
                if answer.lifetime_ms:
                    self._expires_at = began_at + _RENEW_AT * answer.lifetime_ms / 1_000
                token = steps.send(answer.token)
        except StopIteration:
            return
        except (sasl.RefusedError, MalformedError) as error:
            raise LoginError(str(error)) from error

    def cut(self) -> None:
        """End it while another thread waits for an answer."""
        try:
            # Not SSLSocket's own, which forgets the session that the other thread reads with.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            return  # it has ended

    def close(self) -> None:
        self._socket.close()
