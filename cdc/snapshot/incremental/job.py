"""One running incremental snapshot: which chunk is read next, and what is in the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from cdc.snapshot.incremental.chunk_state import High, Published, Read, Requested
from cdc.snapshot.incremental.fetcher import Fetch
from cdc.snapshot.incremental.records import IncrementalRecord, TableName
from cdc.snapshot.incremental.redaction import NOTHING, logged
from cdc.source.chunks import ChunkRequest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from cdc.events import LSN
    from cdc.snapshot.incremental.chunk_state import State
    from cdc.snapshot.incremental.commands import Command
    from cdc.snapshot.incremental.fetcher import Clock
    from cdc.snapshot.incremental.records import Key, SnapshotState
    from cdc.snapshot.incremental.redaction import Withheld
    from cdc.source.chunks import Chunk

# The target time to read a chunk; the loop encodes it in less.
_CHUNK_SECONDS: Final = 0.05
MAX_BYTES: Final = 512 << 10
# The snapshot fails when more rows than this took another key without their TOAST values.
MAX_PENDING_KEYS: Final = 20_000
# The delay before a chunk that could not be used is read again: it grows from the first to the
# second value.
_RETRY_SECONDS: Final = (0.05, 2.0)
# The delay after an error of the source. This many in a row, a minute and a half, end the snapshot:
# `cdc status` shows it, and an error that has lasted that long does not pass by itself.
_ERROR_SECONDS: Final = (1.0, 30.0)
MAX_ERRORS: Final = 8


class ChunkSizes(NamedTuple):
    """Rows per chunk: of the first, at least, and at most; and how many keys are read at once."""

    first: int = 500
    least: int = 250
    most: int = 2_000
    keys: int = 500


class JobChunk(Fetch):
    """A chunk of a job, from its request until it is published or discarded."""

    def __init__(self, job: Job, number: int, asked: ChunkRequest, now: float) -> None:
        record = job.record
        super().__init__(record.id, number, TableName(record.schema, record.table), asked)
        self.job = job
        self.state: State = Requested()
        self.requested_at = now  # monotonic
        self.last: Key | None = None  # the key of its last row
        self.empties_table = asked.rows == 0  # reads nothing: the table is emptied here

    @property
    def rows(self) -> Chunk:
        """Its rows; they are there before its high watermark."""
        assert self.chunk is not None
        return self.chunk

    @property
    def is_read(self) -> bool:
        """Whether its rows are known."""
        match self.state:
            case Requested(chunk):
                return chunk is not None
            case Read() | High() | Published():
                return True
            case _:
                return False


class Job:
    """An incremental snapshot of this session."""

    def __init__(
        self,
        record: IncrementalRecord,
        clock: Clock = time,
        sizes: ChunkSizes = ChunkSizes(),  # noqa: B008 - immutable
    ) -> None:
        self.record = record
        self.dirty = False  # the log has an older record
        self.key: tuple[str, ...] | None = None  # columns, once a chunk has described them
        self.withheld = NOTHING  # what of the record must not be in the log
        self.pending_keys: dict[Key, None] = dict.fromkeys(record.pending_keys)
        self.chunks: list[JobChunk] = []  # that are not published yet
        self.not_before = 0.0  # monotonic
        # Decoded when its table was first not found, and not visible since; None: it was found.
        self.unseen: frozenset[int] | None = None
        self._clock, self._sizes = clock, sizes
        # Keys whose rows did not fit in a chunk, and the last key that was read of them.
        self._unfinished_keys: tuple[tuple[Key, ...], Key | None] | None = None
        self._read_to, self._up_to = record.last, record.up_to
        self._range_read = record.range_done or record.keys
        self._rows = sizes.first  # in the next chunk
        self._retries = 0

    @classmethod
    def start(
        cls,
        pipeline: str,
        number: str,
        command: Command,
        table: TableName,
        clock: Clock = time,
        sizes: ChunkSizes = ChunkSizes(),  # noqa: B008 - immutable
    ) -> Self:
        """Return a new one, as a command requests it."""
        now_us = clock.time_ns() // 1_000
        record = IncrementalRecord(
            pipeline=pipeline, id=number, schema=table.schema, table=table.table,
            state="running", where=command.where, keys=command.keys is not None,
            pending_keys=command.keys or (), empty_first=command.empty_first,
            began_at_us=now_us, at_us=now_us,
        )  # fmt: skip
        job = cls(record, clock, sizes)
        job.dirty = True
        return job

    @property
    def runnable(self) -> bool:
        """Whether its next chunk may be read now."""
        return (
            self.record.state == "running"
            and self._clock.monotonic() >= self.not_before
            and not self._waits_for_chunk
            and not (self._range_read and not self.pending_keys and not self._unfinished_keys)
        )

    @property
    def _waits_for_chunk(self) -> bool:
        """Whether the next chunk starts where one ends that is not read yet."""
        # Where the table is emptied first, reading starts after that: it must see all that the
        # stream held by then.
        return any(
            not chunk.asked.keys and (not chunk.is_read or chunk.empties_table)
            for chunk in self.chunks
        )

    @property
    def over(self) -> bool:
        """Whether all rows to be read are in the log."""
        range_done = (self.record.range_done or self.record.keys) and not self.record.empty_first
        return range_done and not (self.pending_keys or self._unfinished_keys or self.chunks)

    def request(
        self, number: int, configured_key: tuple[str, ...] | None, most_rows: int
    ) -> JobChunk:
        """Return the next chunk to read: given keys, else the rows after the last chunk."""
        rows = 0 if self.record.empty_first else min(self._rows, most_rows)
        keys: tuple[Key, ...] = ()
        after: Key | None = None
        if self._unfinished_keys:
            (keys, after), self._unfinished_keys = self._unfinished_keys, None
        most_keys = self._sizes.keys
        if (
            rows
            and not keys
            and self.pending_keys
            and (self._range_read or len(self.pending_keys) >= most_keys)
        ):
            keys = tuple(list(self.pending_keys)[:most_keys])
            for key in keys:
                del self.pending_keys[key]
        asked = ChunkRequest(
            relation_id=self.record.relation_id,
            key=configured_key,
            where=self.record.where,
            after=after if keys else self._read_to,
            to=None if keys else self._up_to,
            keys=keys,
            rows=most_keys if keys else rows,
            bytes=MAX_BYTES,
        )
        chunk = JobChunk(self, number, asked, self._clock.monotonic())
        self.chunks.append(chunk)
        return chunk

    def rows_read(self, chunk: JobChunk, rows: Chunk, last: Key | None) -> None:
        """Note where the next chunk starts, and how large it may be."""
        chunk.last = last
        if chunk.empties_table:
            return
        if keys := chunk.asked.keys:
            self._unfinished_keys = None if rows.ended else (keys, last)
            return
        self._read_to = last or self._read_to
        self._up_to = rows.to
        self._range_read = rows.ended
        factor = min(2.0, max(0.5, _CHUNK_SECONDS / max(rows.seconds, 0.001)))
        self._rows = int(min(self._sizes.most, max(self._sizes.least, self._rows * factor)))

    def published(self, chunk: JobChunk, rows: Chunk, count: int, schema_id: int, lsn: LSN) -> None:
        """Note that a chunk is published with the current transaction, in `count` events.

        `schema_id` is the table's version there, and `lsn` the transaction's.
        """
        self._retries = 0
        record = self.record
        record = replace(
            record, rows=record.rows + count, why=None, failing_since_us=None, errors=0
        )
        if chunk.empties_table:
            record = replace(record, empty_first=False, emptied_under=schema_id, emptied_lsn=lsn)
        elif not chunk.asked.keys:
            record = replace(
                record,
                last=chunk.last or record.last,
                up_to=rows.to,
                range_done=rows.ended or record.range_done,
            )
        self.change(record)

    def key_changed(self, old: Key | None, new: Key | None) -> bool:
        """Note that a row left a key, or took one without its TOAST; False: too many."""
        before = len(self.pending_keys)
        if old is not None:
            self.pending_keys.pop(old, None)
        if new is not None:
            self.pending_keys[new] = None
        self.dirty |= new is not None or len(self.pending_keys) != before
        return len(self.pending_keys) <= MAX_PENDING_KEYS

    def retry(self, why: str | None = None, *, from_the_start: bool = False) -> None:
        """Read again, after a delay, from what is published, or from the start; drop the rest."""
        record = self.record
        if from_the_start:
            record = replace(record, last=None, up_to=None, range_done=record.keys)
        if why != record.why or from_the_start or record.failing_since_us is None:
            self.wait(why, record)
            record = self.record
        self._read_to, self._up_to = record.last, record.up_to
        self._range_read = record.range_done or record.keys
        first, most = _RETRY_SECONDS
        self.not_before = self._clock.monotonic() + min(most, first * 2**self._retries)
        self._retries += 1

    def continue_as(self, table: TableName) -> None:
        """Read the table under the name that it has; empty that topic too if the other was."""
        record = self.record
        if table != TableName(record.schema, record.table):
            record = replace(record, empty_first=record.replaces, emptied_under=0)
        self.change(replace(record, schema=table.schema, table=table.table))

    def count_error(self, what: str) -> bool:
        """Retry later what an error has stopped; False after too many errors."""
        self.retry(what)
        errors = self.record.errors + 1
        self.change(replace(self.record, errors=errors))
        first, most = _ERROR_SECONDS
        self.not_before = self._clock.monotonic() + min(most, first * 2 ** (errors - 1))
        return errors < MAX_ERRORS

    def wait(self, why: str | None, record: IncrementalRecord | None = None) -> None:
        """Note what it waits for, and since when nothing has been read."""
        record = record or self.record
        since = record.failing_since_us or self._clock.time_ns() // 1_000
        self.change(replace(record, why=why, failing_since_us=since))

    def drop_chunks(self) -> None:
        """Forget the chunks that are not published: their keys are pending again."""
        self.pending_keys |= dict.fromkeys(self._keys_in_chunks)
        self._unfinished_keys = None
        self.chunks.clear()
        self._rows = max(self._sizes.least, self._rows // 2)

    def enter(self, state: SnapshotState, why: str | None = None) -> None:
        self.change(replace(self.record, state=state, why=why))

    def change(self, record: IncrementalRecord) -> None:
        """Set another record, to be written to the log."""
        self.record = replace(record, at_us=self._clock.time_ns() // 1_000)
        self.dirty = True

    def replaced_by(self, other: IncrementalRecord) -> None:
        """Note that another snapshot is responsible for a topic that this one may have emptied."""
        if self.record.emptied_under and self.record.name == other.name:
            # Not by `change`: when it ended is compared with the start of later ones.
            self.record = replace(self.record, emptied_under=0)
            self.dirty = True

    def take(self) -> IncrementalRecord:
        """Return the record to be written to the log; it is then not dirty."""
        self.dirty = False
        pending_keys = tuple(dict.fromkeys((*self.pending_keys, *self._keys_in_chunks)))
        return logged(replace(self.record, pending_keys=pending_keys), self.withheld)

    def withhold(self, withheld: Withheld) -> None:
        """Withhold exactly this from the log."""
        self.dirty |= logged(self.record, withheld) != logged(self.record, self.withheld)
        self.withheld = withheld

    @property
    def _keys_in_chunks(self) -> Iterable[Key]:
        """The keys that are being read, whether or not their rows fit in a chunk."""
        yield from (key for chunk in self.chunks for key in chunk.asked.keys)
        yield from self._unfinished_keys[0] if self._unfinished_keys else ()
