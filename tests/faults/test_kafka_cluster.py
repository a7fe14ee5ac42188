"""Three brokers that are killed, restarted, frozen or left with few replicas: it costs time only.

One load runs through all of it, and at the end the log is compared with Postgres' own account of
every change. LOCKSTEP_ROUNDS sets how many faults (`make cluster`: 40), LOCKSTEP_SEED repeats their
order.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest

from cdc.log import names
from tests.fixtures.cluster import ROUNDS, KafkaCluster
from tests.fixtures.daemon import Daemon, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.seeds import first_seed
from tests.fixtures.topic_settings import set_topic
from tests.fixtures.witness import Witness

_BATCH = {"max_events": 500, "max_wait_ms": 50}
_LIMIT_MB = 150
_SEED: Final = first_seed("LOCKSTEP_ROUNDS")
# A broker that is cut off for this long has lost its session and its leaderships.
_AWAY_SECONDS: Final = 3.0


def moves(daemon: Daemon, events: int = 30, seconds: float = 240.0) -> float:
    """Wait until `events` further events are published; return the seconds."""
    seen = daemon.metric("lockstep_events_total")

    def moved() -> bool:
        assert daemon.process.poll() is None, f"ended with {daemon.process.returncode}"
        return daemon.metric("lockstep_events_total") >= seen + events

    return wait_until(moved, "nothing moves", seconds)


class Ground:
    """The cluster and the pipeline on it, for a fault to work on."""

    def __init__(self, cluster: KafkaCluster, line: PipelineUnderTest) -> None:
        self.cluster = cluster
        self.line = line
        self.daemon = line.start().wait_ready()

    def moves(self) -> None:
        moves(self.daemon)

    @property
    def users(self) -> str:
        return names.data_topic(self.line.config.prefix, "public", "users")

    @property
    def resume(self) -> str:
        return names.resume_topic(self.line.config.prefix)

    def killed(self, node: int) -> None:
        """Kill a node; start it again after the others have carried on."""
        self.cluster.kill(node)
        self.moves()
        self.cluster.start([node])


def data_leader_killed(ground: Ground) -> None:
    ground.killed(ground.cluster.leader(ground.users))


def coordinator_killed(ground: Ground) -> None:
    ground.killed(ground.cluster.coordinator())


def resume_leader_killed(ground: Ground) -> None:
    ground.killed(ground.cluster.leader(ground.resume))


def rolling_restart(ground: Ground) -> None:
    for node in (1, 2, 3):
        ground.cluster.stop(node)
        ground.cluster.start([node])
        ground.cluster.wait_in_sync(ground.line.config.prefix)


def leader_cut_off(ground: Ground) -> None:
    """It does not answer, and does not know that it is no longer the leader."""
    node = ground.cluster.leader(ground.users)
    ground.cluster.freeze(node)
    try:
        time.sleep(_AWAY_SECONDS)
        ground.moves()
    finally:
        ground.cluster.thaw(node)


def too_few_copies(ground: Ground) -> None:
    """No record may be acknowledged that fewer than min.insync.replicas brokers hold."""
    cluster, topic = ground.cluster, ground.users
    set_topic(cluster.bootstrap, topic, "min.insync.replicas", "3")
    node = next(n for n in (1, 2, 3) if n != cluster.leader(topic))
    cluster.kill(node)
    time.sleep(_AWAY_SECONDS)
    cluster.start([node])
    ground.moves()
    set_topic(cluster.bootstrap, topic, "min.insync.replicas", "2")


def all_dead(ground: Ground) -> None:
    walsender = ground.line.slot("active_pid")
    ground.cluster.kill(1, 2, 3)
    time.sleep(_AWAY_SECONDS)
    assert ground.daemon.get("/livez")[0] == 200
    assert ground.line.slot("active_pid") == walsender, "the slot was given up"
    ground.cluster.start()


def disk_full(ground: Ground) -> None:
    """No file of the broker can grow: it takes its only disk offline, and ends."""
    cluster = ground.cluster
    node = cluster.leader(ground.users)
    resource.prlimit(cluster[node].pid, resource.RLIMIT_FSIZE, (1, 1))
    wait_until(lambda: not cluster[node].running, "the broker writes on")
    ground.moves()
    cluster.start([node])


# The first is the one that every commit runs.
FAULTS: Final[tuple[Callable[[Ground], None], ...]] = (
    coordinator_killed,
    all_dead,
    too_few_copies,
    data_leader_killed,
    resume_leader_killed,
    leader_cut_off,
    disk_full,
    rolling_restart,
)


@pytest.mark.commit("one fault of three brokers")
@pytest.mark.long("every fault; the first tier has one", again=True)
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900 + 60 * ROUNDS)
def test_brokers_may_fail_one_after_another_and_all_at_once(
    kafka_cluster: KafkaCluster,
    cluster_pipeline: NewPipeline,
    capsys: pytest.CaptureFixture[str],
) -> None:
    print(f"cluster: LOCKSTEP_SEED={_SEED} LOCKSTEP_ROUNDS={ROUNDS}")  # noqa: T201 - shown on failure
    chance = random.Random(_SEED)
    faults = list(FAULTS[:ROUNDS]) + chance.choices(FAULTS, k=max(0, ROUNDS - len(FAULTS)))
    chance.shuffle(faults)
    line = cluster_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    ground = Ground(kafka_cluster, line)
    took: Counter[str] = Counter()
    with Load(line.database.dsn, seed=_SEED, steps_per_second=300):
        for fault in faults:
            ground.moves()
            began = time.monotonic()
            fault(ground)
            ground.moves()
            # The next fault must not find two replicas out of three: that would be a double fault.
            kafka_cluster.wait_in_sync(line.config.prefix)
            took[fault.__name__] = round(time.monotonic() - began)
    proof = witness.check()
    assert ground.daemon.process.poll() is None
    assert ground.daemon.peak_rss_mb <= _LIMIT_MB
    with capsys.disabled():
        print(  # noqa: T201 - the one line of the campaign
            f"\ncluster: {len(faults)} faults, events {proof.events}, rows {proof.rows}, lost 0,"
            f" duplicate 0, reordered 0, seed {_SEED}, seconds {dict(took)}"
        )
