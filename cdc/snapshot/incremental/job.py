"""One running incremental snapshot: what has been read, and what is in the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc.snapshot.incremental.records import LiveRecord
from cdc.snapshot.incremental.redaction import NOTHING, logged
from cdc.source.chunks import Asked

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from typing import Self

    from cdc.snapshot.incremental.commands import Command, Of
    from cdc.snapshot.incremental.records import Key, State
    from cdc.snapshot.incremental.redaction import Withheld
    from cdc.snapshot.incremental.visibility import Window
    from cdc.source.chunks import Chunk

# The target time to read a chunk; the loop encodes it in less.
_CHUNK_SECONDS: Final = 0.05
_FIRST_ROWS, _LEAST_ROWS, MOST_ROWS = 500, 250, 2_000
MOST_BYTES: Final = 512 << 10
# How many keys are read at once where keys are given.
_KEYS: Final = 500
# The snapshot fails when more rows than this took another key without their TOAST values.
MOST_AGAIN: Final = 20_000
# The delay before a chunk that could not be used is read again: it grows from the first to the
# second value.
_AGAIN_SECONDS: Final = (0.05, 2.0)
# The delay after an error of the source. This many in a row, a minute and a half, end the snapshot:
# `cdc status` shows it, and an error that has lasted that long does not pass by itself.
_ERROR_SECONDS: Final = (1.0, 30.0)
MOST_ERRORS: Final = 8


class Flight:
    """A chunk in flight: requested, read, and between its watermarks in the stream."""

    def __init__(self, job: Job, number: int, asked: Asked) -> None:
        self.job, self.number, self.asked = job, number, asked
        self.relation_id = asked.relation_id
        self.estimate: int | None = None
        self.window: Window | None = None  # open between the watermarks
        self.schema_id: int | None = None  # the table's version at the low watermark
        self.chunk: Chunk | None = None  # set before the high watermark is written
        self._began_at = time.monotonic()
        self.marked_at = 0.0  # monotonic, when the high watermark was written
        self.done: Future[None] | None = None
        self.empties = asked.rows == 0  # reads nothing: the place where the table is emptied
        self.void = False  # its result is discarded
        self.noted = False  # that it was read: at the worker's end or its high watermark

    @property
    def age_seconds(self) -> float:
        """How long it has been in flight."""
        return time.monotonic() - self._began_at


class Job:
    """An incremental snapshot of this session."""

    def __init__(self, record: LiveRecord) -> None:
        self.record = record
        self.dirty = False  # the log has an older record
        self.key: tuple[str, ...] | None = None  # columns, once a chunk has described them
        self.withheld = NOTHING  # what of the record must not be in the log
        self.again: dict[Key, None] = dict.fromkeys(record.again)
        self.flights: list[Flight] = []  # before their high watermark
        self.not_before = 0.0  # monotonic
        # Keys whose rows did not fit in a chunk, and the last key that was read of them.
        self._rest: tuple[tuple[Key, ...], Key | None] | None = None
        self._ahead, self._to = record.last, record.to
        self._read_all = record.swept or record.keys
        self._limit = _FIRST_ROWS
        self._in_vain = 0

    @classmethod
    def begun(cls, pipeline: str, number: str, command: Command, of: Of) -> Self:
        """Return a new one, as a command requests it."""
        now_us = time.time_ns() // 1_000
        job = cls(
            LiveRecord(
                pipeline=pipeline, id=number, schema=of.schema, table=of.table,
                state="running", where=command.where, keys=command.keys is not None,
                again=command.keys or (), anew=command.anew, began_at_us=now_us, at_us=now_us,
            )
        )  # fmt: skip
        job.dirty = True
        return job

    @property
    def runnable(self) -> bool:
        """Whether its next chunk may be read now."""
        return (
            self.record.state == "running"
            and time.monotonic() >= self.not_before
            and not (self._waits_for_key or (self._read_all and not self.again and not self._rest))
        )

    @property
    def _waits_for_key(self) -> bool:
        # Where the table is emptied first, reading starts after that: it must see all that the
        # stream held by then.
        return any(
            not flight.asked.keys and (flight.chunk is None or flight.empties)
            for flight in self.flights
        )

    @property
    def over(self) -> bool:
        """Whether all rows to be read are in the log."""
        swept = (self.record.swept or self.record.keys) and not self.record.anew
        return swept and not (self.again or self._rest or self.flights)

    def next(self, configured: tuple[str, ...] | None, most_rows: int) -> Asked:
        """Return the next chunk to read: given keys, else the rows after the last chunk."""
        rows = 0 if self.record.anew else min(self._limit, most_rows)
        keys: tuple[Key, ...] = ()
        after: Key | None = None
        if self._rest:
            (keys, after), self._rest = self._rest, None
        if rows and not keys and self.again and (self._read_all or len(self.again) >= _KEYS):
            keys = tuple(list(self.again)[:_KEYS])
            for key in keys:
                del self.again[key]
        return Asked(
            relation_id=self.record.relation_id,
            key=configured,
            where=self.record.where,
            after=after if keys else self._ahead,
            to=None if keys else self._to,
            keys=keys,
            rows=_KEYS if keys else rows,
            bytes=MOST_BYTES,
        )

    def was_read(self, flight: Flight, chunk: Chunk, last: Key | None) -> None:
        """Note where the next chunk starts, and how large it may be."""
        if flight.noted or flight.void or flight.empties:
            return
        flight.noted = True
        if keys := flight.asked.keys:
            self._rest = None if chunk.ended else (keys, last)
            return
        self._ahead = last or self._ahead
        self._to = chunk.to
        self._read_all = chunk.ended
        factor = min(2.0, max(0.5, _CHUNK_SECONDS / max(chunk.seconds, 0.001)))
        self._limit = int(min(MOST_ROWS, max(_LEAST_ROWS, self._limit * factor)))

    def is_published(self, flight: Flight, rows: int, last: Key | None) -> None:
        """Note that a chunk is published with the current transaction."""
        self._in_vain = 0
        chunk = flight.chunk
        assert chunk is not None
        self.was_read(flight, chunk, last)
        record = self.record
        record = replace(record, rows=record.rows + rows, why=None, failing_since_us=None, errors=0)
        if flight.empties:
            record = replace(record, anew=False)
        elif not flight.asked.keys:
            record = replace(
                record, last=last or record.last, to=chunk.to, swept=chunk.ended or record.swept
            )
        self.change(record)

    def moved(self, old: Key | None, new: Key | None) -> bool:
        """Note that a row left a key, or took one without its TOAST; False: too many."""
        before = len(self.again)
        if old is not None:
            self.again.pop(old, None)
        if new is not None:
            self.again[new] = None
        self.dirty |= new is not None or len(self.again) != before
        return len(self.again) <= MOST_AGAIN

    def redo(self, why: str | None = None, *, from_the_start: bool = False) -> None:
        """Read again, after a delay, the chunks in flight, or everything."""
        self.drop_flights()
        record = self.record
        if from_the_start:
            record = replace(record, last=None, to=None, swept=record.keys)
        if why != record.why or from_the_start or record.failing_since_us is None:
            self.waits(why, record)
            record = self.record
        self._ahead, self._to = record.last, record.to
        self._read_all = record.swept or record.keys
        first, most = _AGAIN_SECONDS
        self.not_before = time.monotonic() + min(most, first * 2**self._in_vain)
        self._in_vain += 1

    def erred(self, what: str) -> bool:
        """Read again after a delay what an error has stopped; False after too many errors."""
        self.redo(what)
        errors = self.record.errors + 1
        self.change(replace(self.record, errors=errors))
        first, most = _ERROR_SECONDS
        self.not_before = time.monotonic() + min(most, first * 2 ** (errors - 1))
        return errors < MOST_ERRORS

    def waits(self, why: str | None, record: LiveRecord | None = None) -> None:
        """Note what it waits for, and since when nothing has been read."""
        record = record or self.record
        since = record.failing_since_us or time.time_ns() // 1_000
        self.change(replace(record, why=why, failing_since_us=since))

    def drop_flights(self) -> None:
        """Discard the chunks in flight."""
        for flight in self.flights:
            flight.void = True
        self.again |= dict.fromkeys(self._flying)
        self._rest = None
        self.flights.clear()
        self._limit = max(_LEAST_ROWS, self._limit // 2)

    def to(self, state: State, why: str | None = None) -> None:
        """Enter a state."""
        self.change(replace(self.record, state=state, why=why))

    def change(self, record: LiveRecord) -> None:
        """Set another record, to be written to the log."""
        self.record = replace(record, at_us=time.time_ns() // 1_000)
        self.dirty = True

    def take(self) -> LiveRecord:
        """Return the record to be written to the log; it is then not dirty."""
        self.dirty = False
        again = tuple(dict.fromkeys((*self.again, *self._flying)))
        return logged(replace(self.record, again=again), self.withheld)

    def withhold(self, withheld: Withheld) -> None:
        """Withhold exactly this from the log."""
        self.dirty |= logged(self.record, withheld) != logged(self.record, self.withheld)
        self.withheld = withheld

    @property
    def _flying(self) -> Iterable[Key]:
        """The keys that are being read, whether or not their rows fit in a chunk."""
        yield from (key for flight in self.flights for key in flight.asked.keys)
        yield from self._rest[0] if self._rest else ()
