"""Two daemons: one works, one waits and takes over; a zombie's records are never visible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from cdc.errors import Exit
from cdc.log import topics
from cdc.log.offsets import OffsetsQuestion
from cdc.log.partitions import Partition
from cdc.playground.servers.stack import LocalStack
from tests.faults.campaign import proxied_kafka
from tests.fixtures.daemon import Daemon, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.proxy import Proxy
from tests.fixtures.witness import Witness, data_records, records_of

_SMALL = {"max_events": 200, "max_wait_ms": 50}
# A standby polls twice a second; the rest is the start itself, on a busy machine.
_TAKEOVER_SECONDS = 120.0
# The broker must notice that a transaction of the zombie is fenced, unless none was open.
_ZOMBIE_SECONDS = 120.0
# A timeout of one second, and the broker checks once a second.
_GIVEN_UP_SECONDS = 2.5
# A commit that the broker knew of when the daemon froze has ended by then.
_ENDING_SECONDS = 2.0
_BULK = "INSERT INTO lines SELECT i, 1, 'z', NULL FROM generate_series(1, 30000) i"


def _moves(daemon: Daemon, events: int = 30) -> None:
    seen = daemon.metric("lockstep_events_total")
    wait_until(lambda: daemon.metric("lockstep_events_total") >= seen + events, "nothing moves")


def _release_slot(line: PipelineUnderTest) -> None:
    """End the walsender of a stopped daemon, as its timeout would in the end."""
    pid = line.slot("active_pid")  # None where its timeout has come first
    line.query("SELECT pg_terminate_backend(%s)", pid)
    wait_until(lambda: line.slot("active_pid") != pid or pid is None, "its walsender goes on")


def _held(line: PipelineUnderTest) -> dict[Partition, int]:
    """Return the data partitions with an open transaction, with their last stable offsets."""
    admin = topics.admin(line.config)
    existing = topics.existing(admin, line.config.prefix)
    data = {name: count for name, count in existing.items() if line.is_data(name)}
    spans = OffsetsQuestion(admin, data).answer().spans
    return {place: span.stable for place, span in spans.items() if span.stable < span.end}


def _caught(line: PipelineUnderTest, zombie: Daemon) -> bool:
    """Freeze it; return whether its transaction, with records in the log, stays open.

    Otherwise it is thawed again.
    """
    zombie.freeze()
    before = _held(line)
    time.sleep(_ENDING_SECONDS)
    after = _held(line)
    if any(after.get(place) == stable for place, stable in before.items()):
        return True
    zombie.thaw()
    _moves(zombie)
    return False


def test_a_standby_waits_and_never_fences_the_daemon_that_works(pipeline: NewPipeline) -> None:
    line = pipeline(*TABLES, batch=_SMALL)
    line.never_time_out()
    witness = Witness(line)
    first = line.start().wait_ready()
    with Load(line.database.dsn, seed=1):
        second = line.start()
        second.wait_state("standby")
        assert second.health()["status"] == 200
        assert second.get("/livez")[0] == 200
        for _ in range(5):  # while it is the standby, the first one works undisturbed
            _moves(first)
            assert (first.state, second.state) == ("streaming", "standby")
    assert first.metric("lockstep_reconnects_total") == 0
    assert second.metric("lockstep_events_total") == 0
    witness.check()
    assert second.term() == 0, "a standby has nothing to finish"
    assert first.term() == 0


def test_started_at_once_one_works_and_the_other_takes_over_when_it_is_killed(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(*TABLES, batch=_SMALL)
    witness = Witness(line)
    with Load(line.database.dsn, seed=2):
        pair = [line.start(), line.start()]
        roles: dict[str, Daemon] = {}

        def roles_taken() -> bool:
            roles.clear()
            roles.update({each.state: each for each in pair})
            return roles.keys() == {"streaming", "standby"}

        wait_until(roles_taken, "no roles")
        pair = [roles["streaming"], roles["standby"]]
        for _ in range(2):  # the one that is killed comes back as the other's standby
            working, waiting = pair
            _moves(working)
            working.kill()
            waiting.wait_state("streaming", _TAKEOVER_SECONDS)
            pair = [waiting, line.start()]
            pair[1].wait_state("standby")
        _moves(pair[0])
    witness.check()


@pytest.mark.long("a minute; test_zombie_producers has a sample")
def test_what_a_zombie_was_writing_never_becomes_visible(
    killable_stack: LocalStack,
    killable_pipeline: NewPipeline,
    new_proxy: Callable[[str, int], Proxy],
) -> None:
    """Stopped in the middle of its work, replaced, and woken again: it must not even disturb."""
    line = killable_pipeline(*TABLES, batch=_SMALL)
    proxy = proxied_kafka(killable_stack, new_proxy)
    # With latency to the broker some transaction is open at nearly every moment.
    proxy.delay_seconds = 0.03
    far = line.write("far.yaml", log__bootstrap_servers=f"127.0.0.1:{proxy.port}")
    witness = Witness(line)
    pair = [line.start(config_file=far).wait_ready(), line.start(config_file=far)]
    pair[1].wait_state("standby")
    with Load(line.database.dsn, seed=3, steps_per_second=200):
        for _ in range(2):
            zombie, heir = pair
            _moves(zombie)
            wait_until(lambda: _caught(line, zombie), "never caught in flight", 180)  # noqa: B023 - at once
            _release_slot(line)
            heir.wait_state("streaming", _TAKEOVER_SECONDS)
            _moves(heir)
            started_again = heir.metric("lockstep_reconnects_total")
            zombie.thaw()
            wait_until(
                lambda: zombie.process.poll() is not None or zombie.state == "standby",  # noqa: B023
                "the zombie does not notice",
                _ZOMBIE_SECONDS,
            )
            _moves(heir)
            heir.wait_state("streaming")
            assert heir.metric("lockstep_reconnects_total") == started_again, "it was disturbed"
            pair = [heir, zombie if zombie.process.poll() is None else line.start(config_file=far)]
    witness.check()
    written = records_of(line, line.is_data, isolation="read_uncommitted")
    assert len(written) > len(data_records(line)), "no zombie was caught with anything in flight"


@pytest.mark.long("waits for a timeout; test_direct has what a broker timed out")
def test_a_transaction_that_the_broker_gave_up_is_written_again(pipeline: NewPipeline) -> None:
    """A pause longer than the transaction timeout, without a takeover: it still has the slot."""
    line = pipeline(*TABLES, batch={"max_events": 500, "max_wait_ms": 50})
    witness = Witness(line)
    file = line.write("hasty.yaml", log__kafka={"transaction.timeout.ms": 1_000})
    daemon = line.start(config_file=file).wait_ready()
    with Load(line.database.dsn, seed=5, steps_per_second=300):
        line.database.execute(_BULK)
        wait_until(
            lambda: daemon.metric("lockstep_events_total") > 1_000, "nothing moves", pause=0.01
        )
        daemon.freeze()
        time.sleep(_GIVEN_UP_SECONDS)
        daemon.thaw()
        _moves(daemon)
    witness.check()


def test_a_stopped_daemon_that_nobody_replaced_goes_on(pipeline: NewPipeline) -> None:
    line = pipeline(*TABLES, batch=_SMALL)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=4):
        _moves(daemon)
        os.kill(daemon.process.pid, signal.SIGSTOP)
        _release_slot(line)
        daemon.thaw()
        _moves(daemon)
    witness.check()


@pytest.mark.long("the other order", sample=["setup"])
@pytest.mark.parametrize("first", ["setup", "standby"])
def test_a_setup_that_races_with_a_standby_never_moves_the_log_back(
    first: str, pipeline: NewPipeline
) -> None:
    """`cdc setup` accepts that a table was taken out: the one command that rewrites the record."""
    line = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY)", "CREATE TABLE orders (id int PRIMARY KEY)"
    )
    file = line.write("without.yaml", source__exclude=["public.orders"])
    active, standby = line.start(), None
    active.wait_ready()
    try:
        standby = line.start(config_file=file)
        standby.wait_state("standby")
        line.database.execute("INSERT INTO users SELECT generate_series(1, 3000)")
        wait_until(lambda: line.resume()[1].seq == 3000, "the rows do not arrive")
        line.database.execute("INSERT INTO users SELECT generate_series(3001, 6000)")
        before = line.resume()[1]
        active.freeze()
        name = line.config.publication
        line.database.execute(f"ALTER PUBLICATION {name} DROP TABLE orders")
        active.kill()
        if first == "standby":
            wait_until(lambda: line.slot("active_pid") is not None, "it does not take over")
        setup = [sys.executable, "-m", "cdc.cli.main", "setup", "-c", str(file)]
        done = subprocess.run(setup, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode in {Exit.OK, Exit.CONFIG, Exit.TEMPORARY}, done.stderr
        assert (line.resume()[1].seq, line.resume()[1].end_lsn) >= (before.seq, before.end_lsn)
    finally:
        for daemon in line.daemons:
            daemon.kill()
    line.released()
    # Whichever won: repeated, the command leaves a log that continues.
    subprocess.run(setup, capture_output=True, check=True, timeout=120)
    line.start(config_file=file).wait_ready()
    line.database.execute("INSERT INTO users VALUES (6001)")
    wait_until(lambda: line.resume()[1].seq >= 6001, "the log does not continue")
    seqs = sorted(each.event["source"]["seq"] for each in data_records(line) if each.value)
    assert seqs == list(range(1, 6002))
