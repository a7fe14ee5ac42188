"""When a reader could see each commit: the latency that a consumer of the log has.

The commit time is Postgres' own, from the event; Postgres takes it just before it flushes the
commit record, so the figure includes the flush. The arrival is this process' clock when the client
returns the event, read_committed. Both are the same machine's clock. The collecting thread must do
nothing else: an event that arrives between two polls counts as late by that much, and `away_ms`
reports it.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import orjson
from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks.contents import row_id
from benchmarks.failure import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from confluent_kafka import Message

_POLL_SECONDS = 0.05
_STRAGGLER_SECONDS = 30.0
# How many more messages one poll takes: in a backlog, one call per message would cost too much CPU.
_BATCH = 1000
# Slow changes committed closer together than this count as one stretch with one cause.
_APART_US = 100_000
_COPIED = b'"op":"r"'
# Narrow around the target latencies, wide around those of the peer as installed.
_BOUNDS_MS = (*range(1, 10), *range(10, 20, 2), *range(20, 50, 5), 50, 75, 100, 250, 500, 1000)


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of the latencies in a window, in milliseconds."""

    events: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    histogram: dict[str, int]  # events by the bound in milliseconds that they are below


@dataclass(frozen=True)
class Slow:
    """A stretch of slow changes: when its first was committed, and how long it lasted."""

    at_s: float
    for_s: float
    changes: int
    max_ms: float


class Journey(NamedTuple):
    """One change from commit to arrival: microseconds since 1970."""

    seq: int
    committed_us: int
    arrived_us: int


class Arrivals:
    """A read_committed consumer of one topic that records when each event arrived."""

    def __init__(self, bootstrap: str, topic: str, partitions: list[int]) -> None:
        self._seen: set[int] = set()
        self.copied = 0  # rows of a snapshot, which are not changes
        self._committed_us = array("q")
        self._arrived_us = array("q")
        self._seqs = array("q")  # 0 for events without one
        self._away_ns = self._asked_ns = 0
        self._topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "benchmarks-arrivals",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                # The broker answers as soon as one byte can be read, and the client fetches again
                # at once. The longest wait for an empty answer does not matter: 1 to 500 ms gave
                # the same latencies.
                "fetch.min.bytes": 1,
                "fetch.wait.max.ms": 100,
                "fetch.queue.backoff.ms": 1,
            }
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for number in partitions])

    def close(self) -> None:
        self._consumer.close()

    @property
    def events(self) -> int:
        return len(self._seen)

    def collect(self, go_on: Callable[[], bool]) -> None:
        """Record arrivals while `go_on` returns true."""
        while go_on():
            if self._asked_ns:
                self._away_ns = max(self._away_ns, time.monotonic_ns() - self._asked_ns)
            first = self._consumer.poll(_POLL_SECONDS)
            messages = [first, *self._consumer.consume(_BATCH, 0)] if first else []
            self._asked_ns = time.monotonic_ns()
            arrived_us = time.time_ns() // 1000
            for message in messages:
                self._note(message, arrived_us)

    def _note(self, message: Message, arrived_us: int) -> None:
        if error := message.error():
            raise KafkaException(error)
        value = message.value()
        assert value is not None
        if _COPIED in value:
            self.copied += 1
            return
        number = row_id(message.key())
        if number in self._seen:
            raise BenchmarkError(
                f"row {number} arrived twice in topic {self._topic}",
                hint="the figure would not count: look for a replay in the subject's log",
            )
        self._seen.add(number)
        source = orjson.loads(value)["source"]
        self._committed_us.append(source["ts_us"])
        self._arrived_us.append(arrived_us)
        self._seqs.append(int(source.get("seq", 0)))

    def away_ms(self) -> float:
        """Return the longest time between two polls since the last call."""
        away_ns, self._away_ns = self._away_ns, 0
        return round(away_ns / 1e6, 1)

    def collect_all(self, rows: int) -> None:
        """Record arrivals until all rows have arrived."""
        deadline = time.monotonic() + _STRAGGLER_SECONDS
        self.collect(lambda: len(self._seen) < rows and time.monotonic() < deadline)
        if len(self._seen) < rows:
            raise BenchmarkError(
                f"{len(self._seen):,} of {rows:,} rows arrived in topic {self._topic}",
                hint="the figure would not count: look for an error in the subject's log",
            )

    def percentiles(self, from_us: int, to_us: int) -> Percentiles:
        """Return the percentiles over the rows that were committed within the window."""
        return percentiles(
            [(arrived - committed) / 1000 for committed, arrived in self._within(from_us, to_us)]
        )

    def slowest(self, from_us: int, to_us: int, over_ms: float) -> list[Slow]:
        """Return the stretches of the window in which changes took longer than `over_ms`."""
        return slowest(self._within(from_us, to_us), from_us, over_ms)

    def journeys(self, from_us: int, to_us: int) -> list[Journey]:
        """Return the changes of the window, by their seq."""
        columns = zip(self._seqs, self._committed_us, self._arrived_us, strict=True)
        found = (Journey(*each) for each in columns)
        return sorted(each for each in found if from_us <= each.committed_us < to_us)

    def _within(self, from_us: int, to_us: int) -> list[tuple[int, int]]:
        pairs = zip(self._committed_us, self._arrived_us, strict=True)
        return [pair for pair in pairs if from_us <= pair[0] < to_us]


def slowest(pairs: Iterable[tuple[int, int]], from_us: int, over_ms: float) -> list[Slow]:
    """Return the stretches in which changes took longer than `over_ms` from commit to arrival."""
    late = sorted(pair for pair in pairs if pair[1] - pair[0] > over_ms * 1000)
    stretches: list[list[tuple[int, int]]] = []
    for pair in late:
        if not stretches or pair[0] - stretches[-1][-1][0] > _APART_US:
            stretches.append([])
        stretches[-1].append(pair)
    return [
        Slow(
            at_s=round((stretch[0][0] - from_us) / 1e6, 2),
            for_s=round((stretch[-1][0] - stretch[0][0]) / 1e6, 2),
            changes=len(stretch),
            max_ms=round(max(arrived - committed for committed, arrived in stretch) / 1000, 1),
        )
        for stretch in stretches
    ]


def percentiles(latencies_ms: list[float]) -> Percentiles:
    """Return the percentiles by nearest rank: each is a latency that was measured."""
    if not latencies_ms:
        raise BenchmarkError(
            "no row was committed in the measured window", hint="give it more --seconds"
        )
    ordered = sorted(latencies_ms)

    def at(share: float) -> float:
        return round(nearest_rank(ordered, share), 2)

    return Percentiles(
        events=len(ordered),
        p50_ms=at(0.5),
        p99_ms=at(0.99),
        p999_ms=at(0.999),
        max_ms=round(ordered[-1], 2),
        histogram=_histogram(ordered),
    )


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the percentile of ascending values that is one of them; `share` is 0.99, say."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _histogram(ordered: list[float]) -> dict[str, int]:
    """Return how many are in each bucket, without the empty ones."""
    counts, below = {}, 0
    for bound in _BOUNDS_MS:
        reached = bisect_left(ordered, bound)
        if reached > below:
            counts[f"<{bound}"] = reached - below
        below = reached
    if below < len(ordered):
        counts[f">={_BOUNDS_MS[-1]}"] = len(ordered) - below
    return counts
