"""Ranges and arrivals of the log, from brokers that have lost, hidden or deleted something."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition

from cdc.config import Config, Log, Source
from cdc.errors import GapError, PermissionDeniedError, UnavailableError
from cdc.log import absence
from cdc.log import consumer as consumer_module
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import OffsetRange, Partition

PART = ("shop.public.users", 0)
OTHER = ("shop.public.users", 1)


class Message:
    """A record; an error, or the end of a partition, if it has a code."""

    def __init__(self, partition: Partition, offset: int, code: int | None = None) -> None:
        self._partition, self._offset, self._code = partition, offset, code

    def error(self) -> KafkaError | None:
        return None if self._code is None else KafkaError(self._code)

    def topic(self) -> str:
        return self._partition[0]

    def partition(self) -> int:
        return self._partition[1]

    def offset(self) -> int | None:
        """As the client's: an error other than a partition's end has no offset."""
        return self._offset if self._code in (None, KafkaError._PARTITION_EOF) else None


class Brokers:
    """What they hold: offsets of records by partition, and where each begins and ends."""

    def __init__(self) -> None:
        self.records: dict[Partition, list[int]] = {PART: [3, 4, 6], OTHER: [0, 1]}
        # The markers of transactions are below the ends, and no records.
        self.spans = {PART: OffsetRange(3, 8), OTHER: OffsetRange(0, 3)}
        self.open: dict[Partition, int] = {}  # ends above the last stable offset
        self.unknown = 0  # how often they answer that they know no such topic
        self.refusal: int | None = None
        self.silent = False

    def span(self, partition: Partition) -> OffsetRange:
        if self.unknown or partition not in self.spans:
            self.unknown = max(0, self.unknown - 1)
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        return self.spans[partition]


class Client:
    """confluent_kafka.Consumer with these brokers."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers, self._due = brokers, list[Message]()
        self.assigned: set[Partition] = set()
        self.paused: set[Partition] = set()  # also when it is assigned again
        self.closed = False
        self.located: list[str] = []
        self.connected = 0

    def list_topics(self, topic: str, timeout: float) -> None:
        assert topic.startswith("shop.")
        assert timeout > 0
        self.connected += 1

    def get_watermark_offsets(self, part: TopicPartition, timeout: float) -> tuple[int, int]:
        assert timeout > 0
        assert self.connected == 1, "before the first look-up, and only then"
        return self._brokers.span((part.topic, part.partition))

    def offsets_for_times(self, parts: list[TopicPartition], timeout: float) -> None:
        assert timeout > 0
        assert self.connected == 1
        self.located += [part.topic for part in parts]
        if self._brokers.silent:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def assign(self, parts: list[TopicPartition]) -> None:
        self._due, self.assigned = [], set()
        self.incremental_assign(parts)

    def incremental_assign(self, parts: list[TopicPartition]) -> None:
        for part in parts:
            partition = (part.topic, part.partition)
            self.assigned.add(partition)
            if self._brokers.silent or partition in self.paused:
                continue
            if self._brokers.refusal is not None:
                self._due.append(Message(partition, -1, self._brokers.refusal))
            for offset in self._brokers.records.get(partition, []):
                if offset >= part.offset:
                    self._due.append(Message(partition, offset))
            if partition in self._brokers.spans:
                end = self._brokers.spans[partition].end
                self._due.append(Message(partition, end, KafkaError._PARTITION_EOF))

    def unassign(self) -> None:
        if self.closed:
            raise RuntimeError("Consumer closed")
        self.assign([])

    def close(self) -> None:
        self.closed = True

    def pause(self, parts: list[TopicPartition]) -> None:
        self.paused |= {(part.topic, part.partition) for part in parts}
        self._due = [
            each for each in self._due if (each.topic(), each.partition()) not in self.paused
        ]

    def resume(self, parts: list[TopicPartition]) -> None:
        self.paused -= {(part.topic, part.partition) for part in parts}

    def consume(self, most: int, timeout: float) -> list[Message]:
        assert timeout >= 0
        arrived, self._due = self._due[:most], self._due[most:]
        return arrived

    def poll(self, _timeout: float) -> None:
        """Receive nothing."""


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    """Brokers that the consumer and the proofs of absence ask."""
    brokers, seconds = Brokers(), count()

    def named(_: Config, asked: Collection[str]) -> set[str]:
        return {each for each in asked if each in {topic for topic, _ in brokers.spans}}

    def spans(
        _: Config, wanted: Iterable[Partition], isolation: object = IsolationLevel.READ_COMMITTED
    ) -> dict[Partition, OffsetRange]:
        above = brokers.open if isolation is IsolationLevel.READ_UNCOMMITTED else {}
        return {
            each: OffsetRange(brokers.spans[each].start, above.get(each, brokers.spans[each].end))
            for each in wanted
        }

    monkeypatch.setattr(absence, "named", named)
    monkeypatch.setattr(absence, "listed", lambda _: {topic for topic, _ in brokers.spans})
    monkeypatch.setattr(absence, "spans", spans)
    monkeypatch.setattr(absence, "pause", lambda _: None)
    monkeypatch.setattr(consumer_module, "Consumer", lambda _: Client(brokers))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=lambda _: None)
    monkeypatch.setattr(consumer_module, "time", clock)
    return brokers


@pytest.fixture
def consumer(brokers: Brokers) -> LogConsumer:
    config = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))
    return LogConsumer(config, skip_deleted=True)


def offsets(
    consumer: LogConsumer, ranges: dict[Partition, OffsetRange]
) -> dict[Partition, list[Any]]:
    found: dict[Partition, list[Any]] = {each: [] for each in ranges}
    for partition, messages in consumer.pieces(ranges):
        found[partition] += [message.offset() for message in messages]
    return found


def test_a_reader_that_stopped_early_may_be_closed_first(consumer: LogConsumer) -> None:
    pieces = consumer.pieces({PART: OffsetRange(3, 8)})
    next(iter(pieces))
    consumer.close()
    assert isinstance(pieces, Generator)
    pieces.close()


def test_the_leaders_of_a_topic_are_looked_up_before_it_is_first_read(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the client asks for them once a second; not where an offset was looked up."""
    client = Client(brokers)
    monkeypatch.setattr(consumer_module, "Consumer", lambda _: client)
    config = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))
    consumer, late = LogConsumer(config, skip_deleted=True), ("shop.public.late", 0)
    consumer.look_up([PART])
    for wanted in ({PART: OffsetRange(3, 8)}, {OTHER: OffsetRange(0, 3)}, {}):
        offsets(consumer, wanted)
    assert client.located == []
    brokers.spans[late], brokers.records[late] = OffsetRange(0, 1), [0]
    for _ in range(2):
        assert offsets(consumer, {PART: OffsetRange(3, 8), late: OffsetRange(0, 1)})[late] == [0]
        consumer.follow({late: 0})
    assert client.located == ["shop.public.late"]


def test_exactly_the_ranges_are_read(consumer: LogConsumer) -> None:
    """Past the last record only the end of the partition shows that a range is complete."""
    wanted = {PART: OffsetRange(4, 8), OTHER: OffsetRange(0, 1)}
    assert offsets(consumer, wanted) == {PART: [4, 6], OTHER: [0]}
    assert offsets(consumer, {PART: OffsetRange(5, 6), OTHER: OffsetRange(1, 1)}) == {
        PART: [],
        OTHER: [],
    }


def test_the_rest_of_a_skipped_range_is_not_read_until_it_is_asked_for_again(
    consumer: LogConsumer,
) -> None:
    for _ in range(2):
        found: list[tuple[Partition, int]] = []
        for partition, messages in consumer.pieces(
            {PART: OffsetRange(3, 8), OTHER: OffsetRange(0, 3)}
        ):
            found += [(partition, len(messages))]
            consumer.skip(partition)
        assert found == [(PART, 3), (OTHER, 2)]


def test_what_retention_has_deleted_is_skipped_and_reported_with_its_offsets(
    consumer: LogConsumer,
) -> None:
    assert offsets(consumer, {PART: OffsetRange(0, 5)}) == {PART: [3, 4]}
    assert consumer.remaining(PART, OffsetRange(0, 5)) == OffsetRange(3, 5)
    with pytest.raises(GapError, match="begins at offset 3: 0 to 2 are deleted"):
        consumer.expect_complete(PART, OffsetRange(0, 5))


def test_a_range_whose_end_does_not_exist_is_a_gap(consumer: LogConsumer) -> None:
    with pytest.raises(GapError, match=r"\[0\] ends at offset 8, and should reach 12"):
        offsets(consumer, {PART: OffsetRange(3, 12)})


def test_an_end_that_an_open_transaction_hides_is_no_gap(
    consumer: LogConsumer, brokers: Brokers
) -> None:
    brokers.open = {PART: 12}
    with pytest.raises(UnavailableError, match="held back below offset 12 by a transaction"):
        offsets(consumer, {PART: OffsetRange(3, 12)})


def test_a_deleted_topic_is_a_gap(consumer: LogConsumer, brokers: Brokers) -> None:
    brokers.spans.clear()
    brokers.records.clear()
    with pytest.raises(GapError, match="does not exist, and its offsets 3 to 7 are to be read"):
        offsets(consumer, {PART: OffsetRange(3, 8)})


def test_brokers_that_send_nothing_are_an_error_with_a_remedy(
    consumer: LogConsumer, brokers: Brokers
) -> None:
    brokers.silent = True
    with pytest.raises(UnavailableError, match="nothing arrived for 30 s") as caught:
        offsets(consumer, {PART: OffsetRange(3, 8)})
    assert "the leader's files are damaged" in caught.value.hint


@pytest.mark.parametrize("times", [1, 2])
def test_a_topic_that_brokers_deny_for_a_moment_exists(
    consumer: LogConsumer, brokers: Brokers, times: int
) -> None:
    brokers.unknown = times
    assert consumer.confirmed_if_exists(PART) == OffsetRange(3, 8)


def test_a_topic_is_missing_once_it_is_proven(consumer: LogConsumer, brokers: Brokers) -> None:
    assert consumer.confirmed_if_exists(("shop.public.nothing", 0)) is None
    brokers.unknown = 9
    with pytest.raises(UnavailableError, match="looking up the offsets"):
        consumer.confirmed_if_exists(PART)


def test_arrivals_advance_the_position_past_transaction_markers(consumer: LogConsumer) -> None:
    consumer.assign({PART: 4})
    assert [each.offset() for each in consumer.arrivals(1)] == [4, 6]
    assert consumer.positions == {PART: 8}
    consumer.follow({OTHER: 0})
    assert [each.offset() for each in consumer.arrivals(1, gather=True)] == [0, 1]
    assert consumer.positions == {PART: 8, OTHER: 3}


def test_a_temporary_error_of_a_partition_is_raised_only_if_strict(
    consumer: LogConsumer, brokers: Brokers
) -> None:
    brokers.refusal = KafkaError.UNKNOWN_TOPIC_OR_PART
    consumer.assign({PART: 3})
    assert [each.offset() for each in consumer.arrivals(1)] == [3, 4, 6]
    consumer.assign({PART: 3})
    with pytest.raises(UnavailableError, match="reading shop"):
        consumer.arrivals(1, strict=True)
    brokers.spans.clear()
    consumer.assign({PART: 3})
    with pytest.raises(GapError, match="can't be read from offset 3 on"):
        consumer.arrivals(1, strict=True)


@pytest.mark.parametrize("strict", [True, False])
def test_a_refusal_is_always_raised(
    consumer: LogConsumer, brokers: Brokers, *, strict: bool
) -> None:
    brokers.refusal = KafkaError.TOPIC_AUTHORIZATION_FAILED
    consumer.assign({PART: 3})
    with pytest.raises(PermissionDeniedError):
        consumer.arrivals(1, strict=strict)
