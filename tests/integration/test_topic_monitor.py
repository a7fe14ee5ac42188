"""Damage to the topics of a running daemon is found within seconds, and named.

Exit code 78: none of these repairs itself, and each would cost a follower events or their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    NewPartitions,
)

from cdc.log import names
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.topic_settings import set_limit, set_topic
from tests.fixtures.witness import records_of
from tests.integration.test_slot_gaps import (
    admin,
    create_topic,
    delete_topic,
    run_once,
    running,
    users_topic,
)

_TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, n int)",
    "CREATE TABLE orders (id int PRIMARY KEY, n int)",
)
_CONFIG = 78
# Two checks: one when it is due, another shortly after to confirm.
_FOUND_SECONDS = 90.0


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    """A pipeline whose daemon runs and has published a row."""
    line = pipeline(*_TABLES)
    running(line, 1)
    return line


def found(line: PipelineUnderTest, *words: str) -> None:
    line.ends(line.daemon, _CONFIG, *words, seconds=_FOUND_SECONDS)


def widen(line: PipelineUnderTest, topic: str, partitions: int) -> None:
    client = admin(line)
    client.create_partitions([NewPartitions(topic, partitions)])[topic].result(120)

    def seen() -> bool:
        return len(client.list_topics(topic, timeout=60).topics[topic].partitions) == partitions

    wait_until(seen, "the partitions are not to be seen")


def empty(line: PipelineUnderTest, topic: str, partitions: int = 3) -> None:
    """Delete every record of a topic, as too short a retention does."""
    client = admin(line)
    parts = [TopicPartition(topic, number, -1) for number in range(partitions)]
    for future in client.delete_records(parts).values():
        future.result(120)


def test_a_topic_deleted_under_a_daemon_that_rests_is_found(line: PipelineUnderTest) -> None:
    """The daemon writes nothing to it, so no producer would ever notice."""
    topic = users_topic(line)
    delete_topic(line, topic)
    found(line, f"topic {topic} was deleted", "cdc teardown --topics")


def test_a_topic_of_our_own_that_was_recreated_is_found(line: PipelineUnderTest) -> None:
    topic = names.schema_topic(line.config.prefix)
    delete_topic(line, topic)
    create_topic(line, topic, 1)
    found(line, f"topic {topic}")


def test_a_topic_recreated_under_a_daemon_is_found(line: PipelineUnderTest) -> None:
    topic = users_topic(line)
    delete_topic(line, topic)
    create_topic(line, topic, 3)
    found(line, f"topic {topic}")


def test_partitions_added_under_a_daemon_are_found(line: PipelineUnderTest) -> None:
    topic = users_topic(line)
    widen(line, topic, 5)
    found(line, f"topic {topic} has 5 partitions", "pins 3", "cdc topics acknowledge")


def test_a_topic_emptied_under_a_daemon_is_found(line: PipelineUnderTest) -> None:
    topic = users_topic(line)
    empty(line, topic)
    found(line, f"topic {topic}, partition", "log.retention_hours", "cdc topics acknowledge")


def test_a_topic_emptied_while_stopped_is_found(line: PipelineUnderTest) -> None:
    assert line.daemon.term() == 0
    topic = users_topic(line)
    empty(line, topic)
    line.refused(_CONFIG, f"topic {topic}, partition", "log.retention_hours")


def test_what_retention_may_delete_is_no_fault(pipeline: NewPipeline) -> None:
    """Only log.retention_hours is guaranteed; what is older may be deleted."""
    line = pipeline(*_TABLES, log={"retention_hours": 0.0005})
    run_once(line, 1)
    time.sleep(2)
    empty(line, users_topic(line))
    run_once(line, 2)


def test_a_frontier_topic_that_was_recreated_while_stopped_is_found(
    line: PipelineUnderTest,
) -> None:
    assert line.daemon.term() == 0
    topic = names.frontier_topic(line.config.prefix)
    delete_topic(line, topic)
    create_topic(line, topic, 1)
    line.refused(_CONFIG, f"topic {topic}", "deleted and created again")


@pytest.mark.parametrize(
    "named", [names.frontier_topic, names.schema_topic], ids=["frontier_topic", "schema_topic"]
)
def test_a_record_of_a_newer_format_is_refused(
    named: Callable[[str], str], pipeline: NewPipeline
) -> None:
    """A newer Lockstep wrote it: to continue would lose what it meant."""
    line = pipeline(*_TABLES)
    run_once(line, 1)
    topic = named(line.config.prefix)
    (*_, newest) = records_of(line, lambda name: name == topic)
    assert newest.value is not None
    known = orjson.loads(newest.value)
    newer = known["format"] + 1
    producer = Producer({"bootstrap.servers": line.bootstrap})
    producer.produce(topic, orjson.dumps(known | {"format": newer, "novelty": True}), newest.key)
    assert producer.flush(60) == 0
    line.refused(_CONFIG, f"format {newer}", topic)


def test_an_open_transaction_of_a_stranger_shows_as_held_readers(line: PipelineUnderTest) -> None:
    topic = users_topic(line)
    stranger = Producer(
        {
            "bootstrap.servers": line.bootstrap,
            "transactional.id": f"stranger-{topic}",
            "transaction.timeout.ms": 600_000,
        }
    )
    stranger.init_transactions(60)
    stranger.begin_transaction()
    stranger.produce(topic, b"{}", b"{}", 0)
    assert stranger.flush(60) == 0
    name = "lockstep_held_seconds"
    wait_until(lambda: line.daemon.metric(name) > 4, "nobody sees it")
    stranger.abort_transaction(60)
    wait_until(lambda: line.daemon.metric(name) == 0, "it is over, and still shown")
    assert line.daemon.process.poll() is None


@pytest.mark.long("the other policy", sample=["data"])
@pytest.mark.parametrize(
    ("named", "policy", "right"),
    [
        pytest.param(users_topic, "compact", "delete", id="data"),
        pytest.param(
            lambda line: names.schema_topic(line.config.prefix), "delete", "compact", id="own"
        ),
    ],
)
def test_a_topic_that_kafka_may_delete_events_of_is_no_healthy_state(
    line: PipelineUnderTest, named: Callable[[PipelineUnderTest], str], policy: str, right: str
) -> None:
    topic = named(line)
    set_topic(line.bootstrap, topic, "cleanup.policy", policy)

    def seen() -> bool:
        code, body = line.daemon.get("/healthz")
        return code == 503 and f"{policy} for {topic}" in orjson.loads(body)["sentence"]

    wait_until(seen, "nobody sees it")
    assert line.daemon.health()["wrong_policies"] == {topic: policy}
    set_topic(line.bootstrap, topic, "cleanup.policy", right)
    wait_until(lambda: line.daemon.get("/healthz")[0] == 200, "it is set back, and still shown")


# --- Lockstep's own topics ---

_MESSAGES = pytest.param(names.messages_topic, id="messages_topic")
_DEAD = pytest.param(names.dead_topic, id="dead_topic")
_FRONTIER = pytest.param(names.frontier_topic, id="frontier_topic")


def say(line: PipelineUnderTest) -> None:
    """Write a logical message and a frontier to the log."""
    seq = line.resume()[1].seq
    line.database.execute("SELECT pg_logical_emit_message(true, 'app', 'hello')")
    wait_until(lambda: line.resume()[1].seq == seq + 1, "the message does not arrive")
    wait_until(lambda: not line.resume()[1].pending, "no frontier is written")


def wrong(line: PipelineUnderTest) -> list[str]:
    """Return the doctor's errors about the log."""
    findings = examine(line.config)
    return [each.what for each in findings if each.severity is Severity.ERROR]


@pytest.mark.long(
    "the other moment for each topic",
    sample=["dead_topic-running", "messages_topic-stopped"],
)
@pytest.mark.parametrize("when", ["running", "stopped"])
@pytest.mark.parametrize("named", [_MESSAGES, _DEAD, _FRONTIER])
def test_a_topic_of_ours_that_is_deleted_and_created_again_is_found(
    named: Callable[[str], str], when: str, line: PipelineUnderTest
) -> None:
    topic = named(line.config.prefix)
    say(line)
    wait_until(lambda: topic in line.resume()[0].topic_ids, "its id is not pinned")
    if when == "stopped":
        assert line.daemon.term() == 0
    delete_topic(line, topic)
    create_topic(line, topic, 1)
    assert any(topic in each for each in wrong(line))
    if when == "stopped":
        line.refused(_CONFIG, f"topic {topic}")
    else:
        found(line, f"topic {topic}")


@pytest.mark.long(
    "the other moment for each topic", sample=["messages_topic-running", "frontier_topic-stopped"]
)
@pytest.mark.parametrize("when", ["running", "stopped"])
@pytest.mark.parametrize("named", [_MESSAGES, _FRONTIER])
def test_a_topic_of_ours_that_is_emptied_is_found(
    named: Callable[[str], str], when: str, line: PipelineUnderTest
) -> None:
    topic = named(line.config.prefix)
    say(line)
    if when == "stopped":
        assert line.daemon.term() == 0
    empty(line, topic, 1)
    assert any(topic in each for each in wrong(line))
    if when == "stopped":
        line.refused(_CONFIG, f"topic {topic}", "log.retention_hours")
    else:
        found(line, f"topic {topic}", "log.retention_hours")


@pytest.mark.long("the other moment", sample=["running"])
@pytest.mark.parametrize("when", ["running", "stopped"])
def test_an_emptied_topic_of_dead_letters_is_found(when: str, pipeline: NewPipeline) -> None:
    """Once a frontier covers a letter: without one the topic is as empty as it should be."""
    line = pipeline(
        "CREATE TABLE docs (id int PRIMARY KEY, body text)",
        log={"kafka": {"batch.size": 50_000}},
    )
    set_limit(line.bootstrap, names.data_topic(line.config.prefix, "public", "docs"), 100_000)
    line.start().wait_ready()
    line.database.execute("INSERT INTO docs VALUES (1, repeat('ab', 60000))")
    topic = names.dead_topic(line.config.prefix)
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")
    wait_until(lambda: not line.resume()[1].pending, "no frontier is written")
    if when == "stopped":
        assert line.daemon.term() == 0
    empty(line, topic, 1)
    assert any(topic in each for each in wrong(line))
    words = (f"topic {topic}", "log.retention_hours", "cdc topics acknowledge")
    if when == "stopped":
        line.refused(_CONFIG, *words)
    else:
        found(line, *words)
