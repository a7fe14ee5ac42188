"""A reader that stays open holds what a new one reads, whatever has happened to the topics."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer

from cdc.config import Config
from cdc.errors import UnavailableError
from cdc.log import absence, names, newest_records, topics
from cdc.log.client import settings
from cdc.log.newest_records import NewestReader, NewestRecords
from tests.fixtures.daemon import wait_until
from tests.fixtures.seeds import examples, first_seed
from tests.fixtures.servers import KafkaServer, log_alone

_STEPS = examples(80)
_KEYS = 5


@pytest.fixture
def config(kafka_server: KafkaServer, topic_prefix: str, tmp_path: Path) -> Config:
    return log_alone(kafka_server, topic_prefix, tmp_path)


@pytest.fixture
def writer(config: Config) -> Iterator[Producer]:
    producer = Producer(settings(config, **{"transactional.id": config.pipeline}))
    producer.init_transactions(30)
    yield producer
    producer.flush(5)


class _Model:
    """What the topics should hold, and how to change both."""

    def __init__(self, config: Config, writer: Producer, rng: random.Random) -> None:
        self._config, self._writer, self._rng = config, writer, rng
        self._admin = topics.admin(config)
        self._wanted = {
            each.name: each
            for each in topics.internal_topics(config)
            if each.name in {names.resume_topic(config.prefix), names.schema_topic(config.prefix)}
        }
        self.holds: dict[str, dict[bytes, bytes]] = {}

    def change(self) -> None:
        topic = self._rng.choice(list(self._wanted))
        if topic not in self.holds:
            self._create(topic)
        elif self._rng.random() < 0.15:
            self._delete(topic)
        else:
            self._write(topic, aborts=self._rng.random() < 0.3)

    def _create(self, topic: str) -> None:
        topics.ensure(self._admin, self._config, [self._wanted[topic]])
        self.holds[topic] = {}
        for _ in range(self._rng.randrange(4)):  # more than it held before it was deleted, or less
            self._write(topic, aborts=False)

    def _delete(self, topic: str) -> None:
        topics.delete(self._admin, [topic])
        wait_until(lambda: not topics.describe(self._admin, [topic]), "the topic stays")
        del self.holds[topic]

    def _write(self, topic: str, *, aborts: bool) -> None:
        written: dict[bytes, bytes | None] = {}
        self._writer.begin_transaction()
        for _ in range(self._rng.randrange(1, 4)):
            key = b"key %d" % self._rng.randrange(_KEYS)
            written[key] = self._rng.choice([None, self._rng.randbytes(8)])
            self._writer.produce(topic, written[key], key)
        if aborts:
            self._writer.flush(30)
            self._writer.abort_transaction(30)
            return
        self._writer.commit_transaction(30)
        held = {**self.holds[topic], **written}
        self.holds[topic] = {key: value for key, value in held.items() if value is not None}


def _values(found: Mapping[str, NewestRecords]) -> dict[str, dict[bytes, bytes]]:
    return {topic: dict(each.values) for topic, each in found.items()}


def test_a_reader_that_stays_open_holds_what_a_new_one_reads(
    config: Config, writer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics are created, written, aborted, emptied, deleted, and created again."""
    monkeypatch.setattr("cdc.log.absence.AGAIN_SECONDS", 0.05)
    seed = first_seed()
    model = _Model(config, writer, random.Random(seed))
    with closing(NewestReader(config)) as kept:
        for step in range(_STEPS):
            model.change()
            # A commit is answered before the markers that make it visible are written.
            wait_until(
                lambda: _values(kept.read()) == model.holds,
                f"seed {seed}, step {step}: {model.holds} is not read",
            )
        with closing(NewestReader(config)) as new:
            assert _values(new.read()) == model.holds


def test_what_is_known_is_not_read_again(
    config: Config, writer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = topics.internal_topics(config)
    topics.ensure(topics.admin(config), config, ours)
    topic = names.schema_topic(config.prefix)
    read = _counted(monkeypatch)
    with closing(NewestReader(config)) as kept:
        for number in range(100):
            _commit(writer, topic, b"key %d" % number)
        wait_until(lambda: len(kept.read()[topic].values) == 100, "they are not read")
        read.clear()
        kept.read()
        assert not read
        _commit(writer, topic, b"key 0", b"another")
        wait_until(lambda: kept.read()[topic].values[b"key 0"] == b"another", "it is not read")
        assert read == [topic]


def test_of_the_frontiers_only_the_newest_are_read(
    config: Config, writer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.ensure(topics.admin(config), config, topics.internal_topics(config))
    topic = names.frontier_topic(config.prefix)
    for number in range(200):
        _commit(writer, topic, b"key", b"%d" % number)
    for _ in range(30):  # what hides the newest: markers only
        writer.begin_transaction()
        writer.produce(topic, b"aborted", b"key")
        writer.flush(30)
        writer.abort_transaction(30)
    read = _counted(monkeypatch)
    with closing(NewestReader(config)) as kept:
        wait_until(lambda: kept.read()[topic].values == {b"key": b"199"}, "it is not read")
        assert 0 < len(read) < 100


def test_what_fails_by_kept_connections_is_read_by_others(
    config: Config, writer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no broker answers those either, the next reading works."""
    topics.ensure(topics.admin(config), config, topics.internal_topics(config))
    topic = names.resume_topic(config.prefix)

    def away(*_: object) -> None:
        raise UnavailableError("no broker answers", hint="start one")

    with closing(NewestReader(config)) as kept:
        assert kept.read()[topic].values == {}
        monkeypatch.setattr(absence, "ends", away)
        _commit(writer, topic, b"key")
        wait_until(lambda: kept.read()[topic].values == {b"key": b"value"}, "it is not read")
        with monkeypatch.context() as patched:
            patched.setattr(newest_records, "reach", away)
            with pytest.raises(UnavailableError):
                kept.read()
        assert kept.read()[topic].values == {b"key": b"value"}


def _commit(writer: Producer, topic: str, key: bytes, value: bytes = b"value") -> None:
    writer.begin_transaction()
    writer.produce(topic, value, key)
    writer.commit_transaction(30)


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the topic of each record that is read is added."""
    read: list[str] = []
    add = NewestRecords.add

    def noted(known: NewestRecords, message: Message) -> None:
        read.append(str(message.topic()))
        add(known, message)

    monkeypatch.setattr(NewestRecords, "add", noted)
    return read
