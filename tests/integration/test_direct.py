"""Transactions written directly to real brokers: what readers see of them, and fencing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
    ScramMechanism,
)

from cdc.config import Config
from cdc.config.model import Log, Source
from cdc.errors import CDCError, FencedError, OutcomeUnknownError, PermissionDeniedError
from cdc.log import resume
from cdc.log.batch import Batch
from cdc.log.client import watermarks
from cdc.log.direct import requests
from cdc.log.direct.publisher import DirectPublisher
from cdc.log.direct.requests import INIT_PRODUCER_ID
from cdc.log.publisher import DIRECT, Publisher
from tests.fixtures.cluster import KafkaCluster
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.guarded import LOGIN_SECONDS, PASSWORD, USER, GuardedBroker
from tests.fixtures.load import TABLES, Load
from tests.fixtures.servers import KafkaServer, fresh_topic_prefix
from tests.fixtures.tiers import need_program
from tests.fixtures.topic_settings import set_limit
from tests.fixtures.witness import Witness

Settings = dict[str, str | int | float | bool]

NAME = DIRECT[0]
_PARTITIONS = 4
_READ_SECONDS = 60.0
# Less than a writer waits for an answer.
_PATIENCE_SECONDS = 45.0


class Ground:
    """Topics of one test, writers for them, and what a reader of the log sees."""

    def __init__(self, bootstrap: str, prefix: str, admin: Any, copies: int = 1) -> None:  # noqa: ANN401 - untyped
        self.bootstrap = bootstrap
        self.prefix = prefix
        self.topic, self.other = f"{prefix}.data", f"{prefix}.other"
        wanted = [NewTopic(self.topic, _PARTITIONS, copies), NewTopic(self.other, 1, copies)]
        for done in admin.create_topics(wanted).values():
            done.result(60)
        self._made: list[DirectPublisher] = []

    def config(self, bootstrap: str | None = None, kafka: Settings | None = None) -> Config:
        return Config(
            pipeline=self.prefix,
            source=Source(dsn="postgresql://nowhere"),
            log=Log(bootstrap_servers=bootstrap or self.bootstrap, kafka=kafka or {}),
        )

    def writer(
        self,
        bootstrap: str | None = None,
        kafka: Settings | None = None,
        *,
        seconds: int = 60,
        name: str = NAME,
    ) -> DirectPublisher:
        """Return a writer that is not open."""
        made = DirectPublisher(self.config(bootstrap, kafka), name, seconds)
        self._made.append(made)
        return made

    def open(self, bootstrap: str | None = None, kafka: Settings | None = None) -> DirectPublisher:
        made = self.writer(bootstrap, kafka)
        made.open()
        return made

    def hand_over(self, writer: DirectPublisher | Publisher, text: str) -> None:
        """Pass the writer a row for each partition of one topic, and one for the other topic."""
        batch = Batch()
        for partition in batch.topic(self.topic, _PARTITIONS):
            partition.append({"key": b"k", "value": f"{text} {partition.number}".encode()})
        writer.produce(batch)
        writer.add(self.other, b"k", text.encode())

    def write(self, writer: DirectPublisher | Publisher, text: str) -> None:
        self.hand_over(writer, text)
        writer.flush()
        writer.commit()

    def values(self, topic: str, partition: int) -> list[bytes]:
        """Return what a reader sees of a partition, in order, once no transaction is open."""
        reader = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "nobody",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            at = TopicPartition(topic, partition, 0)
            _, end = watermarks(reader, at, 30)
            reader.assign([at])
            found: list[bytes] = []
            deadline = time.monotonic() + _READ_SECONDS
            while time.monotonic() < deadline:
                message = reader.poll(1.0)
                if message is None:
                    continue
                if not message.error():
                    value = message.value()
                    assert value is not None
                    found.append(value)
                elif reader.position([at])[0].offset >= end:
                    return found
        finally:
            reader.close()
        pytest.fail("a transaction stays open")

    def seen(self) -> list[str]:
        """Return the texts of the transactions that readers see, each of which must be complete."""
        texts = [value.decode() for value in self.values(self.other, 0)]
        for number in range(_PARTITIONS):
            rows = [value.decode() for value in self.values(self.topic, number)]
            assert rows == [f"{text} {number}" for text in texts]
        return texts

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def ground(kafka_server: KafkaServer, topic_prefix: str) -> Iterator[Ground]:
    bootstrap = kafka_server.bootstrap
    made = Ground(bootstrap, topic_prefix, AdminClient({"bootstrap.servers": bootstrap}))
    yield made
    made.close()


@pytest.fixture
def guarded(guarded_broker: GuardedBroker) -> Iterator[Ground]:
    with fresh_topic_prefix(guarded_broker.plain) as prefix:
        made = Ground(guarded_broker.plain, prefix, guarded_broker.admin())
        yield made
        made.close()


# --- transactions ---


def test_readers_see_each_transaction_complete_and_in_order_and_its_ends_are_known(
    ground: Ground,
) -> None:
    writer = ground.open()
    for number in range(50):
        ground.hand_over(writer, f"text {number}")
        writer.flush()
        # Each transaction adds a marker to every partition.
        ends = writer.take_ends()
        assert ends == dict.fromkeys(
            [(ground.other, 0), *((ground.topic, n) for n in range(_PARTITIONS))], 2 * number + 1
        )
        writer.commit()
        assert not writer.started
    assert ground.seen() == [f"text {number}" for number in range(50)]


def test_writers_in_turn_find_their_markers_written_or_wait(ground: Ground) -> None:
    """A writer that is used twice in a row meets its own last transaction's markers."""
    writers = [ground.writer(name=name) for name in DIRECT]
    for writer in writers:
        writer.open()
    for number in range(100):
        ground.write(writers[number % 4], f"in turn {number}")
        ground.write(writers[0], f"alone {number}")
    assert ground.seen() == [f"{how} {n}" for n in range(100) for how in ("in turn", "alone")]


def test_an_aborted_transaction_is_never_seen(ground: Ground) -> None:
    writer = ground.open()
    ground.write(writer, "first")
    ground.hand_over(writer, "aborted")
    writer.flush()
    writer.abort()
    other = ground.open()
    ground.write(other, "second")
    assert ground.seen() == ["first", "second"]


def test_more_than_a_topic_takes_at_once_goes_in_several_batches(ground: Ground) -> None:
    writer = ground.open()
    texts = [f"{number:04}".encode() * 100 for number in range(6_000)]
    for _ in range(2):
        for text in texts:
            writer.add(ground.other, b"key", text)
        writer.flush()
        writer.commit()
    assert ground.values(ground.other, 0) == texts * 2


def test_what_its_topic_takes_singly_goes_singly(ground: Ground) -> None:
    """The limit is above a row's size and below a small batch's."""
    set_limit(ground.bootstrap, ground.other, 3_000)
    writer = ground.open()
    texts = [f"{number:04}".encode() * 500 for number in range(10)]
    for _ in range(2):
        for text in texts:
            writer.add(ground.other, b"key", text)
        writer.flush()
        writer.commit()
    assert ground.values(ground.other, 0) == texts * 2


def test_a_record_that_its_topic_does_not_take_is_named_as_that(ground: Ground) -> None:
    writer = ground.open()
    writer.add(ground.other, b"key", random.Random(1).randbytes(2 << 20))
    with pytest.raises(CDCError, match="MSG_SIZE_TOO_LARGE"):
        writer.flush()
    writer.abort()
    ground.write(ground.open(), "next")
    assert ground.seen() == ["next"]


@pytest.mark.long("as many transactions as there are epochs")
@pytest.mark.slow
def test_epochs_run_out_and_another_producer_id_follows(ground: Ground) -> None:
    """Epochs have 15 bits: at 25 transactions a second a writer uses them up in 20 minutes."""
    writer = ground.open()
    first = writer.producer
    # As `open`, which also asks for the broker's features.
    body = requests.init_producer_id(writer.transactional_id, writer.transaction_ms)
    while writer.producer.epoch < 32_700:
        found = writer.ask_coordinator(INIT_PRODUCER_ID, body)
        assert isinstance(found, requests.Producer)
        writer.producer = found
        assert found.id == first.id
    epochs = []
    for number in range(100):
        ground.write(writer, f"text {number}")
        epochs.append(writer.producer.epoch)
    assert writer.producer.id != first.id
    assert max(epochs) > 32_700
    assert min(epochs) < 40
    assert ground.seen() == [f"text {number}" for number in range(100)]


# --- fences ---


@pytest.mark.parametrize("moment", ["handed over", "flushed"])
def test_librdkafka_fences_a_direct_writer(moment: str, ground: Ground) -> None:
    zombie = ground.open()
    ground.write(zombie, "first")
    ground.hand_over(zombie, "the zombie's")
    if moment == "flushed":
        zombie.flush()
    Publisher(ground.config(), NAME).open()
    with pytest.raises(FencedError):
        zombie.commit() if moment == "flushed" else zombie.flush()
    zombie.abort()
    ground.write(ground.open(), "second")
    assert ground.seen() == ["first", "second"]


@pytest.mark.parametrize("moment", ["handed over", "flushed"])
def test_a_direct_writer_fences_librdkafka(moment: str, ground: Ground) -> None:
    zombie = Publisher(ground.config(), NAME)
    zombie.open()
    ground.write(zombie, "first")
    ground.hand_over(zombie, "the zombie's")
    if moment == "flushed":
        zombie.flush()
    heir = ground.open()
    with pytest.raises((FencedError, OutcomeUnknownError)):
        zombie.commit()  # which flushes first if needed
    ground.write(heir, "second")
    assert ground.seen() == ["first", "second"]


@pytest.mark.parametrize("moment", ["handed over", "flushed"])
def test_a_direct_writer_fences_another(moment: str, ground: Ground) -> None:
    zombie = ground.open()
    ground.hand_over(zombie, "the zombie's")
    if moment == "flushed":
        zombie.flush()
    heir = ground.open()
    ground.write(heir, "the heir's")
    with pytest.raises(FencedError):
        zombie.commit() if moment == "flushed" else zombie.flush()
    # Nor does the zombie's abort end the heir's transaction.
    ground.hand_over(heir, "the heir's next")
    heir.flush()
    zombie.abort()
    heir.commit()
    assert ground.seen() == ["the heir's", "the heir's next"]


def test_what_the_broker_timed_out_is_not_committed(guarded: Ground) -> None:
    guarded.write(guarded.open(), "first")
    writer = guarded.writer(seconds=1)
    writer.open()
    guarded.hand_over(writer, "too late")
    with pytest.raises((FencedError, OutcomeUnknownError)):  # noqa: PT012 - flushing may be too late
        writer.flush()
        # Readers wait for open transactions: they see the topic's end once this one is aborted.
        assert guarded.seen() == ["first"]
        writer.commit()
    guarded.write(guarded.open(), "second")
    assert guarded.seen() == ["first", "second"]


# --- connections ---


def test_a_lost_answer_to_a_write_or_a_commit_changes_nothing(
    guarded: Ground, guarded_broker: GuardedBroker
) -> None:
    """The broker has executed the request, and the connection ends before the response."""
    proxy = guarded_broker.proxy
    writer = guarded.open(guarded_broker.proxied)
    guarded.write(writer, "before")

    def lose(_: bytes) -> bytes:
        proxy.answer = None
        lost.append(True)
        return b""

    lost: list[bool] = []
    for number in range(10):
        guarded.hand_over(writer, f"write {number}")
        proxy.answer = lose
        writer.flush()
        # The broker appended it once, which the offsets that it returned show too.
        assert set(writer.take_ends().values()) <= {4 * number + 3, -1}
        writer.commit()
        guarded.hand_over(writer, f"commit {number}")
        writer.flush()
        proxy.answer = lose
        writer.commit()
    assert len(lost) == 20
    expected = [f"{what} {n}" for n in range(10) for what in ("write", "commit")]
    assert guarded.seen() == ["before", *expected]


def test_connections_cut_at_any_moment_lose_nothing_and_double_nothing(
    guarded: Ground, guarded_broker: GuardedBroker
) -> None:
    proxy, done = guarded_broker.proxy, threading.Event()
    writer = guarded.open(guarded_broker.proxied)

    def cut() -> None:
        chance = random.Random(7)
        while not done.wait(chance.uniform(0.005, 0.1)):
            proxy.cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        for number in range(100):
            guarded.write(writer, f"text {number}")
    finally:
        done.set()
        cutter.join()
    assert guarded.seen() == [f"text {number}" for number in range(100)]


def test_an_abandoned_writer_waits_for_no_answer(
    guarded: Ground, guarded_broker: GuardedBroker
) -> None:
    writer = guarded.open(guarded_broker.proxied)
    guarded.write(writer, "before")
    guarded.hand_over(writer, "after")
    guarded_broker.proxy.freeze()
    began = time.monotonic()
    threading.Timer(0.3, writer.abandon).start()
    with pytest.raises(OutcomeUnknownError):
        writer.flush()
    writer.abort()
    assert time.monotonic() - began < _PATIENCE_SECONDS, "it waited as one that is not abandoned"


# --- logins ---


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("protocol", ["sasl_plaintext", "sasl_ssl"])
def test_logins_and_certificates_are_librdkafkas(
    mechanism: str, protocol: str, guarded: Ground, guarded_broker: GuardedBroker
) -> None:
    if protocol == "sasl_ssl":
        need_program("openssl")
    guarded_broker.allow(guarded.prefix, "WRITE", "DESCRIBE")
    guarded_broker.allow(guarded.prefix, "WRITE", "DESCRIBE", what="TRANSACTIONAL_ID")
    if mechanism != "PLAIN":
        guarded_broker.know(getattr(ScramMechanism, mechanism.replace("-", "_")))
    sealed = protocol == "sasl_ssl"
    listener = guarded_broker.sealed if sealed else guarded_broker.locked
    settings: Settings = {
        "security.protocol": protocol,
        "sasl.mechanism": mechanism,
        "sasl.username": USER,
        "sasl.password": PASSWORD,
    }
    if sealed:
        settings["ssl.ca.location"] = str(guarded_broker.authority)
    writer = _opened(lambda: guarded.open(listener, settings))
    guarded.write(writer, "let in")
    settings["sasl.password"] = "wrong"
    with pytest.raises(PermissionDeniedError):
        guarded.open(listener, settings)
    assert guarded.seen() == ["let in"]


def _opened(opening: Callable[[], DirectPublisher]) -> DirectPublisher:
    """Return the opened writer once the brokers have applied the rights and the password."""
    made: list[DirectPublisher] = []

    def let_in() -> bool:
        try:
            made.append(opening())
        except PermissionDeniedError:
            return False
        return True

    wait_until(let_in, "never let in")
    return made[0]


def test_a_login_is_renewed_before_the_broker_ends_it(
    guarded: Ground, guarded_broker: GuardedBroker
) -> None:
    guarded_broker.allow(guarded.prefix, "WRITE", "DESCRIBE")
    guarded_broker.allow(guarded.prefix, "WRITE", "DESCRIBE", what="TRANSACTIONAL_ID")
    settings: Settings = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
    }
    guarded_broker.know(ScramMechanism.SCRAM_SHA_512)
    writer = _opened(lambda: guarded.open(guarded_broker.locked, settings))
    guarded.write(writer, "text")
    made, written = next(iter(writer.brokers.connections.values())), ["text"]
    wrote_at = time.monotonic()

    def renewed() -> bool:
        nonlocal made, wrote_at
        # Write often: this broker soon expires the id of an idle producer.
        guarded.write(writer, "text")
        written.append("text")
        paused_seconds, wrote_at = time.monotonic() - wrote_at, time.monotonic()
        if writer.brokers.lost_at and paused_seconds > LOGIN_SECONDS / 5:
            # The machine has stopped this test for so long that the broker had to be first.
            writer.brokers.lost_at.clear()
            made = next(iter(writer.brokers.connections.values()))
        return made not in writer.brokers.connections.values()

    wait_until(renewed, "a login lasts for ever", 10 * LOGIN_SECONDS, pause=0.2)
    assert not writer.brokers.lost_at, "the broker was first"
    assert guarded.seen() == written


def test_an_untrusted_certificate_is_refused(
    guarded: Ground, guarded_broker: GuardedBroker
) -> None:
    need_program("openssl")
    with pytest.raises(CDCError, match="CERTIFICATE_VERIFY_FAILED"):
        guarded.open(
            guarded_broker.sealed,
            {
                "security.protocol": "sasl_ssl",
                "sasl.mechanism": "PLAIN",
                "sasl.username": USER,
                "sasl.password": PASSWORD,
            },
        )


# --- brokers that fail ---

_WAYS: dict[str, Callable[[KafkaCluster, int], None]] = {
    "killed": lambda cluster, node: cluster.kill(node),
    "stopped": lambda cluster, node: cluster.stop(node),
    "frozen": lambda cluster, node: cluster.freeze(node),
}


@pytest.mark.slow
@pytest.mark.long(
    "the other ways, and the other broker", sample=["killed-leader", "frozen-coordinator"]
)
@pytest.mark.parametrize("who", ["leader", "coordinator"])
@pytest.mark.parametrize("way", _WAYS)
def test_another_broker_takes_over_in_the_middle_of_a_transaction(
    who: str, way: str, kafka_cluster: KafkaCluster
) -> None:
    cluster = kafka_cluster
    with fresh_topic_prefix(cluster.bootstrap) as prefix:
        ground = Ground(cluster.bootstrap, prefix, cluster.admin(), copies=3)
        cluster.wait_in_sync(prefix)
        writer = ground.open(kafka={"socket.timeout.ms": 3_000})
        ground.write(writer, "before")
        ground.hand_over(writer, "flushed")
        writer.flush()
        node = cluster.coordinator() if who == "coordinator" else cluster.leader(ground.topic, 2)
        _WAYS[way](cluster, node)
        writer.commit()
        ground.write(writer, "after")
        cluster.repair()
        ground.write(writer, "repaired")
        assert ground.seen() == ["before", "flushed", "after", "repaired"]
        ground.close()


# --- the daemon ---


@pytest.mark.long("the other settings", sample=["log0-True"])
@pytest.mark.parametrize(
    ("log", "directly"),
    [
        ({"direct": "on"}, True),
        ({"direct": "off"}, False),
        # Has no effect here, but is an option of librdkafka's own.
        ({"direct": "on", "kafka": {"broker.address.family": "v4"}}, False),
    ],
)
def test_the_daemon_writes_small_batches_directly_where_it_may(
    log: dict[str, object],
    directly: bool,  # noqa: FBT001 - what a case expects
    pipeline: NewPipeline,
) -> None:
    line = pipeline(*TABLES, batch={"max_events": 50_000}, log=log)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=9) as load:
        wait_until(lambda: load.commits > 60, "no load")
        if directly:
            written = "lockstep_direct_transactions_total"
            wait_until(lambda: daemon.metric(written) > 10, "nothing is written directly")
    assert bool(daemon.metric("lockstep_direct_transactions_total")) is directly
    assert ("all batches are left to librdkafka" in daemon.log) is (
        log["direct"] == "on" and not directly
    )
    # A large batch is not written directly; small ones may follow it at once.
    rows = "INSERT INTO users SELECT n, 1, repeat('x', 500) FROM generate_series({}, {}) n"
    line.database.execute(
        *(rows.format(m * 10**6, m * 10**6 + m % 2 * 2_000) for m in (1, 2, 3, 4))
    )
    witness.check()
    assert daemon.term() == 0


def test_the_daemon_writes_wide_batches_directly_even_with_one_copy(pipeline: NewPipeline) -> None:
    """A batch with little for each of many partitions: one request instead of one for each."""
    tables = [f"wide_{number}" for number in range(40)]
    line = pipeline(*(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)" for table in tables))
    daemon = line.start().wait_ready()
    rows = "INSERT INTO {} SELECT n, repeat('x', 100) FROM generate_series(1, 20) n"
    touched = "; ".join(rows.format(table) for table in tables)
    line.database.execute(f"DO $$ BEGIN {touched}; END $$")
    written = "lockstep_direct_transactions_total"
    wait_until(lambda: daemon.metric(written) >= 1, "nothing is written directly")
    line.database.execute(f"DELETE FROM {tables[0]} WHERE id < 5")
    converge(line.config)
    assert daemon.term() == 0


def test_a_command_that_writes_the_resume_record_fences_direct_writers(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(*TABLES)
    config, read = line.config, line.resume()
    zombies = [DirectPublisher(config, name, 60) for name in DIRECT]
    for zombie in zombies:
        zombie.open()
        zombie.add(*resume.record(config, msgspec.structs.replace(read[1], seq=10**9)))
        zombie.flush()
    resume.write_fenced(config, *read, read=read)
    for zombie in zombies:
        with pytest.raises(FencedError):
            zombie.commit()
        zombie.close()
    assert line.resume() == read
