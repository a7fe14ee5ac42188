"""Records of one partition as rows of the archive, with their Merkle tree. Pure but for the salts.

Every record becomes a row with the same bytes. What is searched for is taken from it: an event's
seq, commit, time and operation. A tombstone gets those of the delete before it, a record of a dead
letter the seq of its event.
"""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from cdc.log import names
from lockstep.jobs.archiving import layout, merkle
from lockstep.jobs.cuts.reduce import lsn_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


# What a row states of its record: seq, commit LSN, time and operation.
About = tuple[int | None, int | None, int | None, str | None]
_NOTHING: Final[About] = (None, None, None, None)

# A transaction's events have the same.
_lsn_of: Final = lru_cache(maxsize=1_024)(lsn_of)
_event: Final = msgspec.json.Decoder(_Event).decode
_frontier: Final = msgspec.json.Decoder(_Frontier).decode
_letter: Final = msgspec.json.Decoder(_LetterKey).decode


class CutRows:
    """The rows of one partition's part of a cut, added in the order of their offsets."""

    def __init__(self, prefix: str, cut: int, topic: str, partition: int) -> None:
        self._cut, self._topic, self._partition = cut, topic, partition
        self.tree = merkle.Tree()
        self.events = 0
        self._last = _NOTHING
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
        many = len(offsets)
        if not many:
            return pa.RecordBatch.from_pylist([], schema=layout.SCHEMA)
        random = os.urandom(_SALT * many)
        salts = [random[at : at + _SALT] for at in range(0, len(random), _SALT)]
        self.tree.extend(map(merkle.leaf, salts, offsets, keys, values))
        seqs, lsns, times, ops = zip(*map(self._about, keys, values), strict=True)
        if self._counts:
            self.events += many - values.count(None)
        columns = {
            "cut": pa.repeat(self._cut, many),
            "topic": pa.repeat(self._topic, many),
            "partition": [self._partition] * many,
            "offset": offsets,
            "seq": seqs,
            "commit_lsn": lsns,
            "committed_at": times,
            "op": ops,
            "key_hash": [None if key is None else key_hash(key) for key in keys],
            "key": keys,
            "value": values,
            "salt": salts,
            "leaf": pa.nulls(many, pa.binary()),
        }
        return pa.RecordBatch.from_pydict(columns, schema=layout.SCHEMA)

    def _of_event(self, _: bytes | None, value: bytes | None) -> About:
        if value is None:  # a tombstone directly follows its delete
            return (*self._last[:3], None)
        event = _event(value)
        source = event.source
        self._last = source.seq, _lsn_of(source.commit_lsn), source.ts_us, event.op
        return self._last

    @staticmethod
    def _of_frontier(_: bytes | None, value: bytes | None) -> About:
        frontier = _frontier(value or b"")
        return frontier.seq, lsn_of(frontier.lsn), frontier.committed_at_us, None

    @staticmethod
    def _of_letter(key: bytes | None, _: bytes | None) -> About:
        return int(_letter(key or b"").id.rpartition("-")[2]), None, None, None

    @staticmethod
    def _of_nothing(_key: bytes | None, _value: bytes | None) -> About:
        return _NOTHING


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
