"""A base: its columns, and what the commit that made it states.

A row is a record of the log with its place and its bytes, as the archive has it. `fill` is a JSON
object with the values that the event does not carry, because Postgres did not send them: taken from
the events before it, which the base does not have.

The digest of a table is the sum of its rows' SHA-256 modulo 2^256: a multiset's, so that it does
not depend on files or their order, and the digest of two parts is the sum of theirs.

Pure.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from cdc.events import LSN
from cdc.log.records import format_of
from lockstep.jobs.archiving.layout import RECORD, expect_known
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT: Final = 1
_COLUMNS: Final = RECORD | {"fill": (pa.binary(), "binary")}
SCHEMA: Final = pa.schema([(name, kind) for name, (kind, _) in _COLUMNS.items()])
DELTA_COLUMNS: Final = [(name, kind) for name, (_, kind) in _COLUMNS.items()]
_MODULUS: Final = 1 << 256
_DIGESTED: Final = ("topic", "partition", "offset", "key", "value", "fill")
_encode: Final = msgspec.msgpack.Encoder().encode


class TableCount(NamedTuple):
    """A table in a base."""

    topic: str
    rows: int  # with deletes, and superseded events of older runs
    deletes: int
    digest: str  # hexadecimal


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a base is: the state of all tables at a frontier. Its number is its Delta version."""

    format: int = FORMAT
    pipeline: str
    number: int
    epoch: int
    lsn: str
    seq: int
    committed_at_us: int
    place: int  # the frontier topic's offset after the frontier's record
    chain: str  # of the frontier
    cut: int  # the archive's cut that the frontier is in
    tables: tuple[TableCount, ...]
    ends: dict[str, tuple[int, ...]]
    deletes_since_us: int  # deletes committed before are left out
    previous: str  # SHA-256 of the base before, hexadecimal; empty in the first
    made_at_us: int
    # The oldest base whose files are still there. Unset in records of older versions, which must
    # keep their digests.
    kept_from: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def oldest(self) -> int:
        """The oldest base that can be read, as far as this one states it."""
        return 1 if self.kept_from is msgspec.UNSET else self.kept_from

    @property
    def applied(self) -> Applied:
        """The frontier as a follower has it."""
        return Applied(
            self.pipeline, 1, self.epoch, LSN.parse(self.lsn), self.seq, self.committed_at_us,
            self.place, self.ends,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """How many rows its files have."""
        return sum(table.rows for table in self.tables)


def encode(record: BaseRecord) -> bytes:
    """Return a base record's JSON."""
    return msgspec.json.encode(record)


_decode: Final = msgspec.json.Decoder(BaseRecord).decode


def decode(value: bytes) -> BaseRecord:
    """Return the base record of a JSON; raise MsgspecError if it is none, or refuse its format."""
    expect_known("a base", format_of(value), FORMAT)
    return _decode(value)


def digest(record: BaseRecord | None) -> str:
    """Return what the next base has as `previous`."""
    return sha256(encode(record)).hexdigest() if record else ""


def counted(table: pa.Table) -> list[TableCount]:
    """Return the tables of rows, each with its count and digest."""
    found: dict[str, list[int]] = {}
    columns: list[list[Any]] = [table[name].to_pylist() for name in _DIGESTED]
    for op, record in zip(table["op"].to_pylist(), zip(*columns, strict=True), strict=True):
        sums = found.setdefault(record[0], [0, 0, 0])
        sums[0] += 1
        sums[1] += op == "d"
        sums[2] += int.from_bytes(sha256(_encode(record)).digest())
    return [
        TableCount(topic, rows, deletes, _hex(total))
        for topic, (rows, deletes, total) in found.items()
    ]


def total(counts: Iterable[TableCount]) -> tuple[TableCount, ...]:
    """Return the sums of parts of tables, by topic."""
    found: dict[str, TableCount] = {}
    for each in counts:
        known = found.get(each.topic)
        if known is not None:
            both = int(known.digest, 16) + int(each.digest, 16)
            each = TableCount(  # noqa: PLW2901 - the sum takes its place
                each.topic, known.rows + each.rows, known.deletes + each.deletes, _hex(both)
            )
        found[each.topic] = each
    return tuple(found[topic] for topic in sorted(found))


def without(counts: Iterable[TableCount], removed: Iterable[TableCount]) -> tuple[TableCount, ...]:
    """Return what tables hold once these parts of them are removed."""
    opposite = (
        TableCount(each.topic, -each.rows, -each.deletes, _hex(-int(each.digest, 16)))
        for each in removed
    )
    return total([*counts, *opposite])


def _hex(number: int) -> str:
    return f"{number % _MODULUS:064x}"
