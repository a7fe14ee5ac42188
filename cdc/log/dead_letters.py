"""Read dead letters: complete events that were too large for their topic, by the pointers to them.

A pointer is an ordinary event whose large values are left out and named in `source.dead`; the
event itself is in `<prefix>.cdc.dead`, split into pieces and compressed, written in the same Kafka
transaction. `DeadLetterAssembler` takes that topic's records as they arrive and returns the events,
checked against their length and checksum. Pure; docs/EVENTS.md ("Dead letters") is the contract.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from cdc.errors import (
    ConfigError,
    GapError,
    unquoted,
)
from cdc.log.records import FORMAT

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Why an event is not in its own topic: it is larger than the topic accepts.
Reason = Literal["size"]

_TORN: Final = (
    "its records were partly deleted by the topic's retention, or something else writes there; a"
    " follower that needs the event must be rebuilt from the source"
)


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """`source.dead` of an event: which values it leaves out, and where the full event is."""

    id: str
    reason: Reason
    columns: tuple[str, ...]
    chunks: int
    bytes: int
    sha256: str


class DeadLetterHead(msgspec.Struct, frozen=True, kw_only=True):
    """A letter's first record: its description for people; its chunks follow."""

    format: int = FORMAT
    id: str
    reason: Reason
    topic: str
    key: str | None  # the record's, as text; null if the table has none or it is too long
    schema: str
    table: str
    op: str
    epoch: int
    seq: int
    commit_lsn: str
    ordinal: int
    committed_at_us: int
    columns: tuple[str, ...]
    encoding: Literal["zlib"] = "zlib"
    chunks: int
    bytes: int
    sha256: str


class ChunkKey(msgspec.Struct, frozen=True):
    """The key of a letter's records: 0 is the head, the chunks count from 1."""

    id: str
    chunk: int


_decode_key: Final = msgspec.json.Decoder(ChunkKey).decode
_decode_members: Final = msgspec.json.Decoder(dict[str, object]).decode
_decode_head: Final = msgspec.json.Decoder(DeadLetterHead).decode


class DeadLetterAssembler:
    """The letters that have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._heads: dict[str, DeadLetterHead] = {}
        self._chunks: dict[str, list[bytes]] = {}

    def add(self, key: bytes | None, value: bytes | None) -> DeadLetterHead | None:
        """Take a record of the topic, in its order; return the head of a now complete letter.

        Chunks whose head retention has deleted are skipped.
        """
        part = chunk_key(key)
        if part.chunk == 0:
            self._heads[part.id] = _head(value or b"")
            self._chunks[part.id] = []
        elif part.id in self._heads and part.chunk == len(self._chunks[part.id]) + 1:
            self._chunks[part.id].append(value or b"")
        return self._heads[part.id] if part.id in self else None

    def __contains__(self, letter_id: str) -> bool:
        head = self._heads.get(letter_id)
        return head is not None and len(self._chunks[letter_id]) == head.chunks

    def pending(self) -> list[str]:
        """Return the ids of the letters not taken, complete or not."""
        return list(self._heads)

    def drop(self, letter_id: str) -> None:
        self._heads.pop(letter_id, None)
        self._chunks.pop(letter_id, None)

    def take(self, letter_id: str) -> bytes:
        """Return a letter's event and forget it; raise GapError if it is not complete."""
        head, chunks = self._heads.pop(letter_id, None), self._chunks.pop(letter_id, [])
        if head is None or len(chunks) != head.chunks:
            raise GapError(
                f"dead letter {letter_id} is not complete: {len(chunks)} of"
                f" {head.chunks if head else 'all'} chunks exist",
                hint=_TORN,
            )
        try:
            event = b"".join(map(zlib.decompress, chunks))
        except zlib.error as error:
            raise GapError(f"dead letter {letter_id} can't be unpacked", hint=_TORN) from error
        if (len(event), hashlib.sha256(event).hexdigest()) != (head.bytes, head.sha256):
            raise GapError(f"dead letter {letter_id} is not what was written", hint=_TORN)
        return event

    def event(self, pointer: Pointer) -> bytes:
        """Return the event that an event points to; raise GapError if it is not complete."""
        event = self.take(pointer.id)
        if (len(event), hashlib.sha256(event).hexdigest()) != (pointer.bytes, pointer.sha256):
            raise GapError(f"dead letter {pointer.id} does not match its pointer", hint=_TORN)
        return event


def chunk_key(key: bytes | None) -> ChunkKey:
    """Return which part of which letter a record of the topic is."""
    return _decoded(key or b"", _decode_key)


def _head(value: bytes) -> DeadLetterHead:
    seen = _decoded(value, _decode_members).get("format")
    if isinstance(seen, int) and seen > FORMAT:
        raise ConfigError(
            f"a dead letter is of format {seen}; this version reads up to {FORMAT}",
            hint="run the Lockstep version that wrote it, or a newer one",
        )
    return _decoded(value, _decode_head)


def _decoded(text: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(text)
    # Bytes that are not UTF-8 raise another error than those that are not JSON.
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the topic of dead letters holds a record that can't be read: {unquoted(error)}",
            hint="something else writes to it; give the pipeline a log.prefix of its own",
        ) from error
