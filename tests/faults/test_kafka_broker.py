"""One broker that is slow, silent or throttled, forgets ids or denies rights: nothing is lost."""

from __future__ import annotations

import os
import signal
import time

import pytest
from confluent_kafka import Producer

from tests.faults.test_kafka_cluster import moves
from tests.fixtures.daemon import Daemon, PipelineUnderTest, wait_until
from tests.fixtures.guarded import EXPIRY_SECONDS, PASSWORD, USER, GuardedBroker
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Witness

_PERMISSION = 77
_BATCH = {"max_events": 300, "max_wait_ms": 50}
_LIMIT_MB = 150
# Twenty seconds of silence end a connection; each writer has two, and may try them in turn.
_FOUND_SECONDS = 240.0


def begin(line: PipelineUnderTest, **log: object) -> tuple[Daemon, Witness]:
    """Set the pipeline up and start its daemon, with these settings of `log`."""
    line.database.execute(*TABLES)
    line.set_up()
    changed = {f"log__{name}": value for name, value in log.items()}
    file = line.write("changed.yaml", batch=_BATCH, **changed)
    witness = Witness(line)
    return line.start(config_file=file).wait_ready(), witness


# --- the network ---


@pytest.mark.long("bad lines of other kinds", sample=["reset"])
@pytest.mark.parametrize("way", ["reset", "crumbs", "slow", "late"])
def test_a_bad_line_to_the_broker_loses_nothing(
    way: str, guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    """Reset again and again; seven bytes at a time; 150 kB a second; every chunk 30 ms late."""
    proxy = guarded_broker.proxy
    daemon, witness = begin(guarded_line, bootstrap_servers=guarded_broker.proxied)
    with Load(guarded_line.database.dsn, seed=41, steps_per_second=200):
        moves(daemon)
        proxy.fragment_bytes = 7 if way == "crumbs" else 0
        proxy.bytes_per_second = 150_000 if way == "slow" else 0
        proxy.delay_seconds = 0.03 if way == "late" else 0.0
        for _ in range(3):
            if way == "reset":
                proxy.cut()
            moves(daemon)
    proxy.bytes_per_second = proxy.fragment_bytes = 0
    witness.check()
    assert daemon.peak_rss_mb <= _LIMIT_MB


@pytest.mark.long("waits for a timeout; test_network has it for Postgres")
@pytest.mark.slow
def test_a_half_open_connection_to_the_broker_is_left(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    """No reset ever comes. Not ready after a quarter of a minute, then detected and closed."""
    daemon, witness = begin(guarded_line, bootstrap_servers=guarded_broker.proxied)
    with Load(guarded_line.database.dsn, seed=42, steps_per_second=100):
        moves(daemon)
        # Otherwise the daemon may reconnect before it has been stuck for that long.
        guarded_broker.proxy.refusing = True
        guarded_broker.proxy.freeze()
        wait_until(lambda: daemon.health()["status"] == 503, "still ready")
        assert daemon.get("/livez")[0] == 200
        guarded_broker.proxy.refusing = False
        moves(daemon, seconds=_FOUND_SECONDS)
    witness.check()
    assert daemon.peak_rss_mb <= _LIMIT_MB


@pytest.mark.long("memory over time")
def test_a_quota_makes_it_slow_and_holds_memory_down(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    daemon, witness = begin(guarded_line)
    walsender = guarded_line.slot("active_pid")
    with Load(guarded_line.database.dsn, seed=47):
        moves(daemon)
        guarded_broker.quota(50_000)
        try:
            moves(daemon, 200)
            assert guarded_line.slot("active_pid") == walsender, daemon.log
        finally:
            guarded_broker.quota(None)
        moves(daemon)
    witness.check()
    assert daemon.peak_rss_mb <= _LIMIT_MB


# --- transactions that the broker gives up ---


def test_another_producer_with_our_id_fences_once_and_the_daemon_starts_over(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    """The slot decides who writes; a fencing error does not prove that there is a second writer."""
    daemon, witness = begin(guarded_line)
    config = guarded_line.config
    with Load(guarded_line.database.dsn, seed=43):
        moves(daemon)
        other = Producer(
            {
                "bootstrap.servers": guarded_broker.plain,
                "transactional.id": f"{config.prefix}.{config.pipeline}",
            }
        )
        other.init_transactions(60)
        wait_until(lambda: daemon.metric("lockstep_reconnects_total") >= 1, "not fenced")
        moves(daemon)
    witness.check()
    assert daemon.process.poll() is None


@pytest.mark.long("waits for a timeout; test_direct has what a broker timed out")
def test_a_transaction_that_timed_out_under_a_frozen_daemon_is_written_again(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    daemon, witness = begin(guarded_line, kafka={"transaction.timeout.ms": 3_000})
    with Load(guarded_line.database.dsn, seed=44):
        moves(daemon)
        # While the broker is stopped, a transaction of the daemon is certain to be open.
        os.kill(guarded_broker.pid, signal.SIGSTOP)
        try:
            time.sleep(1.0)
            daemon.freeze()
        finally:
            os.kill(guarded_broker.pid, signal.SIGCONT)
        time.sleep(5.0)
        daemon.thaw()
        moves(daemon)
    witness.check()
    assert daemon.process.poll() is None


@pytest.mark.long("waits until an id expires")
def test_a_transactional_id_that_the_broker_forgot_is_taken_again(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    """INVALID_PRODUCER_ID_MAPPING, by default after seven idle days."""
    daemon, witness = begin(guarded_line)
    with Load(guarded_line.database.dsn, seed=45) as load:
        moves(daemon)
        load.rest()
        time.sleep(EXPIRY_SECONDS + 2.0)
        load.go_on()
        moves(daemon)
    witness.check()
    assert daemon.process.poll() is None


# --- who may do what ---


def keys(password: str = PASSWORD) -> dict[str, object]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": password,
    }


@pytest.mark.long("half a minute; a right that is revoked is in the first tier")
def test_a_wrong_password_says_so_and_is_not_tried_for_ever(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    guarded_line.database.execute(*TABLES)
    guarded_line.set_up()
    file = guarded_line.write(
        "locked.yaml", log__bootstrap_servers=guarded_broker.locked, log__kafka=keys("wrong")
    )
    daemon = guarded_line.start(config_file=file)
    output = guarded_line.ends(daemon, _PERMISSION, "sasl.password")
    assert "wrong" not in output.replace("is wrong", "")


@pytest.mark.long("the other right", sample=["WRITE-TOPIC"])
@pytest.mark.parametrize(("operation", "what"), [("WRITE", "TOPIC"), ("WRITE", "TRANSACTIONAL_ID")])
def test_a_right_that_is_revoked_is_named_and_waited_for(
    operation: str, what: str, guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest
) -> None:
    prefix = guarded_line.config.prefix
    for each in ("WRITE", "READ", "CREATE", "DESCRIBE", "DESCRIBE_CONFIGS"):
        guarded_broker.allow(f"{prefix}.", each)
    guarded_broker.allow(f"{prefix}.", "WRITE", "DESCRIBE", what="TRANSACTIONAL_ID")
    daemon, witness = begin(guarded_line, bootstrap_servers=guarded_broker.locked, kafka=keys())
    with Load(guarded_line.database.dsn, seed=46):
        moves(daemon)
        guarded_broker.revoke(f"{prefix}.", operation, what)
        wait_until(lambda: "kafka-acls.sh" in daemon.log, "it does not say so")
        daemon.wait_state("reconnecting")
        guarded_broker.allow(f"{prefix}.", operation, what=what)
        moves(daemon)
    witness.check()
