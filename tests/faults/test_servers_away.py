"""Postgres and the broker stop, die, hang and come back; the daemon waits and loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
import pytest

from cdc.daemon.timing import STOP_SECONDS
from cdc.events import LSN
from cdc.playground.servers.stack import LocalStack
from tests.fixtures.daemon import Daemon, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.proxy import Proxy
from tests.fixtures.witness import Witness

# More than the walsender's timeout, which must be more than a busy machine makes a process wait,
# and more than the grace period of a stop.
_OUTAGE_SECONDS = float(os.environ.get("LOCKSTEP_OUTAGE_SECONDS", "20"))
_WAL_SENDER_TIMEOUT = "15s"
# A stop that hangs takes as long as the daemon lives; a fast one takes a second or two.
_FAST_STOP_SECONDS = 90.0
_PATIENCE_SECONDS = 45.0
_BATCH = {"max_events": 500, "max_wait_ms": 50}
_LIMIT_MB = 150


def _moves(daemon: Daemon, seconds: float = 180.0) -> None:
    """Wait until it publishes: a transaction that hangs in the broker ends after 70 s there."""
    seen = daemon.metric("lockstep_events_total")
    wait_until(
        lambda: daemon.metric("lockstep_events_total") >= seen + 30, "nothing moves", seconds
    )


@pytest.mark.long("the other way of being away", sample=["dies"])
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
        away = {"hangs": _hanging, "dies": _dead}[how]
        began = time.monotonic()
        with away(killable_stack):
            kept = _active_all_along(line, _OUTAGE_SECONDS, walsender)
            assert daemon.get("/livez")[0] == 200
        lasted = time.monotonic() - began
        _moves(daemon)
    ended = [event["fields"] for event in daemon.events if event["event"] == "starting over"]
    assert kept, f"the walsender gave up on the daemon, or the daemon on the walsender: {ended}"
    # A minute without a broker ends the session: so long may one take to start here.
    assert not ended or lasted > _PATIENCE_SECONDS, "a session was given up that could go on"
    witness.check()
    assert daemon.peak_rss_mb <= _LIMIT_MB
    assert daemon.term() == 0


@contextmanager
def _hanging(stack: LocalStack) -> Iterator[None]:
    """Stop the broker's process for a while, as a full disk or a paused machine would."""
    broker = stack["kafka"].pid
    os.kill(broker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker, signal.SIGCONT)


@contextmanager
def _dead(stack: LocalStack) -> Iterator[None]:
    stack["kafka"].kill()
    try:
        yield
    finally:
        stack.start("kafka")


def _active_all_along(line: PipelineUnderTest, seconds: float, walsender: int) -> bool:
    """Wait; return whether one walsender served the slot all the time."""
    deadline = time.monotonic() + seconds
    kept = True
    while time.monotonic() < deadline:
        kept = kept and line.slot("active_pid") == walsender
        time.sleep(0.5)
    return kept


@pytest.mark.long("waits for the grace")
def test_a_stop_while_the_broker_is_away_ends_within_its_grace(
    killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    line = killable_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=7) as load:
        _moves(daemon)
        with _hanging(killable_stack):
            seen = load.commits
            wait_until(lambda: load.commits > seen + 20, "no load")
            daemon.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.process.wait(_OUTAGE_SECONDS)
        assert daemon.wait_exit() == 0
        line.start().wait_ready()
    witness.check()


def test_signalled_twice_it_stops_at_once_and_loses_nothing(
    killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    line = killable_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=11):
        _moves(daemon)
        with _hanging(killable_stack):
            # More has come than can be sent, so it can't finish.
            wait_until(lambda: daemon.metric("lockstep_pending_events") > 0, "nothing waits")
            asked_at = time.monotonic()
            daemon.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.process.wait(1)
            ended = daemon.process.poll()
            daemon.process.terminate()
            within_grace = time.monotonic() - asked_at < STOP_SECONDS
            daemon.wait_exit()
        # A machine that stops this test for longer than the grace leaves it nothing to cut short.
        if within_grace:
            assert ended is None, "it finishes what it has"
            output = [event["event"] for event in daemon.events]
            assert "stopped" not in output, "it waited until its grace was over"
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
    """Also when the last WAL has nothing to publish: a walsender waits until all is confirmed."""
    line = killable_pipeline(*TABLES)
    daemon = line.start().wait_ready()
    line.database.execute(
        "INSERT INTO elsewhere.unpublished SELECT i, i FROM generate_series(1,999) i"
    )
    postgres = killable_stack["postgres"].state.process
    postgres.signal(signal.SIGINT)
    assert postgres.wait(_FAST_STOP_SECONDS), "the daemon holds the shutdown up"
    assert daemon.term() == 0, "with Postgres away it still stops when signalled"
    killable_stack.start("postgres")


def test_a_shutdown_of_postgres_while_the_broker_hangs_loses_nothing(
    killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    """Nothing can be confirmed: the shutdown may wait, but no false LSN may be confirmed."""
    line = killable_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=9) as load:
        _moves(daemon)
        with _hanging(killable_stack):
            seen = load.commits
            wait_until(lambda: load.commits > seen + 30, "no load")
            stopping = threading.Thread(target=killable_stack.stop, args=("postgres",))
            stopping.start()
            time.sleep(1.0)  # time for the daemon to do wrong
        stopping.join()
        killable_stack.start("postgres")
        _moves(daemon)
    witness.check()


@pytest.mark.long("the campaign stops daemons under load")
def test_stopped_under_load_it_leaves_nothing_half_done(pipeline: NewPipeline) -> None:
    line = pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=10):
        _moves(daemon)
        assert daemon.term() == 0
        _, position = line.resume()
        # All that is in the log is confirmed, so none of it is sent again; its frontier is written.
        assert LSN.parse(line.slot()) == position.end_lsn
        assert position.pending == (), position
        line.start().wait_ready()
    witness.check()


@pytest.mark.long("a stop that is signalled twice is in the first tier")
@pytest.mark.parametrize("rows", [300, 6_000])
def test_stopped_inside_a_source_transaction_it_reads_on_to_an_end_that_is_near(
    rows: int, pipeline: NewPipeline, new_proxy: Callable[[str, int], Proxy]
) -> None:
    """No frontier is inside one; a large one is split there, and the next start continues it."""
    complete = rows < _BATCH["max_events"]
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY, n int, note text)", batch=_BATCH)
    witness = Witness(line)
    with line.database.connect() as connection:
        proxy = new_proxy(connection.info.host, connection.info.port)
    dsn = psycopg.conninfo.make_conninfo(line.database.dsn, host="127.0.0.1", port=proxy.port)
    daemon = line.start(config_file=line.write("proxied.yaml", source__dsn=dsn)).wait_ready()
    proxy.fragment_bytes, proxy.bytes_per_second = 2_000, 30_000 if complete else 300_000
    line.database.execute(
        f"INSERT INTO t SELECT i, 1, repeat('x', 300) FROM generate_series(1, {rows}) i"
    )
    metric, seen = ("pending_events", 20) if complete else ("events_total", 500)
    wait_until(lambda: daemon.metric(f"lockstep_{metric}") > seen, "nothing arrives", pause=0.01)
    daemon.process.terminate()
    if complete:
        proxy.bytes_per_second = 0  # the end is near, in time too
    assert daemon.wait_exit() == 0
    _, position = line.resume()
    assert position.open is not complete
    assert (position.seq == rows) is complete
    assert (position.pending == ()) is complete
    line.start().wait_ready()
    assert witness.check().events == rows
