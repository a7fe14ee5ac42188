"""What a snapshot's task computes: its pace, how long a transaction may last, its query."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError

from cdc.config import Config, Log, Source
from cdc.config.snapshot import Snapshot
from cdc.errors import CDCError, ConfigError, UnavailableError
from cdc.events import LSN
from cdc.log import publisher
from cdc.log.batch import Batch
from cdc.log.publisher import IN_FLIGHT_BYTES, BoundedPublisher
from cdc.log.records import PinnedPublication
from cdc.snapshot.initial import rate
from cdc.snapshot.initial.rate import Pace
from cdc.snapshot.initial.records import SnapshotPlan, SnapshotTable
from cdc.snapshot.initial.task import range_query, transaction_seconds


class Clock:
    """The module `time` for code that waits: it advances only there."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(rate, "time", it)
    monkeypatch.setattr(publisher, "time", it)
    return it


def config(**snapshot: Any) -> Config:  # noqa: ANN401 - of the section
    return Config(
        pipeline="p",
        source=Source(dsn="dbname=p"),
        log=Log(bootstrap_servers="localhost:1"),
        snapshot=Snapshot(**snapshot),
    )


def planned(**changed: Any) -> SnapshotTable:  # noqa: ANN401 - a table's fields
    fields: dict[str, Any] = {
        "schema_id": 1, "partitions": 4, "relation_id": 1, "relation": 'public."T"', "filenode": 1,
        "outputs": ('pg_catalog.textin("int4out"("a"))', '"b"::pg_catalog.text'),
        "columns": ("a", "b"), "attnums": (1, 2), "pages": 100, "pages_per_range": 40,
        "rows_per_page": 291, "first_seq": 1, "rows": 10_000, "bytes": 819_200,
    }  # fmt: skip
    return SnapshotTable(**fields | changed)


def plan(*tables: SnapshotTable, tasks: int = 2) -> SnapshotPlan:
    return SnapshotPlan(
        pipeline="p", generation=1, token="t", epoch=1, database="d", snapshot="s", lsn=LSN(1),
        publication=PinnedPublication("p", 1, {}), taken_at_us=0, tasks=tasks, first_seq=1,
        next_seq=9, tables=tables,
    )  # fmt: skip


def test_the_pace_is_kept_by_all_tasks_together_and_pauses_are_not_made_up_for(
    clock: Clock,
) -> None:
    slow = Pace(Snapshot(rows_per_second=1_000, bytes_per_second=1_000_000), 2)
    for _ in range(10):
        slow.wait(100, 1_000)
    assert clock.slept == pytest.approx(2.0)  # 1,000 rows at 500 per second
    slow.wait(1, 1_000_000)
    assert clock.slept == pytest.approx(4.0)
    clock.now += 3_600
    slow.wait(1_000, 1)
    assert clock.slept == pytest.approx(5.5)
    unlimited = Pace(Snapshot(), 2)
    unlimited.wait(10**9, 10**12)
    assert clock.slept == pytest.approx(5.5)


def test_a_transaction_lasts_as_long_as_the_largest_range_may_take() -> None:
    assert transaction_seconds(config(), plan(planned())) == 300
    large = planned(pages=1 << 17, pages_per_range=1 << 13, bytes=1 << 30, rows=1 << 22)
    assert transaction_seconds(config(), plan(large)) == 512  # 64 MB at the slowest, twice
    # Without pages there is one range, as large as the relation.
    assert transaction_seconds(config(), plan(planned(pages=None, bytes=1 << 40))) == 900
    # 3,334 rows at 10 per second; a never analysed table counts as rows of 100 bytes.
    assert transaction_seconds(config(rows_per_second=20), plan(planned())) == 668
    assert transaction_seconds(config(rows_per_second=20), plan(planned(rows=0))) == 548
    with pytest.raises(ConfigError) as raised:
        transaction_seconds(config(bytes_per_second=50_000), plan(large))
    assert "snapshot.range_bytes" in raised.value.hint


def test_a_range_is_queried_by_its_pages_and_filters() -> None:
    table = planned(where="a > 1 -- not b")
    ranges = list(table.ranges(0))
    assert [each.first_page for each in ranges] == [0, 40, 80]
    assert range_query(table, ranges[2]) == (
        'COPY (SELECT pg_catalog.textin("int4out"("a")), "b"::pg_catalog.text'
        " FROM ONLY public.\"T\" WHERE ctid >= '(80,0)'::tid AND ctid < '(100,0)'::tid"
        " AND (a > 1 -- not b\n)) TO STDOUT (FORMAT binary)"
    )
    complete = planned(pages=None)
    assert " WHERE " not in range_query(complete, next(complete.ranges(0)))


class Producer:
    """librdkafka's producer, whose brokers take one batch per poll, in any order of partitions."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.queued: list[dict[str, Any]] = []
        self.most = self.size = 0
        self.takes = True
        self.error: KafkaError | None = None

    def begin_transaction(self) -> None:
        """Do nothing: there is no transaction."""

    def produce_batch(self, _topic: str, messages: list[dict[str, Any]], _partition: int) -> int:
        size = sum(len(message["value"]) for message in messages)
        self.queued.append({"size": size, "callback": messages[-1]["callback"]})
        self.size += size
        self.most = max(self.most, self.size)
        return len(messages)

    def poll(self, seconds: float) -> int:
        self.clock.now += seconds
        if seconds and self.queued and (self.takes or self.error):
            taken = self.queued.pop()
            self.size -= taken["size"]
            taken["callback"](self.error, Acknowledged())
        return 0


class Acknowledged:
    """A message that a broker has acknowledged."""

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7


def produce(publisher: BoundedPublisher, chunks: int, size: int = 1 << 20) -> None:
    batch = Batch()
    partitions = batch.topic("t", 4)
    for _ in range(chunks):
        for partition in partitions:
            partition.append({"key": b"k", "value": bytes(size)})
            batch.bytes += size
        publisher.produce(batch)
    assert batch.close() == {("t", number): chunks for number in range(4)}


@pytest.fixture
def producer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Producer:
    it = Producer(clock)
    monkeypatch.setattr("cdc.log.publisher.Producer", lambda _settings: it)
    return it


def test_the_queue_to_the_brokers_is_bounded(producer: Producer) -> None:
    publisher = BoundedPublisher(config(), "snapshot.0", transaction_seconds=300)
    produce(publisher, 40)
    assert IN_FLIGHT_BYTES <= producer.most <= IN_FLIGHT_BYTES + (4 << 20)


def test_brokers_that_are_stalled_or_refuse_are_reported(producer: Producer) -> None:
    producer.takes = False
    with pytest.raises(UnavailableError, match="has taken nothing"):
        produce(BoundedPublisher(config(), "snapshot.0", transaction_seconds=300), 40)
    producer.error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    with pytest.raises(CDCError, match="MSG_SIZE_TOO_LARGE"):
        produce(BoundedPublisher(config(), "snapshot.0", transaction_seconds=300), 40)
