"""Watermarks: the messages that the daemon writes into the WAL around each chunk. Pure.

Every role may emit a message, so a watermark carries a MAC of its session's key. A session ignores
the watermarks of others.
"""

from __future__ import annotations

import hmac
import secrets
import uuid
from typing import Final

import msgspec

from cdc.encode.logical_messages import OURS
from cdc.source.authority import session_mac

PREFIX: Final = f"{OURS}window"
_MAX_BYTES: Final = 4_096


class Watermark(msgspec.Struct, frozen=True, array_like=True):
    """The low or high watermark of a chunk."""

    session: str
    snapshot: str  # its id
    chunk: int
    relation_id: int
    low: bool
    mac: str = ""


_decode: Final = msgspec.json.Decoder(Watermark).decode


class Signer:
    """Signs the watermarks of one session, and recognizes them."""

    def __init__(self) -> None:
        self._session, self._key = uuid.uuid4().hex[:12], secrets.token_bytes(32)

    def watermark(self, snapshot: str, chunk: int, relation_id: int, *, low: bool) -> bytes:
        """Return the message of a chunk's watermark."""
        plain = Watermark(self._session, snapshot, chunk, relation_id, low)
        return encode(msgspec.structs.replace(plain, mac=self._mac(plain)))

    def is_of_session(self, watermark: Watermark) -> bool:
        """Whether a watermark claims to be of this session."""
        return watermark.session == self._session

    def is_signed(self, watermark: Watermark) -> bool:
        """Whether this session has written a watermark."""
        plain = msgspec.structs.replace(watermark, mac="")
        return hmac.compare_digest(self._mac(plain).encode(), watermark.mac.encode())

    def _mac(self, plain: Watermark) -> str:
        return session_mac(self._key, encode(plain))


def encode(watermark: Watermark) -> bytes:
    return msgspec.json.encode(watermark)


def decode(content: bytes) -> Watermark | None:
    """Return the watermark, or None where the content is none."""
    if len(content) > _MAX_BYTES:
        return None
    try:
        return _decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
