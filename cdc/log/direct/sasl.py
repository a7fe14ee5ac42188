"""SASL's PLAIN and SCRAM: the client's messages in turn. No I/O.

https://www.rfc-editor.org/rfc/rfc5802, https://www.rfc-editor.org/rfc/rfc4616
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

    from cdc.log.direct.security import Login

# Kafka's minimum; the maximum keeps a server from making us compute without end.
_ITERATIONS: Final = range(4096, 1_000_001)
_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


class RefusedError(Exception):
    """The broker does not prove that it knows our password, or its message is invalid."""


def conversation(login: Login, nonce: str | None = None) -> Generator[bytes, bytes, None]:
    """Yield the client's messages and receive the server's answers; raise RefusedError.

    `nonce` is for tests.
    """
    if login.mechanism == "PLAIN":
        yield f"\0{login.username}\0{login.password}".encode()
        return
    yield from _scram(login, _HASHES[login.mechanism], nonce or secrets.token_urlsafe(24))


def _scram(login: Login, hash_name: str, nonce: str) -> Generator[bytes, bytes, None]:
    user = login.username.replace("=", "=3D").replace(",", "=2C")
    first = f"n={user},r={nonce}"
    server_first = yield f"n,,{first}".encode()
    attributes = _attributes(server_first)
    try:
        server_nonce, iterations = attributes["r"], int(attributes["i"])
        salt = base64.b64decode(attributes["s"], validate=True)
    except (KeyError, ValueError) as error:
        raise RefusedError("the broker's SCRAM challenge is malformed") from error
    if not server_nonce.startswith(nonce) or iterations not in _ITERATIONS:
        raise RefusedError("the broker's SCRAM challenge is not an answer to ours")
    salted = hashlib.pbkdf2_hmac(hash_name, login.password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    stored_key = hashlib.new(hash_name, client_key).digest()
    last = f"c=biws,r={server_nonce}"
    signed = f"{first},{server_first.decode()},{last}".encode()
    signature = hmac.digest(stored_key, signed, hash_name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    server_last = yield f"{last},p={base64.b64encode(proof).decode()}".encode()
    server_key = hmac.digest(salted, b"Server Key", hash_name)
    expected = hmac.digest(server_key, signed, hash_name)
    try:
        shown = base64.b64decode(_attributes(server_last).get("v", ""), validate=True)
    except binascii.Error:
        shown = b""
    if not hmac.compare_digest(shown, expected):
        raise RefusedError("the broker does not prove that it knows our password")


def _attributes(message: bytes) -> dict[str, str]:
    try:
        parts = message.decode().split(",")
    except UnicodeDecodeError as error:
        raise RefusedError("the broker's SCRAM message is no text") from error
    return {part[:1]: part[2:] for part in parts}
