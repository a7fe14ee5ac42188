"""Frontier records as they arrive, from an offset on; none is ever skipped silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, TopicPartition

from cdc.errors import GapError, UnavailableError
from cdc.log import absence, names, records
from cdc.log.client import translate, translated, watermarks
from cdc.log.reader import consumer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Consumer

    from cdc.config import Config

_MANY: Final = 2_000
_LOOK_SECONDS: Final = 15.0


class FrontierTail:
    """Reads on from offset `place`, for a follower that has applied everything up to `seq`."""

    def __init__(self, config: Config, place: int, seq: int) -> None:
        self._config, self._pipeline, self._seq = config, config.pipeline, seq
        self._topic = names.frontier_topic(config.prefix)
        # A broker that has nothing answers after this time; else it answers at once.
        self._client = consumer(config, **{"fetch.wait.max.ms": 500})
        low, high = _span(config, self._client, self._topic)
        if place > high:
            absence.expect_not_held(config, (self._topic, 0), place)
            raise GapError(
                f"{self._topic} ends at offset {high}, and seq {seq} was at {place}",
                hint="the topic was created again, or cut by an unclean election",
            )
        self._lost = f"offsets {place} to {low - 1} are gone" if low > place else ""
        with translated(f"assigning {self._topic}"):
            self._client.assign([TopicPartition(self._topic, 0, max(low, place))])

    def close(self) -> None:
        self._client.close()

    def come(self, seconds: float) -> Iterator[tuple[records.FrontierRecord, int]]:
        """Yield the records that arrive, with offsets; wait `seconds` at most for the first."""
        with translated(f"reading {self._topic}"):
            first = self._client.consume(1, timeout=seconds)
            messages = first + self._client.consume(_MANY, timeout=0) if first else []
        for message in messages:
            error = message.error()
            if error is not None:
                self._fail(error)
                continue
            record = records.decode(records.FrontierRecord, message.value() or b"", self._topic)
            offset: Any = message.offset()
            if record.pipeline != self._pipeline:
                continue
            self._expect_no_loss(record)
            yield record, offset

    def _expect_no_loss(self, record: records.FrontierRecord) -> None:
        lost, self._lost = self._lost, ""
        counted = sum(events for *_, events in record.partitions)
        if lost:
            first = record.seq - record.holes - counted
            raise GapError(
                f"{self._topic}: {lost}, so nothing tells where seq {self._seq + 1} to"
                f" {max(first, self._seq + 1)} stand",
                hint="the topic's retention has taken them",
            )

    def _fail(self, error: KafkaError) -> None:
        if error.code() in (KafkaError._PARTITION_EOF, KafkaError.GROUP_AUTHORIZATION_FAILED):  # noqa: SLF001
            return
        if error.code() in absence.UNKNOWN and absence.absent(self._config, [self._topic]):
            raise GapError(
                f"{self._topic} can't be read behind seq {self._seq}: {error.str()}",
                hint="the topic was deleted",
            )
        # Offsets that no longer exist are reported when the follower starts again.
        raise translate(error, f"reading {self._topic}")


def _span(config: Config, client: Consumer, topic: str) -> tuple[int, int]:
    """Return the topic's first offset and its end."""
    with translated(f"looking up the offsets of {topic}", client):
        told = watermarks(client, TopicPartition(topic, 0), timeout=_LOOK_SECONDS)
    return absence.confirmed(config, {(topic, 0): told})[topic, 0]


def record_at(config: Config, offset: int) -> records.FrontierRecord | None:
    """Return the frontier record at an offset; None if retention has deleted it.

    Raises GapError if the topic ends before that offset.
    """
    topic = names.frontier_topic(config.prefix)
    client = consumer(config)
    try:
        low, high = _span(config, client, topic)
        if offset >= high:
            absence.expect_not_held(config, (topic, 0), offset + 1)
            raise GapError(
                f"{topic} ends at offset {high}, and a frontier was at {offset}",
                hint="the topic was created again, or cut by an unclean election",
            )
        if offset < low:
            return None
        with translated(f"assigning {topic}"):
            client.assign([TopicPartition(topic, 0, offset)])
        with translated(f"reading {topic}"):
            found = client.poll(_LOOK_SECONDS)
        if found is None:
            raise UnavailableError(
                f"reading {topic}: nothing came for {_LOOK_SECONDS:.0f} s",
                hint="see that its brokers are up",
            )
        error = found.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
            raise translate(error, f"reading {topic}")
        if error is not None or found.offset() != offset:
            raise GapError(
                f"{topic} has no frontier at offset {offset}, where one was",
                hint="the topic was created again",
            )
        return records.decode(records.FrontierRecord, found.value() or b"", topic)
    finally:
        client.close()
