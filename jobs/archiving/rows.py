"""Records of one partition as rows of the archive, with their Merkle tree. Pure but for the salts.

Every record becomes a row with the same bytes. What is searched for is taken from it: an event's
seq, commit, time and operation. A tombstone gets those of the delete before it, a record of a dead
letter the seq of its event.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa

from cdc.log import names
from lockstep.jobs.archiving import layout, merkle
from lockstep.jobs.cuts.reduce import lsn_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What a batch from a task holds at most.
_SALT: Final = merkle.SALT_BYTES


class _Source(msgspec.Struct, gc=False):
    seq: int
    commit_lsn: str
    ts_us: int


class _Event(msgspec.Struct, gc=False):
    op: str
    source: _Source


class _Frontier(msgspec.Struct, gc=False):
    seq: int
    lsn: str
    committed_at_us: int


class _LetterKey(msgspec.Struct, gc=False):
    id: str


class About(NamedTuple):
    """What a row states of its record."""

    seq: int | None = None
    commit_lsn: int | None = None
    committed_at_us: int | None = None
    op: str | None = None


_event: Final = msgspec.json.Decoder(_Event).decode
_frontier: Final = msgspec.json.Decoder(_Frontier).decode
_letter: Final = msgspec.json.Decoder(_LetterKey).decode


class Rows:
    """The rows of one partition's part of a cut, added in the order of their offsets."""

    def __init__(self, prefix: str, cut: int, topic: str, partition: int) -> None:
        self._cut, self._topic, self._partition = cut, topic, partition
        self.tree = merkle.Tree()
        self.events = 0
        self._last = About()
        own = {
            names.frontier_topic(prefix): self._of_frontier,
            names.dead_topic(prefix): self._of_letter,
            names.schema_topic(prefix): self._of_nothing,
        }
        self._about = own.get(topic, self._of_event)
        self._counts = topic not in own

    def add(
        self,
        offsets: Sequence[int],
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
    ) -> pa.RecordBatch:
        """Return the rows of the next records."""
        random = os.urandom(_SALT * len(offsets))
        salts = [random[at : at + _SALT] for at in range(0, len(random), _SALT)]
        for salt, offset, key, value in zip(salts, offsets, keys, values, strict=True):
            self.tree.add(merkle.leaf(salt, offset, key, value))
        about = [self._about(key, value) for key, value in zip(keys, values, strict=True)]
        if self._counts:
            self.events += sum(value is not None for value in values)
        many = len(offsets)
        columns = {
            "cut": [self._cut] * many,
            "topic": [self._topic] * many,
            "partition": [self._partition] * many,
            "offset": offsets,
            "seq": [each.seq for each in about],
            "commit_lsn": [each.commit_lsn for each in about],
            "committed_at": [each.committed_at_us for each in about],
            "op": [each.op for each in about],
            "key_hash": [None if key is None else key_hash(key) for key in keys],
            "key": keys,
            "value": values,
            "salt": salts,
            "leaf": [None] * many,
        }
        return pa.RecordBatch.from_pydict(columns, schema=layout.SCHEMA)

    def _of_event(self, _: bytes | None, value: bytes | None) -> About:
        if value is None:  # a tombstone directly follows its delete
            return self._last._replace(op=None)
        event = _event(value)
        source = event.source
        self._last = About(source.seq, lsn_of(source.commit_lsn), source.ts_us, event.op)
        return self._last

    @staticmethod
    def _of_frontier(_: bytes | None, value: bytes | None) -> About:
        frontier = _frontier(value or b"")
        return About(frontier.seq, lsn_of(frontier.lsn), frontier.committed_at_us)

    @staticmethod
    def _of_letter(key: bytes | None, _: bytes | None) -> About:
        return About(int(_letter(key or b"").id.rpartition("-")[2]))

    @staticmethod
    def _of_nothing(_key: bytes | None, _value: bytes | None) -> About:
        return About()


def key_hash(key: bytes) -> int:
    """Return the number by which rows of one key are next to each other."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True)


def of_cut_record(prefix: str, record: layout.CutRecord) -> pa.RecordBatch:
    """Return the row of a cut record; its place in the pseudo topic is its number."""
    columns = {
        "cut": [record.number],
        "topic": [archive_topic(prefix)],
        "partition": [0],
        "offset": [record.number],
        "seq": [record.seq],
        "commit_lsn": [lsn_of(record.lsn)],
        "committed_at": [record.committed_at_us],
        "value": [layout.encode(record)],
    }
    return _row(columns)


def of_erasure(prefix: str, cut: int, number: int, value: bytes) -> pa.RecordBatch:
    """Return the row of an erasure's audit record, which counts them from 0."""
    place = {"cut": [cut], "topic": [erased_topic(prefix)], "partition": [0], "offset": [number]}
    return _row(place | {"value": [value]})


def _row(columns: Mapping[str, object]) -> pa.RecordBatch:
    empty = {name: [None] for name in layout.SCHEMA.names}
    return pa.RecordBatch.from_pydict({**empty, **columns}, schema=layout.SCHEMA)


def erased_topic(prefix: str) -> str:
    """Return the name under which audit records of erasures are rows; no such topic exists."""
    return f"{prefix}.cdc.erased"


def archive_topic(prefix: str) -> str:
    """Return the name under which cut records are rows; no such topic exists."""
    return f"{prefix}.cdc.archive"
