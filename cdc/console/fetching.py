"""One GET for a small document, within limits: 5 s in all, 256 kB, no redirects, TLS verified.

The server may be slow or hostile: the limit of time is on everything together, names and
handshakes included, and bytes are counted before they are parsed. A redirect is an answer like any
other that is not 200. `SSL_CERT_FILE` names a certificate authority of one's own.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final
from urllib.parse import urlsplit

import h11

from cdc.errors import UnavailableError

MOST_SECONDS: Final = 5.0
MOST_BYTES: Final = 262_144
_READ_BYTES: Final = 16_384


async def fetch(url: str) -> bytes:
    """Return what a URL answers; raise UnavailableError where it is no complete 200 in time."""
    try:
        async with asyncio.timeout(MOST_SECONDS):
            return await _fetch(url)
    except TimeoutError:
        raise _failed(url, f"no complete answer within {MOST_SECONDS:.0f} s") from None
    except ssl.SSLCertVerificationError as error:
        raise _failed(url, f"its certificate is not valid: {error.verify_message}") from None
    except OSError as error:
        raise _failed(url, error.strerror or type(error).__name__) from None
    except h11.ProtocolError:
        raise _failed(url, "it does not speak HTTP") from None


def _failed(url: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"cannot read {url}: {why}", hint="it is read again; a file in console.oidc.keys needs none"
    )


async def _fetch(url: str) -> bytes:
    parts = urlsplit(url)
    assert parts.hostname is not None
    # Reads the machine's authorities.
    secure = await asyncio.to_thread(ssl.create_default_context) if _is_tls(url) else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection = h11.Connection(h11.CLIENT)
        request = h11.Request(
            method="GET",
            target=target,
            headers=[
                ("host", parts.netloc),
                ("accept", "application/json"),
                ("accept-encoding", "identity"),
                ("connection", "close"),
            ],
        )
        writer.write(connection.send(request) + connection.send(h11.EndOfMessage()))
        return await _answer(url, connection, reader)
    finally:
        # Not `close`, which would wait for a server that reads nothing.
        writer.transport.abort()


def _is_tls(url: str) -> bool:
    return urlsplit(url).scheme == "https"


async def _answer(url: str, connection: h11.Connection, reader: asyncio.StreamReader) -> bytes:
    """Return the body of the one answer on a connection."""
    body, received = b"", 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(_READ_BYTES)
            received += len(data)
            if received > MOST_BYTES:
                raise _failed(url, f"it answers with more than {MOST_BYTES >> 10} kB")
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            if event.status_code != 200:  # noqa: PLR2004 - as in the RFC
                raise _failed(url, f"HTTP {event.status_code}, and redirects are not followed")
        elif isinstance(event, h11.Data):
            body += event.data
        elif not isinstance(event, h11.InformationalResponse):
            return body
