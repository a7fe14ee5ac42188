"""What one Kafka transaction will hold: messages by partition, counted.

Filled a row at a time by the sequencer, emptied into the producer a chunk at a time. Its cost
depends on the partitions that a batch touches, not on all that were ever written: a partition
registers itself with its first message, and the row path appends through a list's own method from
then on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from cdc.log.digests import ChunkHash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# confluent-kafka's form for `produce_batch`: {"key": bytes | None, "value": bytes | None}.
Message = dict[str, Any]
# By partition, what appends a message to it. Looked up for each message, never kept.
Appends: TypeAlias = "list[Callable[[Message], None]]"
# A batch that is not due yet is handed to the producer when this much is waiting for each partition
# that it touched. Each hand-over of a partition costs a call, a request and a report, whatever its
# size: with thousands of partitions these cost more than the rows.
PARTITION_BYTES: Final = 64 << 10


class BatchContents(NamedTuple):
    """What one Kafka transaction holds, for the metrics."""

    events: int
    bytes: int
    frontier_lsn: int | None
    dead_letters: int = 0
    partitions: int = 0  # that got records of events
    direct: bool = False  # whether our own client wrote it


class PartitionQueue:
    """The messages waiting for one partition, and the events in this batch that went there."""

    __slots__ = ("_batch", "appends", "events", "hash", "messages", "number", "others", "topic")

    def __init__(self, batch: Batch, topic: str, number: int, appends: Appends) -> None:
        """`appends` are the topic's: at `number` this partition keeps what appends to it."""
        self._batch = batch
        self.topic = topic
        self.number = number
        self.messages: list[Message] = []
        self.appends = appends
        self.appends.append(self.append)
        self.others = 0  # among `messages`, those that are no events: tombstones, parts of letters
        self.events = 0  # taken from here since the batch began
        self.hash: ChunkHash | None = None  # of all that was taken since, where digests are kept

    def append(self, message: Message) -> None:
        """Add a message.

        The row path looks up `appends[number]` for each message instead: that is this method only
        for the first of those that wait.
        """
        messages = self.messages
        if not messages:
            self._batch.register(self)
            self.appends[self.number] = messages.append
        messages.append(message)

    def take(self) -> list[Message]:
        """Return the waiting messages and count them; the caller hands them over at once."""
        taken, self.messages = self.messages, []
        self.appends[self.number] = self.append
        self.events += len(taken) - self.others
        self.others = 0
        self._batch.taken(self)
        if self.hash is not None:
            self.hash.add(taken)
        return taken


class Batch:
    """Every partition the pipeline writes, and the size of what was added to it."""

    def __init__(self, *, digests: bool = False) -> None:
        """With `digests` it keeps a digest of the records of each partition."""
        self._digests = digests
        self._topics: dict[str, list[PartitionQueue]] = {}
        self._appends: dict[str, Appends] = {}
        # Ordered sets: the partitions that hold messages, and those that any were taken from.
        self._waiting: dict[PartitionQueue, None] = {}
        self._moved: dict[PartitionQueue, None] = {}
        self.bytes = 0  # of values added since the batch began
        self._handed_over_bytes = 0  # of these
        # Dead letters that are not sent yet, in their order. They are sent piece by piece: a letter
        # may be many times as long as the producer's queue.
        self.letters: deque[tuple[PartitionQueue, Sequence[tuple[bytes, bytes]]]] = deque()
        # In a chunk of the stream of up to this many bytes no row is too large for its topic.
        self.plain_bytes = 1 << 62

    def topic(self, topic: str, partitions: int) -> list[PartitionQueue]:
        """Return the topic's partitions by number, made on first use."""
        known, appends = self._topics.setdefault(topic, []), self._appends.setdefault(topic, [])
        known.extend(PartitionQueue(self, topic, n, appends) for n in range(len(known), partitions))
        return known

    def waiting(self) -> list[PartitionQueue]:
        """Return the partitions that hold messages not yet taken."""
        return list(self._waiting)

    def register(self, partition: PartitionQueue) -> None:
        """Note that a partition holds messages."""
        self._waiting[partition] = None

    def taken(self, partition: PartitionQueue) -> None:
        """Note that a partition's messages were taken."""
        self._waiting.pop(partition, None)
        self._move(partition)

    def _move(self, partition: PartitionQueue) -> None:
        self._moved[partition] = None
        if self._digests and partition.hash is None:
            partition.hash = ChunkHash()

    @property
    def worth_sending(self) -> bool:
        """Whether enough waits for each partition to hand it over before the batch is due."""
        least = PARTITION_BYTES * max(1, len(self._waiting))
        return self.bytes - self._handed_over_bytes >= least

    @property
    def thin(self) -> bool:
        """Whether it has so few bytes for each partition that the partitions cost more."""
        return self.bytes < PARTITION_BYTES * max(len(self._waiting), len(self._moved))

    def handed_over(self) -> None:
        """Note that all that waited was taken."""
        self._handed_over_bytes = self.bytes

    def send_letters(self) -> Iterator[tuple[PartitionQueue, bytes, bytes]]:
        """Yield each record of the waiting dead letters, created on request, and forget it."""
        while self.letters:
            partition, letter = self.letters[0]
            self._move(partition)
            for key, value in letter:
                if partition.hash is not None:
                    partition.hash.add_columns((key,), (value,))
                yield partition, key, value
            self.letters.popleft()

    def digests(self) -> dict[tuple[str, int], bytes]:
        """Return the digest of each partition's records in this batch, before it is closed."""
        return {
            (partition.topic, partition.number): partition.hash.digest()
            for partition in self._moved
            if partition.hash is not None
        }

    def close(self) -> dict[tuple[str, int], int]:
        """Return the number of events by partition that got any, and start the next batch."""
        assert not self._waiting, "a batch closes after its last message was taken"
        assert not self.letters, "a batch closes after its last dead letter was sent"
        counts = {}
        for partition in self._moved:
            counts[partition.topic, partition.number] = partition.events
            partition.events = 0
            partition.hash = None
        self._moved.clear()
        self.bytes = self._handed_over_bytes = 0
        return counts
