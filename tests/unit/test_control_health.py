"""Health never reports that all is well while the log is stalled."""

from __future__ import annotations

import pytest

from cdc.operate.findings import warning
from cdc.operate.health import BATCH_SECONDS, LIVE_SECONDS, STALL_SECONDS, Health, HealthState


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(now=clock)


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (HealthState.STARTING, False),
        (HealthState.STANDBY, True),
        (HealthState.STREAMING, True),
        (HealthState.RECONNECTING, False),
        (HealthState.HALTED, False),
    ],
)
def test_ready_is_streaming_or_on_standby(
    health: Health, state: HealthState, *, ready: bool
) -> None:
    health.to(state, "because")
    report = health.report()
    assert (report.ready, report.live, report.state, report.reason) == (
        ready,
        True,
        state,
        "because",
    )


def test_a_loop_that_does_not_turn_is_dead_and_not_ready(health: Health, clock: Clock) -> None:
    health.to(HealthState.STREAMING)
    clock.seconds += LIVE_SECONDS
    assert health.report().live
    clock.seconds += 1
    report = health.report()
    assert not report.live
    assert not report.ready
    assert report.reason == "the main loop has not turned for 31 s"
    health.beat()
    assert health.report().ready


def passed(health: Health, clock: Clock, *, wal_end: int, published: int, seq: int) -> None:
    """Advance past the stall's time, while the loop runs."""
    for _ in range(4):
        clock.seconds += STALL_SECONDS / 3
        health.beat()
        health.progress(wal_end, published, seq)


def test_a_log_that_stalls_while_wal_grows_is_not_ready(health: Health, clock: Clock) -> None:
    health.to(HealthState.STREAMING)
    health.progress(100, 100, 7)
    passed(health, clock, wal_end=200, published=100, seq=7)
    report = health.report()
    assert report.live
    assert not report.ready
    assert report.lag_bytes == 100
    assert "nothing was published for" in report.reason
    health.progress(300, 150, 8)
    assert health.report().ready


def test_an_idle_database_is_not_a_stall(health: Health, clock: Clock) -> None:
    health.to(HealthState.STREAMING)
    passed(health, clock, wal_end=100, published=100, seq=7)
    assert health.report().ready


def test_a_huge_transaction_is_not_a_stall_while_its_changes_flow(
    health: Health, clock: Clock
) -> None:
    health.to(HealthState.STREAMING)
    for seq in range(1, 10):
        clock.seconds += STALL_SECONDS / 2
        health.beat()
        health.progress(1_000_000, 100, seq * 50_000)
    assert health.report().ready


def test_a_stall_before_a_reconnect_does_not_count_for_the_next_session(
    health: Health, clock: Clock
) -> None:
    health.to(HealthState.STREAMING)
    passed(health, clock, wal_end=200, published=100, seq=7)
    health.to(HealthState.RECONNECTING, "cut")
    health.to(HealthState.STREAMING, "again")
    assert health.report().ready


def test_the_body_is_plain_json_values(health: Health, clock: Clock) -> None:
    health.to(HealthState.STREAMING, "ok")
    health.progress(0x16B3748 + 5, 0x16B3748, 3)
    clock.seconds += 1.23456
    assert health.report().body() == {
        "live": True,
        "ready": True,
        "state": "streaming",
        "reason": "ok",
        "since_seconds": 1.235,
        "beat_age_seconds": 1.235,
        "lag_bytes": 5,
        "published_lsn": "0/16B3748",
        "wal_end_lsn": "0/16B374D",
        "seq": 3,
        "snapshot": None,
        "warnings": (),
        "remedies": (),
        "failures": 0,
        "failing_seconds": None,
        "error": "",
        "incidents": (),
    }


def test_warnings_are_reported_and_do_not_make_it_unready(health: Health) -> None:
    health.to(HealthState.STREAMING, "ok")
    health.warn([warning("slot", "the slot is lost in 5 min", "cdc run")])
    assert health.report().warnings == ("the slot is lost in 5 min",)
    assert health.report().remedies == ("cdc run",)
    assert health.report().ready
    health.warn([])
    assert health.report().warnings == ()


def test_a_batch_that_kafka_refuses_is_reported_before_a_stall(
    health: Health, clock: Clock
) -> None:
    health.to(HealthState.STREAMING)
    health.progress(200, 100, 7, batch_seconds=BATCH_SECONDS - 1)
    assert health.report().ready
    clock.seconds += 2
    health.beat()
    report = health.report()
    assert not report.ready
    assert report.reason == "Kafka has not taken a batch for 16 s"
    health.progress(200, 200, 8)
    assert health.report().ready


def test_the_newest_sessions_that_ended_are_kept_and_no_more(health: Health) -> None:
    for number in range(80):
        health.failed(f"error {number}", "fencing" if number == 79 else "reconnect")
    kept = health.report().incidents
    assert [each["what"] for each in kept] == [f"error {number}" for number in range(30, 80)]
    assert [each["kind"] for each in kept][-2:] == ["reconnect", "fencing"]
