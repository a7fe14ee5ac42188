"""What has arrived in the log so far: counts, rates, latencies, recoveries.

One thread feeds it with records and the time at which they were read, another shows it: `lock` is
held while it is fed, and by a reader that reads more than one value. Lateness is the time from a
change's commit until a read_committed consumer can read it, on one machine's clock. A kill has been
recovered from when a change committed after it has arrived.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import orjson

from cdc.log import records
from cdc.log.row_versions import OPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdc.events import Frontier
    from cdc.log.follower_reports import FollowerRecord
    from cdc.playground.demo.tail import Seen

# Rates and lateness cover only the last seconds.
WINDOW_SECONDS: Final = 5.0
_LAST_EVENTS: Final = 12


class _Source(msgspec.Struct, gc=False):
    schema: str
    table: str
    seq: int


class _Event(msgspec.Struct, gc=False):
    op: str
    source: _Source
    ts_us: int


_decode: Final = msgspec.json.Decoder(_Event).decode


class ShownEvent(NamedTuple):
    """One event as the view shows it; keys are shown because the demo's data is made up."""

    seq: int
    op: str
    table: str
    key: str
    late_ms: float


@dataclass
class Kill:
    """One SIGKILL: its victim, its time, and how long until later changes arrived."""

    what: str
    at: float  # seconds since the epoch
    recovered_seconds: float | None = None
    followed: bool = False  # recovered from only when all followers have applied a later change


@dataclass
class Rate:
    """Events a second over the window, summed per tenth of a second."""

    total: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float) -> None:
        self.total += 1
        tenth = int(now * 10) / 10
        if self._recent and self._recent[-1][0] == tenth:
            self._recent[-1] = (tenth, self._recent[-1][1] + 1)
        else:
            self._recent.append((tenth, 1))

    def per_second(self, now: float) -> float:
        while self._recent and self._recent[0][0] < now - WINDOW_SECONDS:
            self._recent.popleft()
        return sum(count for _, count in self._recent) / WINDOW_SECONDS


@dataclass
class TableFlow:
    ops: Counter[str] = field(default_factory=Counter)
    rate: Rate = field(default_factory=Rate)


class Flow:
    """Everything that the view shows of the log."""

    def __init__(self, frontier_topic: str, followers: Iterable[str] = ()) -> None:
        self.lock = threading.Lock()
        self.tables: dict[str, TableFlow] = {}
        self.changes = Rate()
        self.transactions = Rate()  # Kafka transactions: each leaves one frontier record
        self.frontier: Frontier | None = None
        self.last: deque[ShownEvent] = deque(maxlen=_LAST_EVENTS)
        self.kills: list[Kill] = []
        self.first_at: float | None = None
        self.followed_at: float | None = None  # when each follower had applied a change
        self.worst_late_ms = 0.0
        self._first_committed: float | None = None
        self._late: deque[tuple[float, float]] = deque()
        self._all_late: Counter[int] = Counter()
        # None for one that has not reported yet.
        self.followers: dict[str, FollowerRecord | None] = dict.fromkeys(followers)
        self._frontier_topic = frontier_topic
        self._holes = 0  # seqs of the initial snapshot without a row

    def take(self, seen: Seen, now: float) -> None:
        """Note one record that was read at `now`, in seconds since the epoch."""
        if seen.value is None:
            return
        if seen.topic == self._frontier_topic:
            record = records.decode(records.FrontierRecord, seen.value, seen.topic)
            self.frontier = record.frontier()
            self._holes += record.holes
            self.transactions.add(now)
            return
        event = _decode(seen.value)
        late_ms = max(0.0, now * 1000 - event.ts_us / 1000)
        self._show(seen, event, late_ms)
        if event.op != "r":  # an existing row is not a change
            self._count(event, now, late_ms)

    @property
    def rows_read(self) -> int:
        """How many rows of the initial snapshot are in the log."""
        return sum(table.ops["r"] for table in self.tables.values())

    def _count(self, event: _Event, now: float, late_ms: float) -> None:
        committed = event.ts_us / 1e6
        if self.first_at is None:
            self.first_at, self._first_committed = now, committed
        for kill in self.kills:
            if kill.recovered_seconds is None and not kill.followed and committed > kill.at:
                kill.recovered_seconds = now - kill.at
        self._late.append((now, late_ms))
        self._all_late[round(late_ms)] += 1
        self.worst_late_ms = max(self.worst_late_ms, late_ms)
        self.tables[event.source.table].rate.add(now)
        self.changes.add(now)

    def _show(self, seen: Seen, event: _Event, late_ms: float) -> None:
        self.tables.setdefault(event.source.table, TableFlow()).ops[event.op] += 1
        key = "" if seen.key is None else ", ".join(map(str, orjson.loads(seen.key).values()))
        op = OPS.get(event.op, event.op)
        self.last.append(ShownEvent(event.source.seq, op, event.source.table, key, late_ms))

    def note_followers(self, newest: Mapping[str, FollowerRecord], now: float) -> None:
        """Note what followers have reported by `now`."""
        self.followers.update(newest)
        each = (seen.committed_at_us / 1e6 if seen else 0.0 for seen in self.followers.values())
        applied = min(each, default=0.0)
        if self.followed_at is None and applied >= (self._first_committed or math.inf):
            self.followed_at = now
        for kill in self.kills:
            if kill.recovered_seconds is None and kill.followed and applied > kill.at:
                kill.recovered_seconds = now - kill.at

    def lag(self, follower: FollowerRecord) -> tuple[int, float]:
        """Return its lag, in events and in seconds of commits."""
        if self.frontier is None or follower.seq >= self.frontier.seq:
            return 0, 0.0
        late_us = self.frontier.committed_at_us - follower.committed_at_us
        lacks = self.frontier.seq - follower.seq - (0 if follower.seq else self._holes)
        return lacks, max(0.0, late_us / 1e6)

    def lateness_ms(self, now: float) -> tuple[float, float] | None:
        """Return median and 99th percentile of the window; None when nothing arrived."""
        while self._late and self._late[0][0] < now - WINDOW_SECONDS:
            self._late.popleft()
        if not self._late:
            return None
        ordered = sorted(late for _, late in self._late)
        return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]

    def overall_lateness_ms(self) -> tuple[int, int]:
        """Return median and 99th percentile of everything, to the millisecond."""
        total, seen, median = self._all_late.total(), 0, -1
        for late, count in sorted(self._all_late.items()):
            seen += count
            if median < 0 and seen * 2 >= total:
                median = late
            if seen * 100 >= total * 99:
                return median, late
        return 0, 0
