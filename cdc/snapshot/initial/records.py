"""What a snapshot plans and what it has done, as records in `<prefix>.cdc.snapshot`.

The topic is compacted, with one partition. Keys are JSON objects with `pipeline` and `part`:

- `state`: the stage of the initial snapshot. Each writer for a snapshot first fences, then reads
  this, and writes only where generation and token are its own.
- `plan` and `table`: what a generation copies. A plan holds no ranges: they follow from the pages.
- `range`: one range is in the log. It is written in the Kafka transaction of the range's rows.

A generation's seqs are in consecutive blocks, one per range. So every row's seq is known from its
place, whichever task copies it and whenever. Blocks are larger than what they hold: there are
holes.

Exact JSON both ways, as `cdc.log.records`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from cdc.events import LSN
from cdc.log.records import FORMAT, PinnedPublication, SchemaRecord

if TYPE_CHECKING:
    from collections.abc import Iterator


# Seqs for a relation about whose row count nothing is known before they are read.
UNKNOWN_CAPACITY: Final = 1 << 40

Stage = Literal["due", "planning", "running", "done"]
Kind = Literal["log", "direct"]  # rows go into the log, or directly into the store
Part = Literal["rows", "gone", "truncate"]


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True):
    """The stage of the initial snapshot; `token` is that of the coordinator that wrote it."""

    format: int = FORMAT
    pipeline: str
    stage: Stage
    generation: int = 0
    token: str = ""
    tasks: int = 0  # transactional ids of this and older generations: 0 to tasks - 1
    next_seq: int = 1  # above every seq of this and older generations
    rows: int = 0  # copied, once it is done
    bytes: int = 0
    seconds: float = 0.0
    owner: str = ""
    at_us: int = 0
    # Topics of the tables whose rows it has copied directly into their store, once it is done;
    # empty in records of older versions.
    direct: tuple[str, ...] = ()


class PageRange(msgspec.Struct, frozen=True, kw_only=True):
    """Some or all pages of a planned table, and the seqs of its rows."""

    table: int  # index in the plan
    number: int
    first_page: int | None  # None: the complete relation
    end_page: int | None  # exclusive
    first_seq: int
    capacity: int


class SnapshotTable(msgspec.Struct, frozen=True, kw_only=True):
    """A relation that holds rows of a published table: the table, or a partition of it."""

    format: int = FORMAT
    schema_id: int  # the published table's version
    partitions: int  # of its topic
    relation_id: int
    relation: str  # quoted, with its schema
    filenode: int  # another one after a rewrite, whose rows an older snapshot can't see
    outputs: tuple[str, ...]  # an SQL expression per column: its text as pgoutput writes it
    columns: tuple[str, ...]  # the columns read, and their numbers: others after some DDL
    attnums: tuple[int, ...]
    where: str | None = None
    kind: Kind = "log"
    pages: int | None = None  # None: not a heap
    pages_per_range: int = 0
    rows_per_page: int = 0  # at most
    first_seq: int
    rows: int = 0  # estimated
    bytes: int = 0

    @property
    def capacity(self) -> int:
        """How many seqs its rows may take."""
        return UNKNOWN_CAPACITY if self.pages is None else self.pages * self.rows_per_page

    def ranges(self, index: int) -> Iterator[PageRange]:
        """Yield its ranges, as the table of that index in the plan."""
        if self.pages is None:
            yield PageRange(
                table=index, number=0, first_page=None, end_page=None,
                first_seq=self.first_seq, capacity=UNKNOWN_CAPACITY,
            )  # fmt: skip
            return
        for number, first in enumerate(range(0, self.pages, self.pages_per_range)):
            end = min(first + self.pages_per_range, self.pages)
            yield PageRange(
                table=index,
                number=number,
                first_page=first,
                end_page=end,
                first_seq=self.first_seq + first * self.rows_per_page,
                capacity=(end - first) * self.rows_per_page,
            )


class StalePartition(msgspec.Struct, frozen=True, kw_only=True):
    """A topic partition with keys of older generations: those without a row now are deleted."""

    schema_id: int  # the newest version that the topic had
    topic: str
    partition: int
    events: int  # of older generations
    first_seq: int


class SnapshotPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One generation: what is copied, as of when, and by how many tasks.

    `tables` and `schemas` are records of their own in the log (`cdc.snapshot.initial.topic`).
    """

    format: int = FORMAT
    pipeline: str
    generation: int
    token: str
    epoch: int
    database: str
    publication: PinnedPublication  # as of the snapshot
    snapshot: str  # its name, for SET TRANSACTION SNAPSHOT
    lsn: LSN  # its consistent point
    taken_at_us: int  # the time that its rows' events have
    tasks: int
    first_seq: int  # of its first block: every older generation's are lower
    next_seq: int  # after the last block
    stale: tuple[StalePartition, ...] = msgspec.field(default=(), name="gone")
    tables: tuple[SnapshotTable, ...] = ()
    schemas: dict[int, SchemaRecord] = {}

    def ranges(self) -> Iterator[PageRange]:
        """Yield every range of every table."""
        for index, table in enumerate(self.tables):
            yield from table.ranges(index)

    def ranges_of(self, task: int) -> Iterator[PageRange]:
        """Yield the ranges of one task: of P tasks, task k has k, k+P, and so on."""
        for number, each in enumerate(self.ranges()):
            if number % self.tasks == task:
                yield each


class RangeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the log of a generation: a range of rows, a partition's deletes, a truncate."""

    format: int = FORMAT
    generation: int
    part: Part = "rows"
    table: int  # index in the plan: of a table, or in `stale`
    number: int
    rows: int
    bytes: int
    ends: tuple[tuple[str, int, int], ...]  # topic, partition, events
    seconds: float
    # Which seqs the events may have, and the digest of each of `ends` (`cdc.log.digests`); nothing
    # in records of older versions.
    first_seq: int = 0
    seqs: int = 0
    digests: tuple[str, ...] = ()
