"""Ask the brokers for the state of topics and partitions: without waiting, and many at once.

A question is sent to every broker concerned, and its answer is read when it is complete: the loop
that asks never waits for a broker. What a broker did not answer is left out, never guessed; only a
topic that the brokers report as unknown counts as missing.

Its requests are sent one after another. Two at once, in librdkafka 2.16, sometimes crashed in
ListOffsets while it looked up the leaders of many partitions: 2 of 14 starts with 1,500 topics, and
none of 14 since.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cdc.log.partitions import Partition
    from cdc.log.topics import Admin

# A broker that is down must not keep a question open for long: the next one may be answered.
_TIMEOUT_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.01
# What is asked for each field of a span, in their order.
_SPAN: Final = (
    (OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED),  # type: ignore[no-untyped-call]
    (OffsetSpec.latest(), IsolationLevel.READ_COMMITTED),  # type: ignore[no-untyped-call]
    (OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED),  # type: ignore[no-untyped-call]
)


class OffsetSpan(NamedTuple):
    """One partition's offsets: its records start at `first` and end before `end`.

    `stable` is the last stable offset, where a read_committed reader stops: the first record of the
    oldest open transaction, or `end` if there is none.
    """

    first: int
    stable: int
    end: int


class Observed(NamedTuple):
    """What the brokers showed. Each topic is in `topics`, `missing` or `unanswered`."""

    topics: dict[str, tuple[str, int]]  # id and partition count
    missing: frozenset[str]
    unanswered: frozenset[str]
    spans: dict[Partition, OffsetSpan]


class OffsetsQuestion:
    """One question about some topics, in flight."""

    def __init__(self, admin: Admin, topics: dict[str, int]) -> None:
        """Ask about topics (name → partition count); `admin` must outlive the question."""
        self._admin = admin
        self._parts = [
            TopicPartition(topic, n) for topic, count in topics.items() for n in range(count)
        ]
        self._described = admin.describe_topics(
            TopicCollection(list(topics)), request_timeout=_TIMEOUT_SECONDS
        )
        self._offsets: list[dict[TopicPartition, Future[object]]] = []

    @property
    def answered(self) -> bool:
        """Whether every broker has answered or timed out; sends the next request, if any."""
        newest = self._offsets[-1] if self._offsets else self._described
        if not all(future.done() for future in newest.values()):
            return False
        if len(self._offsets) == len(_SPAN) or all(each.exception() for each in newest.values()):
            return True
        which, isolation = _SPAN[len(self._offsets)]
        asked = self._admin.list_offsets(
            dict.fromkeys(self._parts, which),
            isolation_level=isolation,
            request_timeout=_TIMEOUT_SECONDS,
        )
        self._offsets.append(asked)
        return False

    def answer(self) -> Observed:
        """Return the brokers' answer; blocks until it is complete."""
        while not self.answered:
            time.sleep(_POLL_SECONDS)
        topics: dict[str, tuple[str, int]] = {}
        missing: set[str] = set()
        for name, future in self._described.items():
            failure = future.exception()
            if failure is None:
                found = future.result()
                topics[name] = (str(found.topic_id), len(found.partitions))
            elif (
                isinstance(failure, KafkaException)
                and failure.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
            ):
                missing.add(name)
        unanswered = self._described.keys() - topics.keys() - missing
        return Observed(topics, frozenset(missing), frozenset(unanswered), self._spans())

    def _spans(self) -> dict[Partition, OffsetSpan]:
        answers: dict[Partition, list[int]] = {}
        for asked in self._offsets:
            for part, future in asked.items():
                if (offset := _offset(future)) is not None:
                    answers.setdefault((str(part.topic), part.partition), []).append(offset)
        return {each: OffsetSpan(*its) for each, its in answers.items() if len(its) == len(_SPAN)}


def _offset(future: Future[object]) -> int | None:
    if future.exception() is not None:
        return None
    offset = getattr(future.result(), "offset", -1)
    return int(offset) if offset >= 0 else None
