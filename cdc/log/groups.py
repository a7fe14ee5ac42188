"""A member of a Kafka consumer group that reads tables' topics, and acknowledges what is done.

Members share the partitions; each group sees all. What is committed is the offset before which all
is acknowledged, so after a crash or a rebalance every record that is not is received again.

An answer that a group has no offset is not believed: where a group started is a record of ours
(`cdc.log.group_records`), so a partition that should have one and has none is a gap, and so is a
topic that was deleted and created again. Not for several threads at once.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from cdc.errors import CDCError, ConfigError, GapError, UnavailableError
from cdc.events import LSN, row_key
from cdc.log import group_records, topics
from cdc.log.client import (
    NOT_THERE,
    UNREADABLE,
    close_damaged,
    settings,
    translate,
    translated,
)
from cdc.log.consumer import LogConsumer
from cdc.log.frontier_search import FrontierSearch
from cdc.log.group_compaction import GroupCompaction, GroupPlace
from cdc.log.group_records import GroupRecord, StartedTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cdc.config import Config
    from cdc.log.frontier_search import Placed
    from cdc.log.partitions import OffsetRange, Partition
    from cdc.log.records import FrontierRecord

# Where a group starts: an LSN and a time stand for the first record at or shortly before it.
Start = str | LSN | datetime
BEGINNING: Final = "beginning"
NOW: Final = "now"

_TIMEOUT_SECONDS: Final = 15.0
# A commit is refused so while members come and go, before this one's client knows of it; and one
# that is made without having joined, while there is any.
_REBALANCED: Final = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
}
_COMMIT_SECONDS: Final = 1.0
_MOST: Final = 1_000  # records of one `receive`
# How long a member may take between two calls of `receive` before others take its partitions.
_SILENCE_MS: Final = 900_000
# Clocks of a producer may have been set back in between.
_MARGIN_MS: Final = 60_000
_AT_END: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - librdkafka's local errors are spelled so
_NO_OFFSET: Final = {
    KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 - as above
    KafkaError.OFFSET_OUT_OF_RANGE,
}


class Received(NamedTuple):
    """A record of a table's topic; its value is an event (docs/EVENTS.md)."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes


class GroupProgress:
    """The offsets of one partition that were received, and which of them are acknowledged.

    Acknowledgements come in any order; `committed` never passes one that is missing.
    """

    def __init__(self, start: int, ms: int = 0) -> None:
        """`ms`: before it, in milliseconds since 1970, nothing from there on was published."""
        self._open: deque[int] = deque()
        self._acknowledged: set[int] = set()
        self._position = start
        self._published_ms: deque[int] = deque()  # of the open ones
        self._ms = ms
        self._is_at_end = False

    def receive(self, offset: int, ms: int = 0) -> None:
        """Note a record that has to be acknowledged, and when it was published."""
        self._open.append(offset)
        self._published_ms.append(ms)
        self._position, self._ms, self._is_at_end = offset + 1, ms, False

    def end(self, position: int) -> None:
        """Note that the partition has nothing else before `position`."""
        self.skip(position)
        self._is_at_end = True

    def wait(self, ms: int) -> None:
        """Note that at this time nothing else had come, if it is at the end."""
        if self._is_at_end:
            self._ms = ms

    def skip(self, position: int) -> None:
        """Note that nothing else before `position` has to be acknowledged."""
        self._position, self._is_at_end = max(self._position, position), False

    def acknowledge(self, offset: int) -> None:
        """Note that a record that was received is done; repeatable."""
        if self._open and offset >= self._open[0]:
            self._acknowledged.add(offset)
        while self._open and self._open[0] in self._acknowledged:
            self._acknowledged.discard(self._open.popleft())
            self._published_ms.popleft()

    @property
    def committed(self) -> int:
        """The offset before which all is done."""
        return self._open[0] if self._open else self._position

    @property
    def place(self) -> GroupPlace:
        """Where the group is, by what is done."""
        return GroupPlace(self.committed, self._published_ms[0] if self._open else self._ms)


class Group:
    """One member. Close it: its partitions go to the other members at once."""

    def __init__(
        self,
        config: Config,
        name: str,
        read: Sequence[str],
        start: Start = NOW,
        *,
        released: Callable[[set[Partition]], None] = lambda _: None,
    ) -> None:
        """Join the group that reads these topics; a new one starts at `start`.

        `released` is called with partitions before they go to other members: what is acknowledged
        until it returns is committed.
        """
        self._config, self.name, self._released = config, name, released
        self._error: CDCError | None = None
        self._met_damage = False  # a batch that could not be read
        self._progress: dict[Partition, GroupProgress] = {}
        self._committed: dict[Partition, int] = {}
        self._commit_at = 0.0
        self._is_paused = False
        with translated("creating a consumer"):
            self._client = _consumer(config, name)
        try:
            self._started = _begin(config, self._client, name, read, start)
            self._compaction = GroupCompaction(config, read)
            with translated(f"joining the group {group_id(config, name)}"):
                self._client.subscribe(
                    list(read),
                    on_assign=self._assigned,
                    on_revoke=self._revoked,
                    on_lost=self._lost,
                )
        except BaseException:
            self._client.close()
            raise

    @property
    def partitions(self) -> set[Partition]:
        """The partitions that this member has now."""
        return set(self._progress)

    def receive(self, seconds: float) -> list[Received]:
        """Commit once a second, then return what has arrived; wait up to `seconds` for some.

        Raises GapError if some that the group has not received are deleted, CompactedError if
        compaction has removed some, which may show after later ones came. After an error while
        it got partitions, or of a partition (UnreadableError for a batch that the broker's files
        have damaged), it raises that always: close it then, and join again.
        """
        if self._error is not None:
            raise self._error
        if time.monotonic() >= self._commit_at:
            self.commit()
            self._compaction.check_if_due(self._places())
        with translated(f"reading as a member of {group_id(self._config, self.name)}"):
            messages = self._client.consume(_MOST, timeout=seconds)
        if self._error is not None:
            raise self._error  # of partitions that it got within this call
        if not (messages or self._is_paused):
            for each in self._progress.values():
                each.wait(int(time.time() * 1_000))
        try:
            received = [self._received(each) for each in messages]
        except CDCError as error:
            # What came before it is received after joining again.
            self._error = error
            raise
        return [each for each in received if each is not None]

    def _received(self, message: Message) -> Received | None:
        """Return the change of a record; None if it has none, or the partition is another's now."""
        partition: Any = (message.topic(), message.partition())
        progress, error = self._progress.get(partition), message.error()
        offset = message.offset() or 0
        if error is not None and error.code() != _AT_END:
            self._fail(error, partition)
        elif progress is None:
            return None  # another member's by now
        elif error is not None:
            progress.end(offset)
        elif message.value() is None:
            progress.skip(offset + 1)  # a tombstone
        else:
            progress.receive(offset, message.timestamp()[1])
            return Received(partition, offset, row_key(message.key()), message.value() or b"")
        return None

    def acknowledge(self, partition: Partition, offset: int) -> None:
        """Note that a received record is done; it is committed by a later `receive`."""
        if progress := self._progress.get(partition):
            progress.acknowledge(offset)

    def pause(self, *, paused: bool) -> None:
        """Receive nothing while paused, and stay a member by calling `receive`."""
        if paused != self._is_paused:
            self._is_paused = paused
            change = self._client.pause if paused else self._client.resume
            change([TopicPartition(*each) for each in self._progress])

    def commit(self) -> None:
        """Commit what is acknowledged."""
        self._commit_at = time.monotonic() + _COMMIT_SECONDS
        moved = {
            each: progress.committed
            for each, progress in self._progress.items()
            if progress.committed != self._committed.get(each)
        }
        if moved:
            with translated(f"committing offsets of {group_id(self._config, self.name)}"):
                try:
                    _commit(self._client, self._places(moved))
                except KafkaException as error:
                    if error.args[0].code() in _REBALANCED:
                        return  # tried again by a later one; what was given away comes again
                    raise
            self._committed |= moved

    def _places(self, chosen: Iterable[Partition] | None = None) -> dict[Partition, GroupPlace]:
        """Return where the group is in the partitions that this member has."""
        return {each: self._progress[each].place for each in chosen or self._progress}

    def close(self) -> None:
        """Commit what is acknowledged, and leave."""
        if self._met_damage:
            self._give_away(self.partitions)
            self._released = _ignore  # the client calls it from another thread now
            close_damaged(self._client)
            return
        with translated(f"leaving the group {group_id(self._config, self.name)}"):
            self._client.close()

    # --- called by the client, within `receive` and `close` ---

    def _assigned(self, client: Consumer, given: list[TopicPartition]) -> None:
        try:
            with translated(f"reading the offsets of {group_id(self._config, self.name)}"):
                starts = self._starts(client, given)
            client.incremental_assign(
                [TopicPartition(*each, place.offset) for each, place in starts.items()]
            )
        except (CDCError, KafkaException) as error:
            self._error = error if isinstance(error, CDCError) else translate(error.args[0], "")
            client.incremental_assign(
                [TopicPartition(each.topic, each.partition) for each in given]
            )
            return
        self._progress |= {each: GroupProgress(*place) for each, place in starts.items()}
        self._committed |= {each: place.offset for each, place in starts.items()}
        if self._is_paused:
            client.pause([TopicPartition(*each) for each in starts])

    def _revoked(self, client: Consumer, given: list[TopicPartition]) -> None:
        self._give_away({(each.topic, each.partition) for each in given})
        client.incremental_unassign(given)

    def _give_away(self, leaving: set[Partition]) -> None:
        self._released(leaving)
        with suppress(CDCError):  # the next member receives again what is not committed
            self.commit()
        self._forget(leaving)

    def _lost(self, client: Consumer, given: list[TopicPartition]) -> None:
        leaving = {(each.topic, each.partition) for each in given}
        self._released(leaving)
        self._forget(leaving)
        client.incremental_unassign(given)

    def _forget(self, leaving: Iterable[Partition]) -> None:
        for each in leaving:
            self._progress.pop(each, None)
            self._committed.pop(each, None)

    def _starts(self, client: Consumer, given: list[TopicPartition]) -> dict[Partition, GroupPlace]:
        """Return where to read on; raise GapError if it is unknown or no longer there."""
        found = {}
        for each in client.committed(given, timeout=_TIMEOUT_SECONDS):
            partition = (each.topic, each.partition)
            offset, began = each.offset, self._started.topics[each.topic]
            if offset == OFFSET_INVALID and each.partition < len(began.offsets):
                raise GapError(
                    f"Kafka has no offset of the group {self.name} for {each.topic}"
                    f" [{each.partition}], which it has read: Kafka forgets them when a group had"
                    " no member for offsets.retention.minutes",
                    hint=_SEEK,
                )
            found[partition] = GroupPlace(max(0, offset), _ms(each.metadata))
        with closing(LogConsumer(self._config)) as consumer:
            held = consumer.confirmed(found)
        for partition, place in found.items():
            _expect_held(self.name, partition, place.offset, held[partition])
        self._compaction.got(found)
        return found

    def _fail(self, error: KafkaError, partition: Partition) -> None:
        if error.code() in NOT_THERE:
            with closing(LogConsumer(self._config)) as consumer:
                held = consumer.confirmed([partition])[partition]
            progress = self._progress.get(partition)
            if progress is not None:
                _expect_held(self.name, partition, progress.committed, held)
        doing = f"reading {partition[0]} [{partition[1]}]"
        if error.code() in _NO_OFFSET:
            # The client reads the partition no longer, and says so this once.
            raise UnavailableError(
                f"{doing}: the broker lacked the offset that the group {self.name} was at, and now"
                " says that it has it",
                hint="join the group again: it goes on at what is committed",
            )
        if error.code() in UNREADABLE:
            # What the client receives after it is not what follows: the batch is incomplete.
            self._met_damage = True
            raise translate(error, doing)
        if error.fatal() or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise translate(error, doing)


_SEEK: Final = (
    "decide where the group goes on, and what of the time in between its programs need:"
    " `cdc group seek NAME --to beginning`, or a time, or an LSN"
)


def _ignore(_: set[Partition]) -> None:
    """Do nothing with partitions that go to other members."""


def group_id(config: Config, name: str) -> str:
    """Return the group's name in Kafka."""
    return f"{config.prefix}.{name}"


def seek(config: Config, record: GroupRecord, start: Start) -> GroupRecord:
    """Let a group without members go on at another place; return its new record.

    It has the topics that the group still reads: no deleted one, and none that was taken out of a
    webhook's `tables`.
    """
    read = list(group_records.of_configured(config, record).topics)
    present = topics.describe(topics.admin(config), read)
    with closing(_consumer(config, record.group)) as client:
        return _set(config, client, record.group, sorted(present), start, {})


def remove(config: Config, name: str) -> None:
    """Remove a group from Kafka and from the log, so that nothing waits for it.

    Raises UnavailableError if it has members. Killed in between, it is removed by the next call.
    """
    client, kafka_name = topics.admin(config), group_id(config, name)
    try:
        client.delete_consumer_groups([kafka_name])[kafka_name].result(_TIMEOUT_SECONDS)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.NON_EMPTY_GROUP:
            raise UnavailableError(
                f"the group {kafka_name} has members", hint="stop them first"
            ) from error
        if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:  # Kafka may have forgotten it
            raise translate(error.args[0], f"removing the group {kafka_name}") from error
    group_records.write_all(config, [(group_records.key(config.pipeline, name), None)])


def _consumer(config: Config, name: str) -> Consumer:
    return Consumer(
        settings(
            config,
            **{
                "group.id": group_id(config, name),
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "partition.assignment.strategy": "cooperative-sticky",
                "max.poll.interval.ms": _SILENCE_MS,
            },
        )
    )


def _begin(
    config: Config, client: Consumer, name: str, read: Sequence[str], start: Start
) -> GroupRecord:
    """Return where the group began, after topics that are new to it begin at `start`."""
    record = group_records.read(config).get(name)
    known = record.topics if record else {}
    if new := [topic for topic in read if topic not in known]:
        record = _set(config, client, name, new, start, known)
    assert record is not None
    present = topics.describe(topics.admin(config), list(read))
    for topic in read:
        if topic not in present or present[topic].topic_id != record.topics[topic].id:
            raise GapError(
                f"{topic} was deleted or created again since the group {name} began to read it",
                hint=_SEEK,
            )
    return record


def _set(
    config: Config,
    client: Consumer,
    name: str,
    read: Sequence[str],
    start: Start,
    known: Mapping[str, StartedTopic],
) -> GroupRecord:
    """Commit a place for a group without members, and record it."""
    present = described(topics.admin(config), read)
    places = [(topic, number) for topic in read for number in range(present[topic].partitions)]
    now_ms = int(time.time() * 1_000)
    offsets = _offsets(config, client, places, start)
    at_ms = now_ms if start == NOW else 0
    try:
        _commit(client, {each: GroupPlace(offset, at_ms) for each, offset in offsets.items()})
    except KafkaException as error:
        if error.args[0].code() not in _REBALANCED:
            raise translate(error.args[0], f"committing offsets of {name}") from error
        raise UnavailableError(
            f"the group {group_id(config, name)} has members, so its place can't be set",
            hint="stop them first; if another one has just started, try again",
        ) from error
    began = {
        topic: StartedTopic(
            present[topic].topic_id,
            tuple(offsets[topic, number] for number in range(present[topic].partitions)),
        )
        for topic in read
    }
    record = GroupRecord(pipeline=config.pipeline, group=name, topics={**known, **began})
    group_records.write(config, record)
    return record


def _offsets(
    config: Config, client: Consumer, places: Sequence[Partition], start: Start
) -> dict[Partition, int]:
    """Return the offset of each partition at a start."""
    with closing(LogConsumer(config)) as consumer:
        held = consumer.confirmed(places)
    if start == BEGINNING:
        return {each: held[each].start for each in places}
    if start == NOW:
        return {each: held[each].end for each in places}
    at_ms = _published_ms(config, start)
    asked = [TopicPartition(*each, at_ms) for each in places]
    with translated("looking up offsets by time", client):
        answers = client.offsets_for_times(asked, timeout=_TIMEOUT_SECONDS)
    found = {(each.topic, each.partition): each.offset for each in answers}
    # Without a later record the answer is a negative number, for the end.
    return {each: at if (at := found[each]) >= 0 else held[each].end for each in places}


def _published_ms(config: Config, start: Start) -> int:
    """Return a time before which nothing at or after a start was published."""
    if isinstance(start, datetime):
        return int(start.astimezone(UTC).timestamp() * 1000)
    if not isinstance(start, LSN):
        raise ConfigError(
            f"a group can't start at {start!r}", hint="beginning, now, a time, an LSN"
        )
    placed = frontier_at(config, start, lambda record: record.lsn <= start)
    return max(0, placed.published_ms - _MARGIN_MS)


def frontier_at(config: Config, start: Start, fits: Callable[[FrontierRecord], bool]) -> Placed:
    """Return the newest frontier that fits; raise GapError if the log no longer has it."""
    with closing(FrontierSearch(config)) as search:
        placed = search.newest_that(fits)
    if placed is None:
        raise GapError(
            f"the log no longer has the frontier at or before {start}",
            hint="start at `beginning`, or read the archive: `cdc replay`",
        )
    return placed


def described(client: topics.Admin, read: Sequence[str]) -> dict[str, topics.Described]:
    """Return the topics to be read; raise ConfigError if there is no such one."""
    present = topics.describe(client, list(read))
    if missing := set(read) - present.keys():
        raise ConfigError(
            f"there is no topic {min(missing)}",
            hint="`cdc table list` lists the captured tables; `cdc setup` creates their topics",
        )
    return present


def _ms(metadata: str | None) -> int:
    """Return a place's time from what was committed with it; 0 if it has none."""
    return int(metadata) if metadata and metadata.isdecimal() else 0


def _commit(client: Consumer, places: Mapping[Partition, GroupPlace]) -> None:
    done = client.commit(
        offsets=[
            TopicPartition(*each, place.offset, metadata=str(place.ms))
            for each, place in places.items()
        ],
        asynchronous=False,
    )
    for each in done or ():
        if each.error is not None:
            raise KafkaException(each.error)


def _expect_held(name: str, partition: Partition, start: int, held: OffsetRange) -> None:
    topic, number = partition
    if held.start > start:
        raise GapError(
            f"{topic} [{number}] begins at offset {held.start}: the group {name} has not received"
            f" {start} to {held.start - 1}, which retention has deleted",
            hint=_SEEK,
        )
    if held.end < start:
        raise GapError(
            f"{topic} [{number}] ends at offset {held.end}, and the group {name} is at {start}",
            hint=f"the topic was created again, or cut by an unclean election; {_SEEK}",
        )
