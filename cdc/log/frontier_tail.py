"""Frontier records from an offset on: as they arrive, and since when the log holds the next.

None is ever skipped silently.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import KafkaError

from cdc.errors import GapError
from cdc.log import absence, names, records
from cdc.log.client import translate
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.events import LSN

_TIMEOUT_SECONDS: Final = 10.0
_RECREATED = "the topic was created again, or cut by an unclean election"


class FrontierTail:
    """Reads on from offset `place`, for a follower that has applied everything up to `seq`."""

    def __init__(self, config: Config, place: int, seq: int) -> None:
        self._pipeline, self._seq = config.pipeline, seq
        self._topic = names.frontier_topic(config.prefix)
        self._consumer = LogConsumer(config, wait_ms=500)
        only = (self._topic, 0)
        first, end = self._consumer.confirmed([only])[only]
        if place > end:
            absence.expect_not_held(config, only, place)
            raise GapError(
                f"{self._topic} ends at offset {end}, and seq {seq} was at {place}",
                hint=_RECREATED,
            )
        self._end = end
        self._lost = f"offsets {place} to {first - 1} are deleted" if first > place else ""
        self._consumer.assign({only: max(first, place)})

    def close(self) -> None:
        self._consumer.close()

    @property
    def has_caught_up(self) -> bool:
        """Whether it has read everything that was there when it started."""
        return self._consumer.positions[self._topic, 0] >= self._end

    def arrivals(self, seconds: float) -> Iterator[tuple[records.FrontierRecord, int]]:
        """Yield the records that arrive, with offsets; wait `seconds` at most for the first."""
        # Strict: offsets that no longer exist are reported when the follower starts again.
        for message in self._consumer.arrivals(seconds, strict=True):
            record = records.decode(records.FrontierRecord, message.value() or b"", self._topic)
            if record.pipeline == self._pipeline:
                self._expect_no_loss(record)
                offset = message.offset()
                assert offset is not None
                yield record, offset

    def _expect_no_loss(self, record: records.FrontierRecord) -> None:
        lost, self._lost = self._lost, ""
        if lost:
            raise GapError(
                f"{self._topic}: {lost}, so nothing shows where seq {self._seq + 1} to"
                f" {max(record.above, self._seq + 1)} are",
                hint="the topic's retention, or somebody, has deleted them",
            )


def record_at(config: Config, offset: int) -> records.FrontierRecord | None:
    """Return the frontier record at an offset; None if retention has deleted it.

    Raises GapError if the topic ends before that offset.
    """
    topic = names.frontier_topic(config.prefix)
    with closing(LogConsumer(config)) as consumer:
        first, end = consumer.confirmed([(topic, 0)])[topic, 0]
        if offset >= end:
            absence.expect_not_held(config, (topic, 0), offset + 1)
            raise GapError(
                f"{topic} ends at offset {end}, and a frontier was at {offset}", hint=_RECREATED
            )
        if offset < first:
            return None
        for _, messages in consumer.pieces({(topic, 0): OffsetRange(offset, offset + 1)}):
            return records.decode(records.FrontierRecord, messages[0].value() or b"", topic)
    raise GapError(
        f"{topic} has no frontier at offset {offset}, where one was",
        hint="the topic was created again",
    )


def expect_frontier(
    config: Config, place: int, at: tuple[int, LSN, int], who: str, hint: str
) -> None:
    """Raise GapError if the log has another frontier than (epoch, LSN, seq) before an offset."""
    record = record_at(config, place - 1) if place else None
    if record and (record.epoch, record.lsn, record.seq) != at:
        _, lsn, seq = at
        raise GapError(
            f"{who} is at {lsn} (seq {seq}), where this log has {record.lsn} (seq {record.seq})",
            hint=hint,
        )


class Unapplied(NamedTuple):
    """When the oldest frontier was written that is not applied; None if all are applied.

    `forgotten`: the log has deleted frontiers after the place, and the events with them.
    """

    since_us: int | None = None
    forgotten: bool = False


class UnappliedReader:
    """Looks up offsets of the frontier topic, with a consumer that stays open but unassigned."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._partition = names.frontier_topic(config.prefix), 0
        self._consumer: LogConsumer | None = None

    def unapplied(self, place: int) -> Unapplied:
        """Return what is at a place, the offset after an applied frontier's record."""
        if self._consumer is None:
            self._consumer = LogConsumer(self._config)
        consumer = self._consumer
        first, end = consumer.look_up([self._partition])[self._partition]
        if place >= end:
            return Unapplied()
        consumer.assign({self._partition: max(place, first)})
        try:
            return Unapplied(self._written_us(consumer, end), place < first)
        finally:
            consumer.assign({})

    def _written_us(self, consumer: LogConsumer, end: int) -> int | None:
        """Return when the next record was written; None if the topic ends first."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            for message in consumer.arrivals(left):
                return int(message.timestamp()[1]) * 1_000
            if consumer.positions[self._partition] >= end:
                return None  # after the place there are only transaction markers
        timed_out = KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 - librdkafka spells it so
        raise translate(timed_out, f"reading {self._partition[0]}")

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
