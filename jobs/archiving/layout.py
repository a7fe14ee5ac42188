"""The archive's table: its columns, and what each of its commits states.

One Delta table for all topics, so that one commit is one cut of all tables. A row is a record of
the log, byte for byte: events, tombstones, logical messages, dead letters, frontier records, table
versions and DDL statements. The columns before `key` are for readers that search; within a file
rows are sorted by topic, `key_hash` and seq.

A *cut record* describes a cut: what it holds of each partition (its *spans*), their Merkle roots,
the frontier and its chain, the erasures before it, and the digest of the cut record before. It is
in the metadata of the cut's commit, and a row of the pseudo topic `<prefix>.cdc.archive`, because
Delta deletes commits after a while. The newest commit also has each partition's end: it is the
archive's position.

Pure.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.log.records import format_of
from lockstep.jobs.archiving import merkle
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMAT: Final = 1
# By column: its Arrow type, and its type in Delta.
Columns = dict[str, tuple[pa.DataType, str]]
# A record's place, what readers search for, and its bytes.
RECORD: Final[Columns] = {
    "topic": (pa.string(), "string"),
    "partition": (pa.int32(), "integer"),
    "offset": (pa.int64(), "long"),
    "seq": (pa.int64(), "long"),
    "commit_lsn": (pa.int64(), "long"),
    "committed_at": (pa.timestamp("us", "UTC"), "timestamp"),
    "op": (pa.string(), "string"),
    "key_hash": (pa.int64(), "long"),
    "key": (pa.binary(), "binary"),
    "value": (pa.binary(), "binary"),
}
_COLUMNS: Final[Columns] = {
    "cut": (pa.int64(), "long"),
    **RECORD,
    # Random, and deleted with the record: then `leaf` has its place in the tree.
    "salt": (pa.binary(), "binary"),
    "leaf": (pa.binary(), "binary"),
}
SCHEMA: Final = pa.schema([(name, kind) for name, (kind, _) in _COLUMNS.items()])
DELTA_COLUMNS: Final = [(name, kind) for name, (_, kind) in _COLUMNS.items()]
SORTED_BY: Final = ("topic", "key_hash", "seq", "partition", "offset")


class CutSpan(NamedTuple):
    """A cut's part of a partition: `records` from offset `start` to before `end`."""

    topic: str
    partition: int
    start: int
    end: int
    events: int
    records: int
    root: str  # of the Merkle tree over the records, hexadecimal


class CutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut holds. Its number counts the cuts of the archive from 1."""

    format: int = FORMAT
    pipeline: str
    number: int
    above: int  # the seq of the frontier before
    epoch: int
    lsn: str
    seq: int
    committed_at_us: int
    place: int  # the frontier topic's offset after the frontier's record
    chain: str  # of the frontier
    spans: tuple[CutSpan, ...]
    root: str  # over the spans, hexadecimal
    previous: str  # SHA-256 of the cut record before, hexadecimal; empty in the first
    archived_at_us: int
    # How many erasures were committed before it, and the digest of their audit records; nothing in
    # cut records of older versions.
    audits: int = 0
    audit: str = ""

    def applied(self, ends: Mapping[str, tuple[int, ...]]) -> Applied:
        """Return the frontier as a follower has it, with the end of every partition."""
        return Applied(
            self.pipeline, 1, self.epoch, LSN.parse(self.lsn), self.seq, self.committed_at_us,
            self.place, ends,
        )  # fmt: skip

    @property
    def events(self) -> int:
        """How many events it holds."""
        return sum(span.events for span in self.spans)

    @property
    def records(self) -> int:
        """How many records it holds."""
        return sum(span.records for span in self.spans)


class Audits(NamedTuple):
    """How many erasures there were, and the digest of their audit records in their order."""

    number: int = 0
    digest: str = ""

    def after(self, value: bytes) -> Audits:
        """Return it with one more audit record."""
        chained = sha256(self.digest.encode() + sha256(value).digest()).hexdigest()
        return Audits(self.number + 1, chained)


class ArchivePosition(NamedTuple):
    """Up to where the archive holds the log."""

    applied: Applied
    newest: CutRecord | None
    digest: str  # of the newest cut record; empty without one
    audits: Audits = Audits()


def encode(record: CutRecord) -> bytes:
    """Return a cut record's JSON."""
    return msgspec.json.encode(record)


_decode: Final = msgspec.json.Decoder(CutRecord).decode


def decode(value: bytes) -> CutRecord:
    """Return the cut record of a JSON; raise MsgspecError if it is none, or refuse its format."""
    expect_known("an archive's cut", format_of(value), FORMAT)
    return _decode(value)


def expect_known(what: str, seen: int, newest: int) -> None:
    """Raise ConfigError if a record has a newer format than this version knows."""
    if seen > newest:
        raise ConfigError(
            f"{what} is of format {seen}; this version reads up to {newest}",
            hint="run the Lockstep version that wrote it, or a newer one",
        )


def digest(value: bytes) -> str:
    """Return what the next cut record has as `previous`."""
    return sha256(value).hexdigest()


def root(spans: Iterable[CutSpan]) -> str:
    """Return the Merkle root over spans."""
    each = ((s.topic, s.partition, s.records, bytes.fromhex(s.root)) for s in spans)
    return merkle.cut_root(each).hex()


def facts(position: ArchivePosition) -> dict[str, object]:
    """Return what a commit states: the newest cut, and the end of every partition."""
    assert position.newest is not None
    return {
        "pipeline": position.applied.pipeline,
        "cut": encode(position.newest).decode(),
        "ends": dict(position.applied.ends),
        "audits": position.audits,
    }


def position(pipeline: str, stated: Mapping[str, Any]) -> ArchivePosition:
    """Return the position that a commit states; the log's beginning if it has no cut."""
    text = stated.get("cut")
    if text is None:
        return ArchivePosition(Applied.beginning(pipeline, 1), None, "")
    newest = decode(text.encode())
    ends = {topic: tuple(offsets) for topic, offsets in stated["ends"].items()}
    audits = Audits(*stated.get("audits", ()))
    return ArchivePosition(newest.applied(ends), newest, digest(text.encode()), audits)
