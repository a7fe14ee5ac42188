"""What arrives in the log, for people to look at: all of it counted, and a few events of it read.

Each frontier has how many events every partition has got since the one before, and where they end.
So the log is counted without being read, and what it costs is what is shown, whatever the rate and
the number of tables. An event is seen once a frontier has it.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import ConfigError
from cdc.log import names, records
from cdc.log.client import reach
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from cdc.log.tail import decoded

if TYPE_CHECKING:
    from collections.abc import Generator

    from confluent_kafka import Message

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.tail import Arrived

_SECONDS: Final = 0.5
# A broker that has less waits for that time.
_BYTES: Final = 256 << 10
# At most so many records for an event: its tombstone, and its transaction's marker.
_OFFSETS_PER_EVENT: Final = 3


class Arrivals(NamedTuple):
    """What has arrived in one topic."""

    events: int = 0
    published_ms: int = 0  # the newest frontier


class Sample(NamedTuple):
    """What frontiers have: all of it counted by topic, and some of it decoded."""

    topics: dict[str, Arrivals]
    arrived: list[Arrived]


def sample(config: Config, most_per_second: int) -> Generator[Sample]:
    """Count what arrives from now on, and read at most so many events of it a second.

    Each table has an equal share of them, so that a busy one does not hide the others.
    """
    reach(config)
    budget, at = float(most_per_second), time.monotonic()
    place = names.frontier_topic(config.prefix), 0
    with (
        closing(LogConsumer(config, wait_ms=int(_SECONDS * 1_000), wait_bytes=_BYTES)) as frontiers,
        closing(RangeReader(config)) as ranges,
    ):
        there = frontiers.confirmed_if_exists(place)
        if there is None:
            raise ConfigError(f"there is no topic {place[0]}", hint="`cdc setup` creates it")
        frontiers.follow({place: there.end})
        while True:
            found = _Counted(config.pipeline, place[0])
            for message in frontiers.arrivals(_SECONDS, gather=True, strict=True):
                found.add(message)
            now = time.monotonic()
            budget = min(most_per_second, budget + (now - at) * most_per_second)
            at = now
            arrived = found.newest(ranges, int(budget)) if found.topics else []
            budget -= len(arrived)
            yield Sample(found.topics, arrived)


class _Counted:
    """The events of some frontiers, by partition."""

    def __init__(self, pipeline: str, topic: str) -> None:
        self.topics: dict[str, Arrivals] = {}
        self._pipeline, self._topic = pipeline, topic
        self._low = 0  # the seq before the first of them
        self._ends: dict[Partition, int] = {}
        self._events: Counter[Partition] = Counter()

    def add(self, message: Message) -> None:
        record = records.decode(records.FrontierRecord, message.value() or b"", self._topic)
        if record.pipeline != self._pipeline:
            return
        if not self.topics:
            self._low = record.above
        for topic, number, end, events in record.partitions:
            if events:
                known = self.topics.get(topic, Arrivals())
                self.topics[topic] = Arrivals(known.events + events, message.timestamp()[1])
                self._ends[topic, number] = end
                self._events[topic, number] += events

    def newest(self, ranges: RangeReader, most: int) -> list[Arrived]:
        """Return at most so many of the events, the newest of each table, in the order of seq."""
        share = max(1, most // len(self.topics))
        chosen = set(sorted(self.topics, key=self._published, reverse=True)[:most])
        wanted = {each: self._last(each, share) for each in self._events if each[0] in chosen}
        pieces = ranges.pieces(wanted)
        events = decoded(each for _, messages in pieces for each in messages if each.value())
        taken: Counter[str] = Counter()
        found: list[Arrived] = []
        for each in reversed(events):
            if each.event["source"]["seq"] > self._low and taken[each.topic] < share:
                taken[each.topic] += 1
                found.append(each)
        return found[::-1]

    def _published(self, topic: str) -> int:
        return self.topics[topic].published_ms

    def _last(self, partition: Partition, share: int) -> OffsetRange:
        """Return where a partition has its part of the newest events of its topic."""
        events, end = self._events[partition], self._ends[partition]
        part = -(-share * events // self.topics[partition[0]].events)
        return OffsetRange(max(0, end - _OFFSETS_PER_EVENT * (min(events, part) + 1)), end)
