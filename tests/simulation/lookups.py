"""The brokers' answers to lookups: a simulated consumer and the questions of `cdc.log.absence`.

Any lookup may be answered wrongly: the topic or partition is not known, the metadata or an end is
outdated, the partition is empty, or there is no answer. The next answer about the same thing is
right again: this proves whether the product asks twice where it must.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition

from cdc.log.client import translated
from cdc.log.partitions import OffsetRange

if TYPE_CHECKING:
    from tests.simulation.broker import Broker, Place, Record
    from tests.simulation.scheduler import Scheduler

_NAMED: Final = ("topic is unknown", "metadata is stale")
_SPAN: Final = (
    "topic is unknown",
    "partition is unknown",
    "end is empty",
    "end is stale",
    "lookup is not answered",
)


class Lookups:
    """The answers of one world's brokers."""

    def __init__(self, broker: Broker, scheduler: Scheduler, topics: frozenset[str]) -> None:
        self.topics = topics  # the existing topics
        self._broker = broker
        self._scheduler = scheduler
        self._lied: set[object] = set()  # what the newest answer was wrong about

    def _wrong(self, about: object, *kinds: str) -> str:
        """Return how the next answer about it is wrong; an empty text if it is right."""
        lied = about in self._lied
        self._lied.discard(about)
        if lied:
            return ""
        kind = next((each for each in kinds if self._scheduler.happens(each)), "")
        if kind:
            self._lied.add(about)
        return kind

    def named(self, _config: object, asked: Collection[str]) -> set[str]:
        return {t for t in asked if t in self.topics and not self._wrong(t, *_NAMED)}

    def listed(self, _config: object) -> set[str]:
        return {topic for topic in self.topics if not self._wrong(topic, "metadata is stale")}

    def spans(
        self,
        _config: object,
        places: Iterable[Place],
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[Place, OffsetRange]:
        with translated("looking up offsets"):
            return {place: OffsetRange(*self.span(place, isolation)) for place in places}

    def span(
        self, place: Place, isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    ) -> tuple[int, int]:
        """Return a partition's offsets as a lookup returns them. Raises what a client would."""
        kind = self._wrong(place, *_SPAN)
        if kind == "lookup is not answered":
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "simulated"))
        if kind == "topic is unknown" or place[0] not in self.topics:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, "simulated"))
        if kind == "partition is unknown":
            raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION, "simulated"))
        committed = isolation is IsolationLevel.READ_COMMITTED
        end = self._broker.stable(place) if committed else self._broker.ends.get(place, 0)
        if kind == "end is empty":
            end = 0
        elif kind == "end is stale":
            end = self._scheduler.some(end)
        return 0, end


class Consumer:
    """confluent_kafka.Consumer, read_committed, with the methods that `LogConsumer` calls."""

    def __init__(self, broker: Broker, lookups: Lookups) -> None:
        self._broker, self._lookups = broker, lookups
        self._due: list[Message] = []

    def get_watermark_offsets(self, part: TopicPartition, timeout: float) -> tuple[int, int]:
        assert timeout > 0
        return self._lookups.span((part.topic, part.partition))

    def list_topics(self, _topic: str, timeout: float) -> SimpleNamespace:
        """Return no topic: that one is denied is all that is looked for."""
        assert timeout > 0
        return SimpleNamespace(topics={})

    def assign(self, parts: list[TopicPartition]) -> None:
        self._due = []
        for part in parts:
            place = (part.topic, part.partition)
            found = [r for r in self._broker.committed.get(place, []) if r.offset >= part.offset]
            self._due += [Message(place, record) for record in found]
            self._due.append(Message(place, None, self._broker.stable(place)))

    def consume(self, most: int, timeout: float) -> list[Message]:
        assert timeout >= 0
        come, self._due = self._due[:most], self._due[most:]
        return come

    def unassign(self) -> None:
        self._due = []

    def poll(self, _timeout: float) -> None:
        """Receive nothing."""

    def close(self) -> None:
        self._due = []


class Message:
    """A record, or the end of a partition."""

    def __init__(self, place: Place, record: Record | None, end: int = 0) -> None:
        self._place, self._record, self._end = place, record, end

    def error(self) -> KafkaError | None:
        return None if self._record else KafkaError(KafkaError._PARTITION_EOF)

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._record.offset if self._record else self._end

    def key(self) -> bytes | None:
        return self._record.key if self._record else None

    def value(self) -> bytes | None:
        return self._record.value if self._record else None
