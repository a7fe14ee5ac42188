"""A broker that missed acknowledged records becomes leader: the loss is reported with offsets.

The loss is real: a partition with two replicas, one of them needed; its follower is dead while the
leader alone acknowledges, then the leader dies and the follower comes back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from cdc.errors import UnavailableError
from cdc.log import names, reader
from tests.fixtures.cluster import KafkaCluster
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.servers import Database, fresh_topic_prefix

pytestmark = pytest.mark.long("three brokers, and elections among them")

_CONFIG = 78
_PARTITIONS = 2
# Two checks; before them, two of three nodes must form a quorum again on a busy machine.
_FOUND_SECONDS = 240.0
_UNSAFE = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}

Unsafe = Callable[..., PipelineUnderTest]


@pytest.fixture
def unsafe(kafka_cluster: KafkaCluster, database: Database, tmp_path: Path) -> Iterator[Unsafe]:
    """Make a pipeline with one topic whose replicas are on nodes 1 (its leader) and 2 only."""
    made: list[PipelineUnderTest] = []
    bootstrap = kafka_cluster.bootstrap
    with fresh_topic_prefix(bootstrap) as prefix:

        def new(topic: str, partitions: int, **settings: str) -> PipelineUnderTest:
            wanted = NewTopic(
                topic,
                partitions,
                replica_assignment=[[1, 2]] * partitions,
                config={**_UNSAFE, **settings},
            )
            client = kafka_cluster.admin()
            client.create_topics([wanted])[topic].result(120)
            database.execute("CREATE TABLE users (id int PRIMARY KEY, n int)")
            log: dict[str, object] = {"replication_factor": 3, "partitions": _PARTITIONS}
            made.append(PipelineUnderTest(database, bootstrap, prefix, tmp_path, log=log))
            return made[0].set_up()

        new.prefix = prefix  # type: ignore[attr-defined]
        yield new
        for line in made:
            line.close()
        kafka_cluster.repair()


def insert(line: PipelineUnderTest, first: int, last: int) -> None:
    """Insert rows and wait until the daemon reports them in the log: seq counts rows here."""
    line.database.execute(f"INSERT INTO users SELECT i, 1 FROM generate_series({first}, {last}) i")
    wait_until(lambda: line.daemon.metric("lockstep_seq") == last, "the rows do not arrive")


def lose(cluster: KafkaCluster, line: PipelineUnderTest, topic: str, *, running: bool) -> int:
    """Lose the second half of the acknowledged rows; return the end of partition 0 before that."""
    line.start().wait_ready()
    insert(line, 1, 50)
    cluster.kill(2)
    wait_until(lambda: not cluster.led_by(2), "the dead node still leads")
    insert(line, 51, 100)
    before = end(line, topic)
    if not running:
        assert line.daemon.term() == 0
    cluster.kill(1)
    cluster.start([2])
    wait_until(lambda: cluster.leader(topic) == 2, "node 2 is not elected")
    return before


def end(line: PipelineUnderTest, topic: str) -> int:
    """Return partition 0's end; retry, as brokers learn its leader one after another."""
    found: list[int] = []

    def asked() -> bool:
        with suppress(UnavailableError):
            found.append(reader.end_offsets(line.config, [(topic, 0)])[topic, 0])
        return bool(found)

    wait_until(asked, "nothing reports where the partition ends")
    return found[0]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("running", [True, False])
def test_acknowledged_events_that_are_lost_are_named(
    running: bool,  # noqa: FBT001 - a parameter of the test
    kafka_cluster: KafkaCluster,
    unsafe: Unsafe,
) -> None:
    topic = names.data_topic(unsafe.prefix, "public", "users")  # type: ignore[attr-defined]
    line = unsafe(topic, _PARTITIONS)
    before = lose(kafka_cluster, line, topic, running=running)
    if running:
        output = line.ends(line.daemon, _CONFIG, "acknowledged", seconds=_FOUND_SECONDS)
    else:
        assert end(line, topic) < before, "nothing was lost: the test does not do what it says"
        output = line.refused(_CONFIG, "acknowledged", "unclean.leader.election.enable")
    named = re.search(rf"topic {topic}, partition (\d), ends at offset (\d+)", output)
    assert named is not None
    if named[1] == "0":
        assert int(named[2]) < before


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("running", [True, False])
def test_a_resume_record_that_is_lost_is_named(
    running: bool,  # noqa: FBT001 - a parameter of the test
    kafka_cluster: KafkaCluster,
    unsafe: Unsafe,
) -> None:
    """Stopped, the slot is ahead of what is left; running, the daemon knows what it has written."""
    topic = names.resume_topic(unsafe.prefix)  # type: ignore[attr-defined]
    line = unsafe(topic, 1, **{"cleanup.policy": "compact"})
    lose(kafka_cluster, line, topic, running=running)
    gap = f'slot "{line.config.slot}" is at'
    if running:
        # Its producer may notice first that its sequence numbers no longer fit, and start over.
        output = line.ends(line.daemon, _CONFIG, seconds=_FOUND_SECONDS)
        assert f"topic {topic}, partition 0, ends at offset" in output or gap in output.replace(
            "\\", ""
        )
    else:
        line.refused(
            _CONFIG,
            gap,
            "the changes between are no longer in the stream",
            "lost its newest records",
        )
