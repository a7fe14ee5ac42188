"""Read the log: ranges whose ends were fixed first, or what arrives from an offset on.

The only consumer of the product but the members of groups (`cdc.log.groups`). It sees committed
records only, joins no group and commits no offsets: it keeps its own position. Not for several
threads at once.

A range whose end is proven not to exist raises GapError with its offsets. What retention has
deleted from the beginning of a range may have been transaction markers only: with `skip_deleted` it
is skipped, the counts of the frontiers decide whether events are missing, and `expect_complete`
reports which offsets are. A lookup or a read that gets no answer raises UnavailableError. A batch
that was altered on the broker's disk raises UnreadableError with its partition and offset, and none
of its records is returned: librdkafka would abort the process where it decodes some of them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    Message,
    TopicPartition,
)

from cdc.errors import CDCError, GapError, UnreadableError
from cdc.log import absence
from cdc.log.client import (
    NOT_THERE,
    UNREADABLE,
    close_damaged,
    settings,
    translate,
    translated,
    watermarks,
)
from cdc.log.partitions import OffsetRange, Partition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from cdc.config import Config

# Where reading may start, in addition to an offset.
BEGINNING: Final = OFFSET_BEGINNING
END: Final = OFFSET_END

LOOKUP_SECONDS: Final = 15.0
# Reading does without the leaders after this time: the client finds them by itself by then.
_LOCATE_SECONDS: Final = 1.0
_SILENCE_SECONDS: Final = 30.0  # without a record, until a range's read is given up
# `consume` returns when it has this many records or the time is up, whichever is first.
_CHUNK: Final = 4_000
_CHUNK_SECONDS: Final = 0.01
# Of a range of some records, an answer of 1 MB (the default), and up to 64 MB that are fetched
# ahead, would be for nothing.
_LITTLE: Final = {
    "max.partition.fetch.bytes": 256 << 10,
    "queued.min.messages": 1_000,
    "queued.max.messages.kbytes": 1_024,
}
# How often a topic is looked up while the brokers alternate between knowing it and not.
_TRIES: Final = 3
_AT_END: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - librdkafka's local errors are spelled so
# Of an altered batch the client would leave out the records, and read on after it.
_STAYS: Final = {KafkaError.TOPIC_AUTHORIZATION_FAILED, *UNREADABLE}


class LogConsumer:
    """A connection to the brokers that reads; `assign`, `follow` and `pieces` choose what."""

    def __init__(
        self,
        config: Config,
        *,
        skip_deleted: bool = False,
        wait_ms: int = 20,
        wait_bytes: int = 1,
        fetches_little: bool = False,
    ) -> None:
        """Connect. A broker that has less than `wait_bytes` answers after `wait_ms`, else at once.

        Each answer costs the broker a look at every partition that is read. With `fetches_little`
        short ranges cost little, and memory holds little that is not read.
        """
        self._config = config
        # The offset after the newest record of each partition that is read, or after the
        # transaction markers at its end; before anything has arrived, where reading starts.
        self.positions: dict[Partition, int] = {}
        self._is_closed = False
        self._met_damage = False  # whether a batch could not be read, of a range or after it
        self._ends: dict[Partition, int] = {}  # of the ranges that are still read
        self._next: dict[Partition, int] = {}  # where each of them continues
        self._skipped: set[Partition] = set()
        self._is_connected = False
        self._located: set[str] = set()  # the topics whose leaders the client has looked up
        self._settings = settings(
            config,
            **{
                "group.id": f"lockstep-{config.pipeline}-reader",  # required, never joined
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest" if skip_deleted else "error",
                "fetch.wait.max.ms": wait_ms,
                "fetch.min.bytes": wait_bytes,
                "check.crcs": True,
                # The default of a second stalls a reader whose queue was full for a moment.
                "fetch.queue.backoff.ms": 5,
                **(_LITTLE if fetches_little else {}),
            },
        )
        self._client = self._new_client()

    def _new_client(self) -> Consumer:
        with translated("creating a consumer"):
            return Consumer(self._settings)

    def close(self) -> None:
        self._is_closed = True
        self._end_client()

    def _end_client(self) -> None:
        if self._met_damage:
            close_damaged(self._client)
        else:
            self._client.close()

    def _replace_client(self) -> None:
        """Continue with another client after a damaged batch."""
        self._end_client()
        self._client, self._met_damage = self._new_client(), False
        self._is_connected = False
        self._located.clear()

    # --- where partitions begin and end ---

    def look_up(self, partitions: Iterable[Partition]) -> dict[Partition, OffsetRange]:
        """Return the offsets that each partition holds, by one answer; it may be outdated."""
        found = {}
        for topic, number in partitions:
            with translated(f"looking up the offsets of {topic} [{number}]", self._client):
                self._connect(topic, LOOKUP_SECONDS)
                found[topic, number] = OffsetRange(
                    *watermarks(self._client, TopicPartition(topic, number), LOOKUP_SECONDS)
                )
            self._located.add(topic)
        return found

    def _connect(self, topic: str, seconds: float) -> None:
        """Wait until a broker has answered, about a topic that is needed.

        A look-up that begins before is repeated by librdkafka after pauses of 0.1, 0.2, 0.4 s.
        """
        if not self._is_connected:
            self._client.list_topics(topic, timeout=seconds)
            self._is_connected = True

    def confirmed(self, partitions: Iterable[Partition]) -> dict[Partition, OffsetRange]:
        """Return the offsets that each partition holds, by the answers to two clients."""
        return absence.confirmed(self._config, self.look_up(partitions))

    def confirmed_if_exists(self, partition: Partition) -> OffsetRange | None:
        """Return the offsets that the partition holds; None if its topic is proven not to exist.

        Raises UnavailableError if the brokers alternate between knowing the topic and not.
        """
        for left in reversed(range(_TRIES)):
            try:
                return self.confirmed([partition])[partition]
            except CDCError as error:
                if not absence.means_unknown(error):
                    raise
                if absence.absent(self._config, [partition[0]]):
                    return None
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def remaining(self, partition: Partition, wanted: OffsetRange) -> OffsetRange:
        """Return what retention has left of a range; raise GapError if its end does not exist."""
        topic, number = partition
        try:
            low, high = self.look_up([partition])[partition]
        except CDCError as error:
            if absence.means_unknown(error) and absence.absent(self._config, [topic]):
                raise GapError(
                    f"{topic} [{number}] does not exist, and its offsets {wanted.start} to"
                    f" {wanted.end - 1} are to be read",
                    hint="the topic was deleted",
                ) from error
            raise
        if high < wanted.end or low > wanted.start:
            low, high = absence.confirmed(self._config, {partition: OffsetRange(low, high)})[
                partition
            ]
        if high < wanted.end:
            absence.expect_not_held(self._config, partition, wanted.end)
            raise GapError(
                f"{topic} [{number}] ends at offset {high}, and should reach {wanted.end}",
                hint="the topic was created again, or cut by an unclean election",
            )
        return OffsetRange(max(low, wanted.start), wanted.end)

    def expect_complete(self, partition: Partition, wanted: OffsetRange) -> None:
        """Raise GapError unless the partition still has the complete range."""
        there = self.remaining(partition, wanted)
        if there.start > wanted.start:
            raise GapError(
                f"{partition[0]} [{partition[1]}] begins at offset {there.start}: {wanted.start} to"
                f" {min(there.start, wanted.end) - 1} are deleted",
                hint="the topic's retention, or somebody, has deleted them",
            )

    # --- ranges ---

    def pieces(
        self, ranges: Mapping[Partition, OffsetRange]
    ) -> Iterator[tuple[Partition, list[Message]]]:
        """Yield the ranges' records as they arrive, each partition's in its order.

        Tombstones are among them. Reads nothing else until the ranges end or the caller stops.
        """
        left = {each: wanted.end for each, wanted in ranges.items() if wanted.end > wanted.start}
        self._ends = left
        self._next = {each: ranges[each].start for each in left}
        self.assign(self._next)
        # Of a short range no time is spent on waiting for more.
        most = min(_CHUNK, sum(end - ranges[each].start for each, end in left.items()))
        try:
            moved_at = time.monotonic()
            while left:
                messages = self._client.consume(most, timeout=_CHUNK_SECONDS)
                if messages:
                    moved_at = time.monotonic()
                elif time.monotonic() - moved_at > _SILENCE_SECONDS:
                    raise self._silent(ranges)
                yield from self._by_partition(messages, ranges).items()
        finally:
            if not self._is_closed:  # a caller that stopped early may close it first
                if self._met_damage:
                    self._replace_client()
                else:
                    if self._skipped:  # these would stay paused when they are assigned again
                        self._client.resume([TopicPartition(*each) for each in self._skipped])
                    self._client.unassign()
            self._skipped.clear()

    def oldest_us(self, ranges: Mapping[Partition, OffsetRange]) -> int | None:
        """Return when the log took the first record of the ranges; None if there is none."""
        found = list[int]()
        for partition, messages in self.pieces(ranges):
            found.append(int(messages[0].timestamp()[1]) * 1_000)
            self.skip(partition)
        return min(found, default=None)

    def skip(self, partition: Partition) -> None:
        """Leave out the rest of a range that `pieces` reads."""
        self._ends.pop(partition, None)
        self._skipped.add(partition)
        self._client.pause([TopicPartition(*partition)])

    def _by_partition(
        self, messages: list[Message], ranges: Mapping[Partition, OffsetRange]
    ) -> dict[Partition, list[Message]]:
        """Return the records in the ranges; note which ranges are complete with them."""
        found: dict[Partition, list[Message]] = {}
        for message in messages:
            partition: Any = (message.topic(), message.partition())
            error = message.error()
            end = self._ends.get(partition)
            if error is not None and error.code() != _AT_END:
                self._met_damage |= error.code() in UNREADABLE
                # What is damaged after a range that is complete is not asked for.
                if end is not None or error.code() not in UNREADABLE:
                    self._fail(error, partition, ranges.get(partition))
                continue
            if end is None:
                continue  # after the range's end
            offset = _offset(message)
            if error is None:
                if offset < self._next[partition]:
                    continue  # the client was reset: a damaged batch after an earlier range's end
                self._next[partition] = offset + 1
                if offset < end:
                    found.setdefault(partition, []).append(message)
                offset += 1
            # At the end of a partition the message's offset is the next one. Past aborted records
            # and transaction markers only this, or the next record, shows that a range is complete.
            if offset >= end:
                del self._ends[partition]
        return found

    def _silent(self, ranges: Mapping[Partition, OffsetRange]) -> CDCError:
        """Return the error that nothing arrives, or raise the gap that is its cause."""
        for partition in self._ends:
            self.remaining(partition, ranges[partition])
        topic, number = next(iter(self._ends))
        return UnreadableError(
            f"reading {topic} [{number}]: nothing arrived for {_SILENCE_SECONDS:.0f} s, although"
            " its leader answers",
            hint="see that the brokers run; if it stays so, the leader's files are damaged",
        )

    # --- what arrives ---

    def assign(self, starts: Mapping[Partition, int]) -> None:
        """Read these partitions, each from an offset on, and no others."""
        self.positions = {each: max(0, start) for each, start in starts.items()}
        self._locate(starts)
        with translated(f"assigning {self._topic}"):
            self._client.assign([TopicPartition(*each, start) for each, start in starts.items()])

    def follow(self, starts: Mapping[Partition, int]) -> None:
        """Read these partitions too."""
        self.positions |= {each: max(0, start) for each, start in starts.items()}
        self._locate(starts)
        with translated(f"assigning {self._topic}"):
            self._client.incremental_assign(
                [TopicPartition(*each, start) for each, start in starts.items()]
            )

    def _locate(self, partitions: Iterable[Partition]) -> None:
        """Look up the leaders of topics that were not read before, all by one request.

        Of a topic that is assigned without this, librdkafka asks for the leaders within a second,
        by a timer. What fails here is reported where the topic is read.
        """
        new = dict(each for each in partitions if each[0] not in self._located)
        if new:
            asked = [TopicPartition(*each, OFFSET_END) for each in new.items()]
            with suppress(CDCError), translated(f"looking up {self._topic}"):
                self._connect(next(iter(new)), _LOCATE_SECONDS)
                self._client.offsets_for_times(asked, timeout=_LOCATE_SECONDS)
            self._located |= new.keys()

    def arrivals(
        self, seconds: float, *, gather: bool = False, strict: bool = False
    ) -> list[Message]:
        """Return the records that have arrived; wait up to `seconds` for the first.

        With `gather` collects them for `seconds`. Unless `strict`, only an error that does not go
        away by itself is raised: a broker that is down comes back.
        """
        with translated(f"reading {self._topic}"):
            if gather:
                messages = self._client.consume(_CHUNK, timeout=seconds)
            else:
                messages = self._client.consume(1, timeout=seconds)
                if messages:
                    messages += self._client.consume(_CHUNK, timeout=0)
        found = []
        for message in messages:
            partition: Any = (message.topic(), message.partition())
            error = message.error()
            if error is None:
                self.positions[partition] = _offset(message) + 1
                found.append(message)
            elif error.code() == _AT_END:
                self.positions[partition] = _offset(message)
            elif strict or error.fatal() or error.code() in _STAYS:
                self._met_damage |= error.code() in UNREADABLE
                self._fail(error, partition)
        return found

    @property
    def _topic(self) -> str:
        """The topic that errors name."""
        return next(iter(self.positions), ("nothing", 0))[0]

    def _fail(
        self, error: KafkaError, partition: Partition, wanted: OffsetRange | None = None
    ) -> None:
        """Raise an error of a partition: the gap, if it is proven; else it may be temporary."""
        code = error.code()
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return  # the group's coordinator is looked up anyway, although no consumer joins it
        topic, number = partition
        if wanted is not None and code in NOT_THERE:
            self.remaining(partition, wanted)
        elif code in absence.UNKNOWN and absence.absent(self._config, [topic]):
            raise GapError(
                f"{topic} [{number}] can't be read from offset {self.positions.get(partition)} on:"
                f" {error.str()}",
                hint="the topic was deleted",
            )
        at = f" [{number}] from offset {self.positions.get(partition)} on"
        raise translate(error, f"reading {topic}{at if code in UNREADABLE else ''}")


def _offset(message: Message) -> int:
    """Return the offset of a record, or of a partition's end: other errors have none."""
    offset = message.offset()
    assert offset is not None
    return offset
