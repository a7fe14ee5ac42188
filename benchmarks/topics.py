"""The topics that subjects fill: created, watched while they fill, and checked at the end.

Watching polls the broker for end offsets and reads no data, so it costs the subject almost nothing.
There are two ends: the high watermark, and the last stable offset, up to which a read_committed
reader can see; a drain ends with the second. Checking reads everything read_committed and compares
it with the expected contents.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its exports are not marked
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
)

from benchmarks.failure import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from confluent_kafka import Message

    from benchmarks.contents import Content

_REQUEST_SECONDS = 30.0
_READ_SECONDS = 300.0
_BATCH = 10_000


@dataclass(frozen=True)
class Checked:
    """What a read_committed reader finds in the topics, each event exactly once."""

    events: int
    value_bytes_mean: float
    first_append_ms: int
    last_append_ms: int


class Topics:
    """One broker's topics."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    def create(self, topic: str, partitions: int) -> None:
        for made in self._admin.create_topics([NewTopic(topic, partitions, 1)]).values():
            made.result(_REQUEST_SECONDS)

    def stamp_appends(self, topic: str) -> None:
        """Let the broker stamp each record with its own clock when it appends it."""
        stamp = ConfigEntry(
            "message.timestamp.type",
            "LogAppendTime",
            incremental_operation=AlterConfigOpType.SET,
        )
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[stamp])
        for altered in self._admin.incremental_alter_configs([resource]).values():
            altered.result(_REQUEST_SECONDS)

    def delete_prefix(self, prefix: str) -> None:
        """Delete a subject's topics, so that the next starts with the same disk and page cache."""
        names = self._admin.list_topics(timeout=_REQUEST_SECONDS).topics
        mine = [name for name in names if name.startswith(f"{prefix}.")]
        if mine:
            for request in self._admin.delete_topics(mine).values():
                request.result(_REQUEST_SECONDS)

    def partitions(self, topic: str) -> list[int]:
        described = self._admin.list_topics(topic, timeout=_REQUEST_SECONDS).topics[topic]
        return sorted(described.partitions)

    def ends(self, places: list[tuple[str, int]], *, committed: bool) -> list[int]:
        """Return the partitions' last stable offsets if `committed`, else their high watermarks."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(*place): latest for place in places}
        answers = self._admin.list_offsets(
            asked, isolation_level=level, request_timeout=_REQUEST_SECONDS
        )
        return [answer.result(_REQUEST_SECONDS).offset for answer in answers.values()]

    def check(self, contents: Mapping[str, Content]) -> Checked:
        """Read all of these topics and require exactly the given content of each."""
        events = size = 0
        first_ms, last_ms = 1 << 62, 0
        for topic, content in contents.items():
            for message in self.read(topic):
                key, value = message.key(), message.value() or b""
                assert not isinstance(key, str)
                content.take(key, value)
                events += 1
                size += len(value)
                stamp = message.timestamp()[1]
                first_ms, last_ms = min(first_ms, stamp), max(last_ms, stamp)
            content.complete()
        return Checked(
            events=events,
            value_bytes_mean=round(size / events, 1),
            first_append_ms=first_ms,
            last_append_ms=last_ms,
        )

    def read(self, topic: str) -> Iterator[Message]:
        """Yield what a read_committed reader finds in the topic, up to its current end."""
        numbers = self.partitions(topic)
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": "benchmarks-check",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                # The default of a second stalls a reader that is faster than the fetches.
                "fetch.queue.backoff.ms": 5,
            }
        )
        try:
            consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
            open_partitions = set(numbers)
            deadline = time.monotonic() + _READ_SECONDS
            while open_partitions:
                if time.monotonic() > deadline:
                    raise BenchmarkError(
                        f"topic {topic} could not be read within {_READ_SECONDS:.0f} s",
                        hint="look at the broker's log in the folder that --keep leaves",
                    )
                for message in consumer.consume(_BATCH, timeout=1.0):
                    error = message.error()
                    if error is None:
                        yield message
                    elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its only name
                        open_partitions.discard(message.partition() or 0)
                    else:
                        raise KafkaException(error)
        finally:
            consumer.close()
