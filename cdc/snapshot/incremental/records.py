"""The records of incremental snapshots in `<prefix>.cdc.snapshot`, by their ids.

A record is written in the Kafka transaction of the rows that it counts and of the resume record, so
all three always agree. Exact JSON both ways, as `cdc.log.records`. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from cdc.events import LSN
from cdc.log.records import FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterable

SnapshotState = Literal["running", "paused", "done", "stopped", "failed"]
ACTIVE: Final = ("running", "paused")
# How many that are over are kept: to be listed, and to recognize a command that is read twice.
KEPT: Final = 100
# More are kept for this long after their end, so that `--wait` sees how each ended.
_SHOWN_SECONDS: Final = 60.0
# Never more than this, also of failed ones: who may write signals could otherwise fill the log.
MOST_KEPT: Final = 10_000

NO_LSN: Final = LSN(0)

Key = tuple[str, ...]  # a key's values as Postgres writes them, in the key's order


class TableName(msgspec.Struct, frozen=True):
    """A table, by schema and name."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


class IncrementalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incremental snapshot of one table."""

    format: int = FORMAT
    pipeline: str
    id: str
    schema: str
    table: str
    state: SnapshotState
    relation_id: int = 0  # 0: not looked up yet
    where: str | None = None
    keys: bool = False  # only rows by their keys, those of `pending_keys`
    # The table in the log is still to be emptied.
    empty_first: bool = msgspec.field(default=False, name="anew")
    # The table's version under which it was emptied; 0: it was not.
    emptied_under: int = 0
    emptied_lsn: LSN = NO_LSN  # of the transaction that emptied it
    last: Key | None = None  # in the key's order, the log has the rows up to here
    # The greatest key at the start.
    up_to: Key | None = msgspec.field(default=None, name="to")
    # To be read by key, in any case.
    pending_keys: tuple[Key, ...] = msgspec.field(default=(), name="again")
    # Everything up to `up_to` is in the log.
    range_done: bool = msgspec.field(default=False, name="swept")
    rows: int = 0  # published
    estimate: int | None = None  # of the table's rows
    began_at_us: int = 0
    at_us: int = 0
    why: str | None = None  # why it failed or waits
    withheld: bool = False  # keys or condition may hold hidden values, so they are not here
    # Since when no rows have arrived, and how many errors in a row; None while rows arrive.
    failing_since_us: int | None = None
    errors: int = 0

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def summary(self) -> dict[str, object]:
        """Return its fields for logs and status; never a key."""
        return {
            "id": self.id,
            "table": self.name,
            "state": self.state,
            "rows": self.rows,
            "why": self.why,
        }

    @property
    def replaces(self) -> bool:
        """Whether it empties the table in the log first, or has done so."""
        return self.empty_first or bool(self.emptied_under)

    @property
    def left_empty(self) -> bool:
        """Whether it has emptied the table in the log, and ended before it had read it."""
        return bool(self.emptied_under) and self.state in {"stopped", "failed"}

    @property
    def found_empty(self) -> bool:
        """Whether it has read the complete table, and no row was left to be published."""
        is_complete = not (self.keys or self.where or self.withheld)
        return self.state == "done" and is_complete and not self.rows

    @property
    def active(self) -> bool:
        """Whether it still has work to do."""
        return self.state in ACTIVE


def read_since(failed: IncrementalRecord, known: Iterable[IncrementalRecord]) -> bool:
    """Whether the complete table was read by a later snapshot."""
    return any(
        each.state == "done"
        and each.name == failed.name
        and each.began_at_us >= failed.at_us
        and each.where in {None, failed.where}
        and not each.keys
        for each in known
    )


def forgettable(known: Iterable[IncrementalRecord], now_us: int) -> list[str]:
    """Return the ids of the snapshots that need not be kept, of those that ended first.

    One that has failed is kept until that is acknowledged, or the table was read since; one that
    has left its topic empty, until another has filled it. No more than MOST_KEPT that failed stay.
    """
    over = sorted((each for each in known if not each.active), key=lambda each: each.at_us)
    done = defaultdict[str, list[IncrementalRecord]](list)
    for each in over:
        if each.state == "done":
            done[each.name].append(each)
    shown_us = now_us - _SHOWN_SECONDS * 1e6

    def is_kept(each: IncrementalRecord) -> bool:
        failed = each.state == "failed" and not read_since(each, done[each.name])
        return failed or each.at_us >= shown_us

    surplus = [each for each in over[:-KEPT] if not each.left_empty]
    too_many = len(over) - MOST_KEPT
    return [each.id for at, each in enumerate(surplus) if at < too_many or not is_kept(each)]


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was executed, kept as long as its signature would still be valid."""

    format: int = FORMAT
    pipeline: str
    id: str  # the signature's
    lsn: str  # of the message: a message with this LSN is the same one
    at_us: int  # its transaction's commit


def key(pipeline: str, part: str, **fields: object) -> bytes:
    """Return the key of a record in the snapshots' topic."""
    return msgspec.json.encode({"pipeline": pipeline, "part": part, **fields})


def command_key(pipeline: str, number: str) -> bytes:
    return key(pipeline, "command", id=number)


def replacement_key(pipeline: str, schema: str, table: str) -> bytes:
    return key(pipeline, "replacement", schema=schema, table=table)


def incremental_key(pipeline: str, number: str) -> bytes:
    return key(pipeline, "live", id=number)
