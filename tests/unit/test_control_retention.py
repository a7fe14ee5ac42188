"""How long the slot lasts, and what holds it back: reported before it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.events import LSN
from cdc.operate.findings import Severity
from cdc.operate.metrics import Metrics
from cdc.operate.readable import duration
from cdc.operate.retention import (
    Gauge,
    Retention,
    judge_holders,
    judge_idle,
    judge_slot,
    judge_standbys,
)
from cdc.source.server import OpenTransaction
from cdc.source.slots import StandbySlot
from tests.unit.test_control_doctor import SERVER, SLOT

MB = 1 << 20


def slot(**changes: Any) -> Any:  # noqa: ANN401 - fields of a tuple
    return SLOT._replace(active_pid=7, **changes)


def gauge(*looks: tuple[float, int, int], safe_bytes: int | None = 1024 * MB) -> Retention:
    """Return the result of looks at (seconds, WAL end, restart LSN)."""
    made, seen = Gauge(), None
    for at, wal_lsn, restart_lsn in looks:
        seen = made.observe(at, wal_lsn, slot(restart_lsn=restart_lsn, safe_wal_bytes=safe_bytes))
    assert seen is not None
    return seen


def test_one_observation_gives_no_forecast() -> None:
    assert gauge((0, 100 * MB, 1)).lost_in_seconds is None


def test_the_forecast_is_the_room_left_over_the_rate() -> None:
    seen = gauge((0, 0, 1), (10, 20 * MB, 1))
    assert seen.wal_bytes_per_second == 2 * MB
    assert seen.lost_in_seconds == pytest.approx(512)


def test_the_rate_is_smoothed_so_that_one_burst_does_not_alarm() -> None:
    calm = [(5.0 * n, MB * n, 1) for n in range(20)]
    burst = gauge(*calm, (100.0, 120 * MB, 1)).wal_bytes_per_second
    assert burst is not None
    assert 0.2 * MB < burst < 4 * MB  # the burst alone is 20 MB per second


def test_a_slot_without_a_limit_is_never_lost() -> None:
    assert gauge((0, 0, 1), (10, 20 * MB, 1), safe_bytes=None).lost_in_seconds is None


def test_without_wal_being_written_nothing_is_lost_or_stalled() -> None:
    seen = gauge((0, 5, 1), (100, 5, 1), (200, 5, 1))
    assert seen.lost_in_seconds is None
    assert seen.stalled_seconds == 0


def test_a_restart_lsn_that_moves_is_no_stalled_slot() -> None:
    assert gauge((0, 0, 1), (50, MB, 1), (100, 2 * MB, 2)).stalled_seconds == 0
    assert gauge((0, 0, 1), (50, MB, 1), (100, 2 * MB, 1)).stalled_seconds == 100


@pytest.mark.parametrize(
    ("retention", "severity", "words"),
    [
        (Retention(slot(wal_status="lost")), "error", "is lost: the WAL it needs was removed"),
        (
            Retention(slot(invalidation_reason="idle_timeout")),
            "error",
            "is lost: no daemon read from it",
        ),
        (Retention(slot(wal_status="unreserved")), "error", "about to be lost"),
        (
            Retention(slot(safe_wal_bytes=600 * MB), 1.0 * MB, 90),
            "warning",
            "after 600.0 MiB more of WAL, in about 10 min",
        ),
        # No process reads from it: that alone stalls it.
        (
            Retention(slot(safe_wal_bytes=600 * MB)._replace(active_pid=None), 1.0 * MB),
            "warning",
            "in about 10 min",
        ),
        # The rate is unknown: little room is too little.
        (Retention(SLOT._replace(safe_wal_bytes=600 * MB)), "warning", "after 600.0 MiB more"),
    ],
)
def test_a_slot_in_danger_is_reported(retention: Retention, severity: str, words: str) -> None:
    (finding,) = judge_slot(retention)
    assert finding.severity is Severity(severity)
    assert words in finding.what
    assert finding.fix


@pytest.mark.parametrize(
    "retention",
    [
        Retention(slot()),
        Retention(slot(safe_wal_bytes=MB)),  # the slot advances, at the first look
        Retention(slot(safe_wal_bytes=600 * MB), 1.0 * MB, 10),  # the slot advances
        Retention(slot(safe_wal_bytes=600 * MB), 1024.0, 90),  # lost in a week
        Retention(slot(safe_wal_bytes=5_000 * MB)),
        Retention(slot(wal_status="extended"), 1.0 * MB, 900),
    ],
)
def test_a_slot_that_is_safe_is_not_reported(retention: Retention) -> None:
    assert list(judge_slot(retention)) == []


def test_a_transaction_that_is_open_for_long_is_named() -> None:
    holders = [
        OpenTransaction(7, None, 100.0),
        OpenTransaction(8, None, 7_300.0),
        OpenTransaction(None, "it's", 600.0),
    ]
    session, prepared = judge_holders(holders)
    assert session.what == "pid 8 writes in a transaction of 2 h: it keeps WAL"
    assert session.fix.endswith("SELECT pg_terminate_backend(8);")
    assert prepared.what.startswith("the prepared transaction 'it''s' is 10 min old")
    assert prepared.fix.startswith("COMMIT PREPARED 'it''s';")


def test_a_slot_that_times_out_shows_when() -> None:
    server = SERVER._replace(settings={"idle_replication_slot_timeout": "600"})
    (finding,) = judge_idle(server, SLOT._replace(inactive_seconds=100.0))
    assert "is invalidated in 8 min" in finding.what
    assert list(judge_idle(server, slot(inactive_seconds=None))) == []
    assert list(judge_idle(SERVER, SLOT._replace(inactive_seconds=100.0))) == []


def test_a_standby_that_holds_the_stream_up_is_named() -> None:
    named = [
        StandbySlot("good", exists=True, active=True, named=True),
        StandbySlot("other", exists=True, active=False, named=False),
        StandbySlot("away", exists=True, active=False, named=True),
        StandbySlot("typo", exists=False, active=False, named=True),
    ]
    away, typo = judge_standbys(named)
    assert "names away, which is not connected" in away.what
    assert "names typo, which has no such slot" in typo.what


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "5 s"), (119, "119 s"), (600, "10 min"), (7_300, "2 h"), (4e5, "5 days")],
)
def test_durations_are_spelt_in_one_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_source_check_shows_in_the_metrics_and_the_unknown_does_not() -> None:
    metrics = Metrics()
    assert b"lockstep_slot_retained_bytes" not in metrics.text()
    holders = [OpenTransaction(7, None, 12.0), OpenTransaction(None, "x", 34.0)]
    metrics.source_checked(
        2, Retention(slot(retained_bytes=600, restart_lsn=LSN(4)), 5.0, 6.0), holders
    )
    text = metrics.text().decode()
    for line in (
        "lockstep_timeline 2.0",
        "lockstep_slot_retained_bytes 600.0",
        "lockstep_wal_bytes_per_second 5.0",
        "lockstep_slot_stalled_seconds 6.0",
        "lockstep_oldest_transaction_seconds 12.0",
        "lockstep_oldest_prepared_seconds 34.0",
        'lockstep_slot_wal_status{wal_status="reserved"} 1.0',
    ):
        assert line in text
    assert "lockstep_slot_lost_in_seconds" not in text.replace("# HELP", "")
    assert "lockstep_slot_safe_bytes" not in text
