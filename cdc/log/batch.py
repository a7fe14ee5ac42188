"""What one Kafka transaction will hold: messages by partition, counted.

Filled a row at a time by the sequencer, emptied into the producer a chunk at a time. The lists live
as long as the process, so that the row path appends through a bound method and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# confluent-kafka's form for `produce_batch`: {"key": bytes | None, "value": bytes | None}.
Message = dict[str, Any]


class Partition:
    """The messages waiting for one partition, and the events in this batch that went there."""

    __slots__ = ("append", "events", "messages", "moved", "number", "others", "topic")

    def __init__(self, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number
        self.messages: list[Message] = []
        self.append = self.messages.append
        self.others = 0  # among `messages`, what is no event: tombstones, parts of dead letters
        self.events = 0  # taken from here since the batch began
        self.moved = False  # whether anything was

    def take(self) -> list[Message]:
        """Return the waiting messages and count them; the caller hands them over at once."""
        taken = self.messages[:]
        self.events += len(taken) - self.others
        self.others = 0
        self.moved = True
        self.messages.clear()
        return taken


class Batch:
    """Every partition the pipeline writes, and the size of what was added to it."""

    def __init__(self) -> None:
        self._topics: dict[str, list[Partition]] = {}
        self.bytes = 0  # of values added since the batch began
        # Dead letters that are not sent yet, in their order. They go out piece by piece: a letter
        # may be many times as long as the producer's queue.
        self.letters: deque[tuple[Partition, Sequence[tuple[bytes, bytes]]]] = deque()
        # In a chunk of the stream of up to so many bytes no row is too large for its topic.
        self.plain_bytes = 1 << 62

    def topic(self, topic: str, partitions: int) -> list[Partition]:
        """Return the topic's partitions by number, made on first use."""
        known = self._topics.setdefault(topic, [])
        known.extend(Partition(topic, n) for n in range(len(known), partitions))
        return known

    def waiting(self) -> list[Partition]:
        """Return the partitions that hold messages not yet taken."""
        return [p for topic in self._topics.values() for p in topic if p.messages]

    def send_letters(self) -> Iterator[tuple[Partition, bytes, bytes]]:
        """Yield each record of the waiting dead letters, made as it is asked for, and forget it."""
        while self.letters:
            partition, letter = self.letters[0]
            partition.moved = True
            for key, value in letter:
                yield partition, key, value
            self.letters.popleft()

    def close(self) -> dict[tuple[str, int], int]:
        """Return the events of this batch by partition that moved, and begin the next batch."""
        assert not self.waiting(), "a batch closes after its last message was taken"
        assert not self.letters, "a batch closes after its last dead letter was sent"
        counts = {}
        for topic in self._topics.values():
            for partition in topic:
                if partition.moved:
                    counts[partition.topic, partition.number] = partition.events
                    partition.events, partition.moved = 0, False
        self.bytes = 0
        return counts
