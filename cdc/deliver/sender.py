"""One request to a webhook's receiver, signed by Standard Webhooks.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import ssl
import time
from collections import deque
from http.client import HTTPException
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from cdc.deliver import addresses
from cdc.errors import CDCError, ConfigError
from cdc.runtime.http_connection import AnswerTooLongError, LimitedConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config.webhooks import Webhook

_PREFIX: Final = "whsec_"
_LEAST_BYTES, _MOST_BYTES = 24, 64  # of a secret, by the specification
_LONGEST_PAUSE_SECONDS: Final = 3_600.0
# A receiver that is away, not one that refuses an event.
_AWAY: Final = frozenset({429, 502, 503, 504})
RESOLVED_SECONDS: Final = 10.0
_OK: Final = range(200, 300)
_NO_MORE: Final = 410
# Of headers and body together: a status and a few words are an answer.
MOST_ANSWER_BYTES: Final = 65_536
_PATH: Final = re.compile("[!-~]*")  # printable ASCII without spaces
# How many idle connections are kept.
_KEPT: Final = 32


class DeliveryResult(NamedTuple):
    """What came of a request.

    Unless it is delivered, `why` says why not. `away`: the receiver as such does not answer;
    `pause` is for how long it asks to be sent nothing. `over`: it wants no more messages.
    """

    delivered: bool
    why: str = ""
    away: bool = False
    pause: float = 0.0
    over: bool = False


def key_of(secret: str) -> bytes:
    """Return the bytes of a secret like whsec_…; raise ConfigError without its content."""
    try:
        found = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if not _LEAST_BYTES <= len(found) <= _MOST_BYTES:
        raise ConfigError(
            "a webhook's secret is none of 24 to 64 bytes in base64",
            hint="make one: `cdc webhook secret`",
        )
    return found


def signature(keys: Sequence[bytes], message_id: str, at: int, body: bytes) -> str:
    """Return the header of a message: one signature with each key."""
    signed = f"{message_id}.{at}.".encode() + body
    made = [base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys]
    return " ".join(f"v1,{each}" for each in made)


class Sender:
    """Sends requests to one receiver; for several threads at once."""

    def __init__(self, webhook: Webhook) -> None:
        """Raise ConfigError for a url that no request can be made of, or a bad secret."""
        parts = urlsplit(webhook.url)
        self._https = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = _port(parts) or (443 if self._https else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not _PATH.fullmatch(self._path):
            raise ConfigError(
                "a webhook's url has characters after the host that cannot be in a request",
                hint="write them percent-encoded: %20 for a space, %C3%A4 for an ä",
            )
        self._at = parts.netloc.rpartition("@")[2]
        self._allowed = addresses.networks(webhook.allow)
        self._keys = [key_of(each) for each in webhook.secrets]
        self._seconds = webhook.timeout_seconds
        self._tls = ssl.create_default_context() if self._https else None
        self._idle = deque[LimitedConnection]()
        self._resolved = "", 0.0  # the address that was judged, and until when it is used

    def send(self, message_id: str, body: bytes) -> DeliveryResult:
        """Send a message, and return what came of it. Redirects are not followed.

        It takes `timeout_seconds` at most, however the receiver sends or reads.
        """
        at = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": "lockstep",
            "host": self._at,
            "webhook-id": message_id,
            "webhook-timestamp": str(at),
            "webhook-signature": signature(self._keys, message_id, at, body),
        }
        try:
            connection = self._connection()
        except CDCError as error:
            return DeliveryResult(delivered=False, why=error.what, away=True)
        try:
            connection.request("POST", self._path, body, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            return DeliveryResult(delivered=False, why=self._why(error), away=True)
        try:
            response.read()
            self._keep(connection)
        except (OSError, HTTPException):
            # The status is the answer. Where the rest is long or late, the connection is closed.
            response.close()
            connection.close()
        return answer(response.status, response.headers.get("retry-after", ""))

    def _why(self, error: OSError | HTTPException) -> str:
        if isinstance(error, AnswerTooLongError):
            return f"the headers of its answer are longer than {MOST_ANSWER_BYTES:,} bytes"
        if isinstance(error, TimeoutError):
            return f"no answer within {self._seconds:g} s"
        return f"no connection: {type(error).__name__}"

    def _connection(self) -> LimitedConnection:
        """Return an idle connection to the receiver's address, or a new one."""
        address = self.address()
        while (found := self._taken()) is not None:
            if found.host == address and found.idle:
                return found
            found.close()
        return LimitedConnection(
            address,
            self._port,
            seconds=self._seconds,
            most_bytes=MOST_ANSWER_BYTES,
            tls=self._tls,
            name=self._host,
        )

    def _taken(self) -> LimitedConnection | None:
        try:
            return self._idle.pop()
        except IndexError:  # maybe another thread has taken the last one
            return None

    def _keep(self, connection: LimitedConnection) -> None:
        if len(self._idle) < _KEPT and connection.idle:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close connections."""
        while (found := self._taken()) is not None:
            found.close()

    def address(self) -> str:
        """Return the receiver's address; raise ConfigError if it may not be sent to."""
        address, until = self._resolved
        if time.monotonic() >= until:
            address = addresses.resolve(self._host, self._port, self._allowed, public=self._https)
            self._resolved = address, time.monotonic() + RESOLVED_SECONDS
        return address


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        raise ConfigError(
            "a webhook's url has a port that is none", hint="1 to 65535, or leave it out"
        ) from None


def answer(status: int, retry_after: str) -> DeliveryResult:
    """Return what an HTTP status means."""
    if status in _OK:
        return DeliveryResult(delivered=True)
    why = f"HTTP {status}"
    pause = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
    pause = min(pause, _LONGEST_PAUSE_SECONDS) if status in _AWAY else 0.0
    return DeliveryResult(
        delivered=False, why=why, away=status in _AWAY, pause=pause, over=status == _NO_MORE
    )
