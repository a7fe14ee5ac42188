"""An issuer whose tokens say who views: finds its public keys, and verifies tokens by them.

The keys are from a file, a URL, or the URL that the issuer's discovery document names. They are
cached, and read again for a key that is not known: a client that sends tokens with invented keys
causes one reading each 10 s, and few of its requests wait for that. Each reading replaces all keys,
and after an hour a request waits for one, so that a key that was withdrawn is refused an hour later
at most. Keys are used for a day after readings fail, so that an issuer that is away for a while
keeps nobody out. A document that is read from a URL is small, complete within 5 s, and no redirect.

https://www.rfc-editor.org/rfc/rfc7517, https://openid.net/specs/openid-connect-discovery-1_0.html
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import orjson

from cdc.config.meaning import is_private_url, is_url
from cdc.console import tokens
from cdc.console.tokens import TokenError
from cdc.errors import CDCError, ConfigError, UnavailableError
from cdc.runtime.http_connection import AnswerTooLongError, LimitedConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config.oidc import Oidc
    from cdc.console.tokens import SigningKey, Viewer

log = logging.getLogger("cdc.console.issuer")

# Between two readings, whatever asks for them.
LEAST_SECONDS: Final = 10.0
FRESH_SECONDS: Final = 3_600.0
KEPT_SECONDS: Final = 86_400.0
# Requests that wait for one reading; more are answered by what is known.
MOST_WAITING: Final = 32
# Of a document: in all, names and handshakes included, and with its headers.
MOST_SECONDS: Final = 5.0
MOST_BYTES: Final = 262_144
_DISCOVERY: Final = "/.well-known/openid-configuration"


class Issuer:
    """The issuer that is configured, with its keys. For one event loop."""

    def __init__(self, oidc: Oidc, clock: Callable[[], float] = time.monotonic) -> None:
        self._oidc = oidc
        self._clock = clock
        self._keys: dict[str, SigningKey] = {}
        self._read_at = self._tried_at = -float("inf")
        self._reading: asyncio.Task[None] | None = None
        self._waiting = 0

    @property
    def header(self) -> bytes:
        """The name of the header that has the token, in lower case."""
        return self._oidc.header.lower().encode()

    async def viewer(self, given: list[str]) -> Viewer:
        """Return who asks, by all headers of that name; raise TokenError where that is not known.

        Raises UnavailableError where the issuer's keys are not known.
        """
        if len(given) != 1:
            many = "several" if given else "no"
            raise TokenError(f"the proxy sends {many} headers {self._oidc.header}")
        scheme, _, token = given[0].strip().rpartition(" ")
        if scheme.strip().lower() not in {"", "bearer"}:
            raise TokenError(f"the proxy sends no token in {self._oidc.header}")
        try:
            key = await self._key(tokens.kid_of(token))
            return tokens.viewer_of(token, key, self._oidc)
        except TokenError as error:
            raise TokenError(f"the proxy's token is not accepted: {error}", error.status) from None

    async def _key(self, kid: str) -> SigningKey:
        """Return a key; raise TokenError where the issuer has no such one.

        Raises UnavailableError where no key is known at all.
        """
        age = self._clock() - self._read_at
        if age > KEPT_SECONDS:
            self._keys = {}
        found = self._keys.get(kid)
        if found is not None and age <= FRESH_SECONDS:
            return found
        reading = self._read_again()
        if reading is not None and self._waiting < MOST_WAITING:
            self._waiting += 1
            try:
                await asyncio.shield(reading)
            finally:
                self._waiting -= 1
            found = self._keys.get(kid)
        if not self._keys:
            raise UnavailableError("the issuer's keys are not known", hint="see the console's log")
        if found is None:
            raise TokenError("the issuer has no such key")
        return found

    def _read_again(self) -> asyncio.Task[None] | None:
        """Return the reading that runs, or a new one; None shortly after one."""
        if self._reading is not None and not self._reading.done():
            return self._reading
        if self._clock() - self._tried_at < LEAST_SECONDS:
            return None
        self._tried_at = self._clock()
        self._reading = asyncio.create_task(self._read())
        return self._reading

    async def _read(self) -> None:
        try:
            self._keys = tokens.keys_of(await self._document())
        except CDCError as error:
            fields = {"issuer": self._oidc.issuer, "error": error.what, "to_do": error.hint}
            log.warning("cannot read the issuer's keys", extra={"fields": fields})
            return
        self._read_at = self._clock()
        found = {"issuer": self._oidc.issuer, "keys": len(self._keys)}
        log.info("has read the issuer's keys", extra={"fields": found})

    async def _document(self) -> bytes:
        keys = self._oidc.keys
        if keys is None:
            keys = await _discovered(self._oidc.issuer or "")
        if is_url(keys):
            return await fetch(keys)
        return await asyncio.to_thread(read_file, Path(keys))


async def fetch(url: str) -> bytes:
    """Return what a URL answers; raise UnavailableError where it is no complete 200 in time."""
    try:
        async with asyncio.timeout(MOST_SECONDS):
            return await asyncio.to_thread(_fetch, url)
    except TimeoutError:
        why = f"no complete answer within {MOST_SECONDS:.0f} s"
    except ssl.SSLCertVerificationError as error:
        why = f"its certificate is not valid: {error.verify_message}"
    except AnswerTooLongError:
        why = f"it answers with more than {MOST_BYTES >> 10} kB"
    except HTTPException:
        why = "it does not speak HTTP"
    except OSError as error:
        why = error.strerror or type(error).__name__
    raise _unread(url, why) from None


def _fetch(url: str) -> bytes:
    parts = urlsplit(url)
    host = parts.hostname or ""
    # Reads the machine's authorities.
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    connection = LimitedConnection(
        host, parts.port or (443 if tls else 80),
        seconds=MOST_SECONDS, most_bytes=MOST_BYTES, tls=tls, name=host,
    )  # fmt: skip
    with closing(connection):
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"host": parts.netloc, "accept": "application/json", "connection": "close"}
        connection.request("GET", target, headers=headers)
        with connection.getresponse() as answer:
            if answer.status != 200:  # noqa: PLR2004 - as in the RFC
                raise _unread(url, f"HTTP {answer.status}, and redirects are not followed")
            return answer.read()


def _unread(url: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"cannot read {url}: {why}", hint="it is read again; a file in console.oidc.keys needs none"
    )


def read_file(path: Path) -> bytes:
    """Return a file with keys; raise ConfigError where it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read the issuer's keys in {path}: {error.strerror}",
            hint="set console.oidc.keys to a file with the issuer's JWKS, or to its URL",
        ) from None


async def _discovered(issuer: str) -> str:
    """Return the URL of an issuer's keys."""
    url = issuer.rstrip("/") + _DISCOVERY
    try:
        found: Any = orjson.loads(await fetch(url))
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or found.get("issuer") != issuer:
        raise ConfigError(
            f"{url} does not describe {issuer}", hint="correct console.oidc.issuer, or set keys"
        )
    keys = found.get("jwks_uri")
    # A document of another machine makes no request to this one.
    is_known = isinstance(keys, str) and is_private_url(keys)
    if not is_known or (issuer.startswith("https:") and not str(keys).startswith("https:")):
        raise ConfigError(f"{url} names no https URL as jwks_uri", hint="set console.oidc.keys")
    return str(keys)
