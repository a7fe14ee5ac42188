"""Read exact offset ranges of the log: what lies between two frontiers.

One consumer stays open, so that a few hundred records cost milliseconds. What retention has deleted
from the beginning of a range is skipped: it may have been transaction markers only, so the counts
of the frontiers decide, and `expect` then reports what is missing. A range whose end does not exist
is a gap; if nothing arrives for a while, a broker is down.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from cdc.errors import GapError, UnavailableError
from cdc.log import absence
from cdc.log.client import GONE, translate, translated, watermarks
from cdc.log.reader import consumer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from confluent_kafka import Message

    from cdc.config import Config

Place: TypeAlias = "tuple[str, int]"  # topic, partition
# A call returns when it has this many records or the time is up, whichever is first.
_CHUNK: Final = 4_000
_CHUNK_SECONDS: Final = 0.02
_SILENCE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 15.0


class Range(NamedTuple):
    """Offsets of one partition: from `start` to before `end`."""

    start: int
    end: int


class Records(NamedTuple):
    """One partition's events in the order of the log: keys, values and bytes; no tombstones."""

    keys: list[bytes | None]
    values: list[bytes]
    size: int


class RangeReader:
    """Reads ranges, one set after another. Not for several threads at once."""

    def __init__(self, config: Config) -> None:
        more: dict[str, str | float | bool] = {
            "fetch.wait.max.ms": 10,
            "auto.offset.reset": "earliest",
        }
        self._config = config
        self._client = consumer(config, **more)

    def close(self) -> None:
        self._client.close()

    def read(
        self, ranges: Mapping[Place, Range], max_bytes: int | None = None
    ) -> dict[Place, Records] | None:
        """Return the events in the ranges; None if they are more than `max_bytes`."""
        keys: dict[Place, list[bytes | None]] = {place: [] for place in ranges}
        values: dict[Place, list[bytes]] = {place: [] for place in ranges}
        total = 0
        sizes = dict.fromkeys(ranges, 0)
        for place, messages in self.pieces(ranges):
            to_keys, to_values, size = keys[place], values[place], 0
            for message in messages:
                value = message.value()
                if value is not None:
                    to_keys.append(message.key())
                    to_values.append(value)
                    size += len(value)
            sizes[place] += size
            total += size
            if max_bytes is not None and total > max_bytes:
                return None
        return {place: Records(keys[place], values[place], sizes[place]) for place in ranges}

    def first_events(self, ranges: Mapping[Place, Range]) -> dict[Place, bytes]:
        """Return the first event of each range that has one."""
        found: dict[Place, bytes] = {}
        with self._assigned(ranges) as left:
            for place, messages in self._drain(ranges, left):
                values = (message.value() for message in messages)
                event = next((value for value in values if value is not None), None)
                if event is not None:
                    found[place] = event
                    left.pop(place, None)
                    self._client.pause([TopicPartition(*place)])
        return found

    def pieces(self, ranges: Mapping[Place, Range]) -> Iterator[tuple[Place, list[Message]]]:
        """Yield records as they arrive, each partition's in its order, tombstones too."""
        with self._assigned(ranges) as left:
            yield from self._drain(ranges, left)

    @contextmanager
    def _assigned(self, ranges: Mapping[Place, Range]) -> Iterator[dict[Place, int]]:
        """Read these ranges within the block; give the ends of those that hold anything."""
        left = {place: each.end for place, each in ranges.items() if each.end > each.start}
        with translated("assigning a cut"):
            self._client.assign([TopicPartition(*place, ranges[place].start) for place in left])
        try:
            yield left
        finally:
            self._client.unassign()

    def _drain(
        self, ranges: Mapping[Place, Range], left: dict[Place, int]
    ) -> Iterator[tuple[Place, list[Message]]]:
        """Yield records until no range is left; the caller may take ranges out of `left`."""
        heard_at = time.monotonic()
        while left:
            messages = self._client.consume(_CHUNK, timeout=_CHUNK_SECONDS)
            if messages:
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > _SILENCE_SECONDS:
                raise self._silent(ranges, left)
            found: dict[Place, list[Message]] = {}
            for message in messages:
                place: Any = (message.topic(), message.partition())
                end = left.get(place)
                if end is None:
                    self._expect_no_gap(message, place, ranges)
                    continue
                offset: Any = message.offset()
                if (error := message.error()) is None:
                    if offset < end:
                        found.setdefault(place, []).append(message)
                    offset += 1
                elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
                    self._fail(error, place, ranges)
                    continue
                # Past transaction markers only the next record, or the end, shows that it is over.
                if offset >= end:
                    del left[place]
            yield from found.items()

    def _silent(self, ranges: Mapping[Place, Range], left: Mapping[Place, int]) -> Exception:
        """Return the error that nothing arrives, or raise the gap that is its cause."""
        for place in left:
            self.left(place, ranges[place])
        return UnavailableError(
            f"reading {next(iter(left))[0]}: nothing came for {_SILENCE_SECONDS:.0f} s",
            hint="see that the brokers run and log.bootstrap_servers is right",
        )

    def _expect_no_gap(self, message: Message, place: Place, ranges: Mapping[Place, Range]) -> None:
        """Raise an error reported outside of the ranges; records that come late are not errors."""
        if (error := message.error()) is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
            self._fail(error, place, ranges)

    def _fail(self, error: KafkaError, place: Place, ranges: Mapping[Place, Range]) -> None:
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return  # the group's coordinator is looked up anyway, although no consumer joins it
        if error.code() in GONE and place in ranges:
            self.expect(place, ranges[place])  # raises if it is proven; else it may be temporary
        raise translate(error, f"reading {place[0]}")

    def expect(self, place: Place, wanted: Range) -> None:
        """Raise GapError unless the partition still has the complete range."""
        there = self.left(place, wanted)
        if there.start > wanted.start:
            raise GapError(
                f"{place[0]} [{place[1]}] begins at offset {there.start}: {wanted.start} to"
                f" {min(there.start, wanted.end) - 1} are gone",
                hint="the topic's retention has taken them",
            )

    def left(self, place: Place, wanted: Range) -> Range:
        """Return what retention has left of a range; raise GapError if its end does not exist."""
        topic, number = place
        try:
            low, high = watermarks(
                self._client, TopicPartition(topic, number), timeout=_LOOK_SECONDS
            )
        except KafkaException as error:
            if absence.says_unknown(error) and absence.absent(self._config, [topic]):
                raise GapError(
                    f"{topic} [{number}] is not there, whose offsets {wanted.start} to"
                    f" {wanted.end - 1} are to be read",
                    hint="the topic was deleted",
                ) from error
            raise translate(error.args[0], f"looking up the offsets of {topic}") from error
        if high < wanted.end or low > wanted.start:
            low, high = absence.confirmed(self._config, {place: (low, high)})[place]
        if high < wanted.end:
            absence.expect_not_held(self._config, place, wanted.end)
            raise GapError(
                f"{topic} [{number}] ends at offset {high}, and should reach {wanted.end}",
                hint="the topic was created again, or cut by an unclean election",
            )
        return Range(max(low, wanted.start), wanted.end)
