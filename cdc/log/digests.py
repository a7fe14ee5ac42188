"""Digests of the log: of records, of a frontier's partitions, and the chain of all frontiers.

- The records of one partition in one Kafka transaction are a *chunk*. Its digest is BLAKE3 over its
  records one after another, in the order of their offsets, each as MessagePack of `{"key": …,
  "value": …}`, bytes or nil: tombstones and parts of dead letters too. It is SHA-256 for frontier
  records of format 2: four times as slow, and it is the one hash that every row passes.
- A partition's digest at a frontier folds its chunks since the frontier before:
  SHA-256(digest || chunk), from 32 zero bytes on. Chunks of an initial snapshot, whose producers
  write at the same time, are folded in the order of their seqs.
- A frontier's *chain* is SHA-256 over the chain of the frontier before it and all that its record
  states. So the newest chain stands for every frontier, and every record, since the chain began.

MessagePack has the length before each text: so other records have other bytes, and the digest does
not depend on how often records of a chunk were handed over.

Pure. docs/EVENTS.md ("Frontier record") is the contract.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from cdc.log.records import BLAKE3_FORMAT, DIGESTS_FORMAT, SHA256_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cdc.log.records import FrontierRecord

_encoder: Final = msgspec.msgpack.Encoder()
# How many records are encoded at a time: it bounds the buffer.
_PIECE: Final = 1_000
_SHORT: Final = 16  # a list of fewer has a header of one byte
# What a fold and a chain start from.
START: Final = bytes(32)


class ChunkHash:
    """The running digest of a partition's records in one Kafka transaction."""

    __slots__ = ("_hash",)

    def __init__(self, format_: int = DIGESTS_FORMAT) -> None:
        """`format_` is that of the frontier record that the digest is for."""
        self._hash = blake3() if format_ > SHA256_FORMAT else sha256()

    def add(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add records after those added before."""
        for data in _encoded(messages):
            self._hash.update(data)

    def add_columns(self, keys: Iterable[bytes | None], values: Iterable[bytes | None]) -> None:
        """Add records by their keys and values."""
        self.add([{"key": key, "value": value} for key, value in zip(keys, values, strict=True)])

    def digest(self) -> bytes:
        """Return the chunk's digest."""
        return self._hash.digest()


def _encoded(messages: Sequence[Mapping[str, Any]]) -> Iterator[memoryview]:
    """Yield the bytes of records that have `key` and `value`, in this order, and nothing else."""
    for at in range(0, len(messages), _PIECE):
        piece = messages[at : at + _PIECE]
        header = 1 if len(piece) < _SHORT else 3  # of the list
        yield memoryview(_encoder.encode(piece))[header:]


def fold(digest: bytes, chunk: bytes) -> bytes:
    """Return a partition's digest after one more chunk."""
    return sha256(digest + chunk).digest()


def of_record(key: bytes | None, value: bytes | None) -> str:
    """Return the digest of a single record: that of a chunk that has nothing else."""
    chunk = ChunkHash()
    chunk.add_columns((key,), (value,))
    return encoded(chunk.digest())


def stated(key: bytes, value: bytes | None) -> tuple[str, str]:
    """Return how a frontier states a record of the schema topic: its key and its digest."""
    return key.decode("utf-8", "backslashreplace"), of_record(key, value)


def sealed(record: FrontierRecord, previous: str) -> FrontierRecord:
    """Return a frontier's record with its place in the chain, after the frontier before it."""
    record = replace(record, previous=previous)
    return replace(record, chain=chain(record))


def chain(record: FrontierRecord) -> str:
    """Return what `chain` must be of a record, by all that it states."""
    parts = [
        record.pipeline,
        record.epoch,
        str(record.lsn),
        record.seq,
        record.committed_at_us,
        record.holes,
        record.chunks,
        record.partitions,
        record.digests,
    ]
    if record.format > BLAKE3_FORMAT:
        parts += [record.blocks, record.schemas]
    before = decoded(record.previous) if record.previous else START
    return encoded(sha256(before + msgspec.json.encode(parts)).digest())


def encoded(digest: bytes) -> str:
    """Return a digest as records hold it: base64 without padding, in the alphabet for URLs."""
    return urlsafe_b64encode(digest).decode("ascii").rstrip("=")


def decoded(text: str) -> bytes:
    """Return the digest of a text; raise ValueError if it is none."""
    digest = urlsafe_b64decode(text + "=")
    if len(digest) != len(START):
        raise ValueError("not a digest of 32 bytes")
    return digest
