"""Cuts: which offsets a follower reads next, computed from frontier records. Pure.

A cut reaches from one frontier to a later one. Frontier records are checked in order: the events
that one counts must equal the seqs since the previous one, so a missing record is detected. Limits
decide how many records make a cut: at least one, and never part of one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import GapError
from cdc.events import LSN

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.log.records import FrontierRecord
    from lockstep.sinks.contract import Applied

# The assumed bytes of an event in the log, until the follower has measured some.
EVENT_BYTES: Final = 1_000
# How many records wait at most, even if they count few events.
_MOST_WAITING: Final = 10_000


class CutPart(NamedTuple):
    """A cut's part of one partition: `events` events from offset `start` to before `end`."""

    topic: str
    partition: int
    start: int
    end: int
    events: int


class Cut(NamedTuple):
    """What lies between the frontier of seq `above` and the one in the other fields."""

    above: int
    epoch: int
    lsn: LSN
    seq: int
    committed_at_us: int
    place: int  # the frontier topic's offset after the record
    parts: tuple[CutPart, ...]

    @property
    def events(self) -> int:
        """How many events it holds, of the topics that are followed."""
        return sum(part.events for part in self.parts)


class _Waiting(NamedTuple):
    record: FrontierRecord
    offset: int
    events: int  # of the topics that are followed


@dataclass(slots=True)
class Limits:
    """How much a cut may hold, and how fast cuts may follow each other."""

    events: int
    bytes: int
    events_per_second: int | None = None
    event_bytes: float = EVENT_BYTES  # the recent average

    @property
    def most(self) -> int:
        """How many events a cut may hold."""
        return max(1, min(self.events, int(self.bytes / max(1.0, self.event_bytes))))


@dataclass(slots=True)
class Cutter:
    """Gathers frontier records after `applied`; `take` makes a cut of them.

    `follows` returns whether a topic is read. The first cut ends at seq `reached`, regardless of
    the limits: it is the interrupted one, and only at its end is the store at a frontier again. No
    cut ends above the LSN `through`.
    """

    applied: Applied
    follows: Callable[[str], bool]
    limits: Limits
    reached: int = 0
    through: LSN | None = None
    _records: deque[_Waiting] = field(default_factory=deque)
    _events: int = 0  # of these records, in the topics that are followed
    _last: tuple[int, LSN, int] = (0, LSN(0), 0)  # epoch, LSN and seq of the newest record
    _above: int = 0  # the seq after which the next cut starts
    _ends: dict[tuple[str, int], int] = field(default_factory=dict)
    _free_at: float = 0.0

    def __post_init__(self) -> None:
        self._last = (self.applied.epoch, self.applied.lsn, self.applied.seq)
        self._above = self.applied.seq
        self._ends = self.applied.end_of

    @property
    def waiting(self) -> int:
        """How many records are in no cut yet."""
        return len(self._records)

    @property
    def has_enough(self) -> bool:
        """Whether the next cut needs no more records; later ones stay in the log."""
        is_much = len(self._records) >= _MOST_WAITING or self._events > self.limits.most
        return is_much and self._last[2] >= self.reached

    def add(self, record: FrontierRecord, offset: int) -> None:
        """Add the next record; raise GapError if it does not follow the previous one."""
        epoch, lsn, seq = self._last
        counted = sum(events for *_, events in record.partitions)
        missing = record.seq - seq - record.holes - counted
        if missing or (record.epoch, record.lsn) < (epoch, lsn):
            at = f"the frontier record at offset {offset} ({record.lsn}, seq {record.seq})"
            raise GapError(
                f"{at} does not follow {lsn}, seq {seq}: it counts {counted} events instead of"
                f" {record.seq - seq - record.holes}",
                hint="frontier records between them are missing, or another log has replaced this"
                " one",
            )
        self._last = (record.epoch, record.lsn, record.seq)
        if self.through is None or record.lsn <= self.through:
            events = sum(count for topic, *_, count in record.partitions if self.follows(topic))
            self._records.append(_Waiting(record, offset, events))
            self._events += events

    def take(self, now: float) -> Cut | None:
        """Return the next cut; None while there is none, or it is not due yet."""
        if now < self._free_at or not self._records or self._last[2] < self.reached:
            return None
        taken, total = 0, 0
        newest = self._records[0].record
        for record, _, events in self._records:
            full = total + events > self.limits.most or self._above < self.reached
            if taken and full and newest.seq >= self.reached:
                break
            newest, taken, total = record, taken + 1, total + events
        if self.limits.events_per_second:
            self._free_at = now + total / self.limits.events_per_second
        return self._cut([self._records.popleft() for _ in range(taken)])

    def _cut(self, taken: list[_Waiting]) -> Cut:
        """Return the cut that these records make, and move past it."""
        counts: dict[tuple[str, int], int] = {}
        ends: dict[tuple[str, int], int] = {}
        for record, _, followed in taken:
            self._events -= followed
            for topic, number, end, events in record.partitions:
                if self.follows(topic):
                    counts[topic, number] = counts.get((topic, number), 0) + events
                    ends[topic, number] = end
        parts = tuple(
            CutPart(*place, self._ends.get(place, 0), end, counts[place])
            for place, end in sorted(ends.items())
        )
        self._ends.update(ends)
        record, offset, _ = taken[-1]
        above, self._above = self._above, record.seq
        return Cut(
            above,
            record.epoch,
            record.lsn,
            record.seq,
            record.committed_at_us,
            offset + 1,
            parts,
        )
