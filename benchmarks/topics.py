"""The topics that subjects fill: made, watched while they fill, and checked at the end.

Watching asks the broker for end offsets and reads no data, so it costs the measured next to
nothing. Two ends are told apart: what is written, and what a read_committed reader may see; a
drain ends with the second. Checking reads everything read_committed and counts every key.
"""

from __future__ import annotations

import re
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
    from collections.abc import Iterator

    from confluent_kafka import Message

_REQUEST_SECONDS = 30.0
_READ_SECONDS = 120.0
_BATCH = 10_000
_ID = re.compile(rb'"id":\s*(\d+)')


@dataclass(frozen=True)
class Checked:
    """What lies in a topic for a read_committed reader, each key exactly once."""

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
        """Have the broker stamp each record with its own clock as it appends it."""
        stamp = ConfigEntry(
            "message.timestamp.type",
            "LogAppendTime",
            incremental_operation=AlterConfigOpType.SET,
        )
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[stamp])
        for altered in self._admin.incremental_alter_configs([resource]).values():
            altered.result(_REQUEST_SECONDS)

    def delete_prefix(self, prefix: str) -> None:
        """Delete a subject's topics: the next is to find the disk and the page cache as it did."""
        names = self._admin.list_topics(timeout=_REQUEST_SECONDS).topics
        mine = [name for name in names if name.startswith(f"{prefix}.")]
        if mine:
            for gone in self._admin.delete_topics(mine).values():
                gone.result(_REQUEST_SECONDS)

    def partitions(self, topic: str) -> list[int]:
        described = self._admin.list_topics(topic, timeout=_REQUEST_SECONDS).topics[topic]
        return sorted(described.partitions)

    def ends(self, topic: str, partitions: list[int], *, committed: bool) -> list[int]:
        """Return the partitions' end offsets: of what is written, or of what may be read."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(topic, number): latest for number in partitions}
        answers = self._admin.list_offsets(
            asked, isolation_level=level, request_timeout=_REQUEST_SECONDS
        )
        return [answer.result(_REQUEST_SECONDS).offset for answer in answers.values()]

    def check(self, topic: str, rows: int) -> Checked:
        """Read the whole topic and require each id from 1 to `rows` exactly once."""
        seen = bytearray(rows + 1)
        events = size = 0
        first_ms, last_ms = 1 << 62, 0
        for message in self._read_committed(topic):
            events += 1
            size += len(message.value() or b"")
            stamp = message.timestamp()[1]
            first_ms, last_ms = min(first_ms, stamp), max(last_ms, stamp)
            number = row_id(message.key())
            if not 1 <= number <= rows or seen[number]:
                raise BenchmarkError(
                    f"topic {topic} holds an event of row {number} that is a repeat or not ours",
                    hint="the figure would not count: look for a replay in the subject's log",
                )
            seen[number] = 1
        if events != rows:
            raise BenchmarkError(
                f"topic {topic} holds {events:,} of {rows:,} rows",
                hint="the figure would not count: look for an error in the subject's log",
            )
        return Checked(
            events=events,
            value_bytes_mean=round(size / events, 1),
            first_append_ms=first_ms,
            last_append_ms=last_ms,
        )

    def _read_committed(self, topic: str) -> Iterator[Message]:
        numbers = self.partitions(topic)
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": "benchmarks-check",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                # The default of a second stalls a reader that is quicker than the fetches.
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


def row_id(key: str | bytes | None) -> int:
    """Return the id in a key like {"id":7}; -1 for a key of another form."""
    found = _ID.search(key if isinstance(key, bytes) else b"")
    return int(found.group(1)) if found else -1
