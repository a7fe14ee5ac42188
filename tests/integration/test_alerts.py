"""Alert rules fire by what they warn of: it is caused, and the daemon's own metrics show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import psycopg
import pytest

from cdc.cli.main import run
from cdc.deliver import undelivered
from cdc.errors import Exit
from cdc.events import LSN
from cdc.operate import alerts
from cdc.playground.servers.stack import LocalStack
from tests.fixtures.alerting import assert_alerts, going_on, lasting, need_promtool
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import Daemon, NewPipeline, wait_until
from tests.fixtures.receiver import Receiver
from tests.fixtures.standby import STANDBY_SLOT, NewPair
from tests.integration.test_wait import FOLLOWERS, FakeFollower
from tests.integration.test_webhooks import SECRET, delivering, hooked, write

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, n int)"
_ALL = {each.name for each in alerts.ALERTS}
_SYNCED = "SELECT synced AND NOT temporary FROM pg_replication_slots"
_FILLER = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000))"

pytestmark = pytest.mark.usefixtures("_promtool")


@pytest.fixture
def _promtool() -> None:
    need_promtool()


def metrics(daemon: Daemon) -> bytes:
    status, body = daemon.get("/metrics")
    assert status == 200
    return body


def two_scrapes(
    daemon: Daemon, *growing: str, meanwhile: Callable[[], object] = lambda: None
) -> tuple[bytes, bytes, float]:
    """Return two scrapes, and how many seconds are between them.

    Each of the `growing` metrics has grown by as much as two of the daemon's looks are apart.
    """
    began, first = time.monotonic(), metrics(daemon)
    before = {name: daemon.metric(name) for name in growing}

    def grown() -> bool:
        meanwhile()
        return all(daemon.metric(name) > value + 8 for name, value in before.items())

    wait_until(grown, f"not all of {growing} grow", pause=1.0)
    return first, metrics(daemon), time.monotonic() - began


def _shows(daemon: Daemon, series: str, value: float) -> Callable[[], bool]:
    return lambda: f"{series} {value}".encode() in metrics(daemon)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(SECRET, lambda _: 204) as found:
        yield found


def test_a_webhook_that_does_not_deliver_is_in_readyz_and_fires_alerts(
    pipeline: NewPipeline, receiver: Receiver, tmp_path: Path
) -> None:
    line = hooked(pipeline, receiver, attempts=2)
    daemon = line.daemon
    wait_until(_shows(daemon, 'lockstep_webhook_state{state="new",webhook="hook"}', 1.0), "not new")
    never_run = metrics(daemon)
    health = daemon.health()
    assert health["status"] == 200, "the daemon itself is ready"
    assert health["verdict"]["level"] == "failed"
    assert [each["state"] for each in health["webhooks"]] == ["new"]
    delivers = 'lockstep_webhook_state{state="delivering",webhook="hook"}'
    running = delivering(line, tmp_path / "log")
    try:
        wait_until(_shows(daemon, delivers, 1.0), "it is not seen to deliver")
        wait_until(lambda: daemon.health()["verdict"]["level"] == "ok", "it is not well")
        well = lasting(metrics(daemon))
        receiver.answer = lambda _: 503
        write(line, 5, 1)
        wait_until(lambda: daemon.metric("lockstep_webhook_stalled_seconds") > 1, "not away")
        away = going_on(*two_scrapes(daemon, "lockstep_webhook_stalled_seconds"))
        receiver.answer = lambda _: 400
        wait_until(lambda: daemon.metric("lockstep_webhook_undelivered") == 5, "none given up")
        given_up = lasting(metrics(daemon))
        undelivered.discard(line.config, "webhook.hook", ())
        wait_until(lambda: daemon.metric("lockstep_webhook_undelivered") == 0, "not decided")
    finally:
        running.kill()
        running.wait()
    assert_alerts(tmp_path, well, quiet=_ALL)
    assert_alerts(
        tmp_path, well, lasting(never_run), fire={"LockstepWebhookNotRunning", "LockstepFailed"}
    )
    assert_alerts(
        tmp_path, well, away,
        fire={"LockstepWebhookStalled"},
        quiet={"LockstepWebhookNotRunning", "LockstepDown"},
    )  # fmt: skip
    assert_alerts(tmp_path, well, given_up, fire={"LockstepWebhookUndelivered", "LockstepFailed"})


@pytest.mark.long("waits for several monitors; the rules' series are in test_metrics_files")
def test_a_daemon_that_is_missing_and_what_holds_its_slot_back_fire_alerts(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    line = pipeline(_TABLE, source={"canary_seconds": 0})

    def fill() -> None:
        line.database.execute(*[_FILLER] * 3)

    daemon = line.start().wait_ready()
    wait_until(lambda: daemon.metric("lockstep_slot_wal_status") == 1, "not looked at")
    well = lasting(metrics(daemon))
    assert_alerts(tmp_path, well, quiet=_ALL)
    with psycopg.connect(line.database.dsn) as slow:
        slow.execute("INSERT INTO t VALUES (1, 1)")
        line.database.execute(*[_FILLER] * 60)
        wait_until(lambda: daemon.metric("lockstep_oldest_transaction_seconds") > 3, "not seen")
        wait_until(lambda: daemon.metric("lockstep_slot_stalled_seconds") > 1, "not stalled")
        wait_until(lambda: daemon.metric("lockstep_slot_lost_in_seconds") > 0, "no forecast")
        growing = ("lockstep_oldest_transaction_seconds", "lockstep_slot_stalled_seconds")
        held = going_on(*two_scrapes(daemon, *growing, meanwhile=fill))
        soon = lasting(metrics(daemon))
    assert_alerts(tmp_path, well, held, fire={"LockstepLongTransaction", "LockstepSlotStalled"})
    assert_alerts(tmp_path, well, soon, fire={"LockstepSlotLostSoon"})
    line.database.execute("SELECT pg_logical_emit_message(false, 'cdc.canary', 'forged')")
    wait_until(lambda: daemon.metric("lockstep_refused_messages_total") == 1, "not refused")
    assert_alerts(tmp_path, well, lasting(metrics(daemon)), fire={"LockstepRefusedMessages"})
    daemon.kill()
    assert_alerts(tmp_path, well, {}, fire={"LockstepDown"})


@pytest.mark.long("waits for several monitors; the rules' series are in test_metrics_files")
def test_a_source_that_cannot_be_looked_at_fires_an_alert(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    line = pipeline(_TABLE)
    daemon = line.start().wait_ready()
    wait_until(lambda: daemon.metric("lockstep_slot_wal_status") == 1, "not looked at")
    well = lasting(metrics(daemon))
    over = Event()
    ends = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname ="
        " current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )

    def end_connections() -> None:
        with psycopg.connect(line.database.dsn, autocommit=True) as connection:
            while not over.is_set():
                with suppress(psycopg.Error):
                    connection.execute(ends.encode())
                over.wait(0.002)

    ending = Thread(target=end_connections)
    ending.start()
    try:
        wait_until(lambda: daemon.metric("lockstep_source_check_age_seconds") > 8, "it looks")
        unseen = going_on(*two_scrapes(daemon, "lockstep_source_check_age_seconds"))
    finally:
        over.set()
        ending.join()
    assert_alerts(tmp_path, well, unseen, fire={"LockstepSourceNotChecked"})


def test_a_table_that_was_renamed_there_and_back_is_stale_until_it_is_read_again(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """An alert fires, and the console names the table, also at the stores that have it."""
    others = {**FOLLOWERS, "other": {"tables": ["public.v"], "redis": {"url": "redis://other"}}}
    line = pipeline(_TABLE, "CREATE TABLE v (id int PRIMARY KEY)", followers=others)
    daemon = line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1, 1)", "INSERT INTO v VALUES (1)")
    wait_until(lambda: daemon.metric("lockstep_source_check_age_seconds") >= 0, "not looked at")
    well = lasting(metrics(daemon))
    line.database.execute(
        "ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (2, 2)", "ALTER TABLE u RENAME TO t",
        "INSERT INTO t VALUES (3, 3)",
    )  # fmt: skip
    wait_until(lambda: daemon.metric("lockstep_incomplete_topics") == 1, "it is not counted")
    stale = lasting(metrics(daemon))
    shown = ConsoleUnderTest(
        line.write("console.yaml", http__listen=f"127.0.0.1:{daemon.port}"), tmp_path / "log"
    )
    try:

        def names() -> dict[str, list[str]]:
            found = shown.get("/api/status")[1]["measured"]
            return dict(found["stale"]) if found else {}

        wait_until(lambda: names() == {"cache": ["public.t"]}, "the console does not name it")
        tables = {each["name"]: each for each in shown.get("/api/tables")[1]["tables"]}
        assert "the topic of public.t is incomplete" in tables["public.t"]["incomplete"]
        assert tables["public.v"]["incomplete"] is None
        again = ["snapshot", "public.t", "--replace", "--wait", "-c", str(line.config_file)]
        assert run(again) == Exit.OK
        wait_until(lambda: names() == {}, "the console still names it")
    finally:
        assert shown.close() == 0
    wait_until(lambda: daemon.metric("lockstep_incomplete_topics") == 0, "it is still counted")
    alert = {"LockstepTopicIncomplete"}
    assert_alerts(tmp_path, well, quiet=alert)
    assert_alerts(tmp_path, well, stale, fire=alert)
    assert_alerts(tmp_path, well, stale, lasting(metrics(daemon)), quiet=alert)


@pytest.mark.long("servers of its own; the rules' series are in test_metrics_files")
def test_a_log_that_lacks_what_postgres_has_committed_fires_an_alert(
    killable_pipeline: NewPipeline, killable_stack: LocalStack, tmp_path: Path
) -> None:
    """Kafka is away, while Postgres commits; the lag is over once it is there again."""
    line = killable_pipeline(_TABLE, source={"canary_seconds": 0})
    daemon = line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1, 1)")
    wait_until(line.frontiers, "the log has no frontier")
    well = lasting(metrics(daemon))
    killable_stack.stop("kafka")
    line.database.execute("INSERT INTO t VALUES (2, 2)")
    wait_until(lambda: daemon.metric("lockstep_lag_seconds") > 15, "the log does not lag")
    late = going_on(*two_scrapes(daemon, "lockstep_lag_seconds"))
    killable_stack.start("kafka")
    daemon.wait_ready()
    wait_until(lambda: line.resume()[1].seq >= 2, "the row does not arrive")
    wait_until(lambda: daemon.metric("lockstep_lag_seconds") < 15, "the lag is not over")
    assert_alerts(tmp_path, well, quiet={"LockstepLag"})
    assert_alerts(tmp_path, well, late, fire={"LockstepLag"}, quiet={"LockstepDown"})
    assert_alerts(tmp_path, well, late, lasting(metrics(daemon)), quiet={"LockstepLag"})


@pytest.mark.long("waits for several monitors; the rules' series are in test_metrics_files")
def test_followers_that_lag_halt_or_are_built_again_fire_alerts(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    line = pipeline(_TABLE, followers=FOLLOWERS, source={"canary_seconds": 1})
    daemon = line.start().wait_ready()
    follower = FakeFollower(line.config)
    wait_until(lambda: daemon.health()["verdict"]["level"] == "failed", "it has never run")
    assert_alerts(tmp_path, lasting(metrics(daemon)), fire={"LockstepFailed"})

    def report(**changed: object) -> None:
        now = time.time_ns() // 1_000
        follower.report(lsn=LSN(1), **{"canary_at_us": now, "began_at_us": now} | changed)

    report()
    wait_until(lambda: daemon.metric("lockstep_follower_generation") == 1, "it is not seen")
    well = lasting(metrics(daemon))
    report(canary_at_us=time.time_ns() // 1_000 - 5_000_000)
    line.database.execute("INSERT INTO t VALUES (1, 1)")
    wait_until(lambda: daemon.metric("lockstep_follower_lag_seconds") > 2, "it does not lag")
    growing = ("lockstep_follower_lag_seconds", "lockstep_follower_canary_age_seconds")
    late = going_on(*two_scrapes(daemon, *growing))
    assert_alerts(tmp_path, well, late, fire={"LockstepCanaryLate", "LockstepFollowerLag"})
    report(state="halted", what="it is full", hint="make room")
    halted = _shows(daemon, 'lockstep_follower_state{follower="cache",state="halted"}', 1.0)
    wait_until(halted, "not halted")
    assert_alerts(tmp_path, well, lasting(metrics(daemon)), fire={"LockstepFollowerNotRunning"})
    report(generation=2)
    wait_until(lambda: daemon.metric("lockstep_follower_generation") == 2, "not built again")
    assert_alerts(tmp_path, well, lasting(metrics(daemon)), fire={"LockstepStoreRebuilt"})


@pytest.mark.slow
@pytest.mark.long("a server of its own; the rules' series are in test_metrics_files")
def test_a_slot_that_is_lost_next_fires_an_alert(new_pair: NewPair, tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "64MB"}
    _, line = new_pair(17, _TABLE, standby=False, settings=settings)
    daemon = line.start().wait_ready()
    wait_until(lambda: daemon.metric("lockstep_slot_wal_status") == 1, "not looked at")
    well = lasting(metrics(daemon))
    unreserved = _shows(daemon, 'lockstep_slot_wal_status{wal_status="unreserved"}', 1.0)
    with psycopg.connect(line.database.dsn) as slow:
        slow.execute("INSERT INTO t VALUES (1, 1)")
        line.database.execute(*[_FILLER] * 40)
        wait_until(unreserved, "it is reserved")
        assert_alerts(tmp_path, well, lasting(metrics(daemon)), fire={"LockstepSlotUnreserved"})


@pytest.mark.slow
@pytest.mark.long("servers of its own; the rules' series are in test_metrics_files")
def test_a_promotion_fires_an_alert(new_pair: NewPair, tmp_path: Path) -> None:
    pair, line = new_pair(17, _TABLE)
    pair.set(synchronized_standby_slots=STANDBY_SLOT)
    daemon = line.start().wait_ready()
    wait_until(lambda: daemon.metric("lockstep_timeline") == 1, "not looked at")
    well = lasting(metrics(daemon))
    wait_until(lambda: pair.ask(_SYNCED, standby=True), "the slot is not synced", 120)
    pair.promote()
    wait_until(lambda: daemon.metric("lockstep_timeline") == 2, "it is not followed", 120)
    assert_alerts(tmp_path, well, lasting(metrics(daemon)), fire={"LockstepPromotion"})
