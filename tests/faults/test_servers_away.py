"""Postgres and the broker stop, die, hang and come back; the daemon waits and loses nothing."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from cdc.events import LSN
from cdc.local.stack import LocalStack
from tests.fixtures.daemon import Daemon, NewPipeline, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Witness

_OUTAGE_SECONDS = float(os.environ.get("LOCKSTEP_OUTAGE_SECONDS", "20"))
_WAL_SENDER_TIMEOUT = "3s"
# A stop that hangs takes as long as the daemon lives; a fast one takes a second or two.
_FAST_STOP_SECONDS = 10.0
_BATCH = {"max_events": 500, "max_wait_ms": 50}
_LIMIT_MB = 150


def _moves(daemon: Daemon, seconds: float = 90.0) -> None:
    seen = daemon.metric("lockstep_events_total")
    wait_until(
        lambda: daemon.metric("lockstep_events_total") >= seen + 30, "nothing moves", seconds
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_broker_that_is_away_costs_time_only(
    how: str, killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    """The walsender is kept alive, memory bounded; all that was written meanwhile arrives."""
    line = killable_pipeline(*TABLES, batch=_BATCH)
    timeout = f"SET wal_sender_timeout = '{_WAL_SENDER_TIMEOUT}'"
    line.database.execute(f"ALTER DATABASE {line.database.name} {timeout}")
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=6):
        _moves(daemon)
        walsender = line.slot("active_pid")
        broker = killable_stack["kafka"].pid
        if how == "hangs":
            os.kill(broker, signal.SIGSTOP)
        else:
            killable_stack["kafka"].kill()
        try:
            self_kept = _active_all_along(line.slot, _OUTAGE_SECONDS, walsender)
            assert daemon.get("/livez")[0] == 200
        finally:
            if how == "hangs":
                os.kill(broker, signal.SIGCONT)
            else:
                killable_stack.start("kafka")
        _moves(daemon)
    if how == "hangs":
        assert self_kept, "the walsender gave up on the daemon, or the daemon on the walsender"
    witness.check()
    assert daemon.peak_rss_mb <= _LIMIT_MB
    assert daemon.term() == 0


def _active_all_along(slot: object, seconds: float, walsender: int) -> bool:
    """Wait; return whether one walsender served the slot all the time."""
    assert callable(slot)
    kept = True
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        kept = kept and slot("active_pid") == walsender
        time.sleep(0.5)
    return kept


def test_a_stop_while_the_broker_is_away_ends_within_its_grace(
    killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    line = killable_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=7):
        _moves(daemon)
        broker = killable_stack["kafka"].pid
        os.kill(broker, signal.SIGSTOP)
        try:
            wait_until(lambda: daemon.metric("lockstep_pending_events") > 0, "nothing waits")
            assert daemon.term(30) == 0
        finally:
            os.kill(broker, signal.SIGCONT)
        line.start().wait_ready()
    witness.check()


def test_a_fast_shutdown_of_postgres_is_not_held_up_and_its_return_is_noticed(
    killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    line = killable_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=8):
        for _ in range(2):
            _moves(daemon)
            postgres = killable_stack["postgres"].state.process
            postgres.signal(signal.SIGINT)
            assert postgres.wait(_FAST_STOP_SECONDS), "the daemon holds the shutdown up"
            daemon.wait_state("reconnecting")
            killable_stack.start("postgres")
        _moves(daemon)
    witness.check()
    assert daemon.process.poll() is None


def test_an_idle_daemon_does_not_hold_a_fast_shutdown_up(
    killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    """Also when the last WAL was nothing to publish: a walsender waits until all is confirmed."""
    line = killable_pipeline(*TABLES)
    daemon = line.start().wait_ready()
    line.database.execute("INSERT INTO aside.unpublished SELECT i, i FROM generate_series(1,999) i")
    postgres = killable_stack["postgres"].state.process
    postgres.signal(signal.SIGINT)
    assert postgres.wait(_FAST_STOP_SECONDS), "the daemon holds the shutdown up"
    assert daemon.term(10) == 0, "with Postgres away it still stops when told to"
    killable_stack.start("postgres")


def test_a_shutdown_of_postgres_while_the_broker_hangs_loses_nothing(
    killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    """Nothing can be confirmed: the shutdown may wait, but not be told what is not so."""
    line = killable_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=9) as load:
        _moves(daemon)
        broker = killable_stack["kafka"].pid
        os.kill(broker, signal.SIGSTOP)
        seen = load.commits
        wait_until(lambda: load.commits > seen + 30, "no load")
        stopping = threading.Thread(target=killable_stack.stop, args=("postgres",))
        stopping.start()
        time.sleep(1.0)  # for the daemon to do wrong in
        os.kill(broker, signal.SIGCONT)
        stopping.join()
        killable_stack.start("postgres")
        _moves(daemon)
    witness.check()


def test_told_to_stop_under_load_it_leaves_nothing_half_done(pipeline: NewPipeline) -> None:
    line = pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=10):
        _moves(daemon)
        assert daemon.term() == 0
        _, position = line.resume()
        # What is in the log is confirmed, so nothing of it will be sent again; its frontier stands.
        assert LSN.parse(line.slot()) == position.end_lsn
        assert position.pending == ()
        line.start().wait_ready()
    witness.check()
