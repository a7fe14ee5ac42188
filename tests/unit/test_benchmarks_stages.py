"""The stages of a latency come from the trace; causes count for as long as they overlap it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import latency_stages
from benchmarks.arrivals import Journey
from benchmarks.latency_stages import STAGES, ThreadSample

# Two batches: seq 1 to 3, then 4, which waited for the first to be acknowledged at 1,500.
_TRACE: dict[str, Any] = {
    "received": [[3, 1_100, 1_200], [4, 1_300, 1_350]],
    "batches": [
        {
            "seq": 3,
            "events": 3,
            "partitions": 2,
            "frontier": True,
            "moments_us": [1_100, 1_250, 1_500, 1_500, 1_600, 1_700],
        },
        {
            "seq": 4,
            "events": 1,
            "partitions": 1,
            "frontier": False,
            "moments_us": [1_300, 1_550, 1_800, 1_900, 2_000, 2_050],
        },
    ],
    "spans": [["garbage collection", 1_900, 2_050], ["log watch", 500, 1_010]],
    "requests_ms": {"EndTxn": [0.5, 0.7]},
}
_JOURNEYS = [Journey(2, 1_000, 1_650), Journey(4, 1_010, 2_100)]


def test_each_stage_ends_where_the_next_begins() -> None:
    first, second = latency_stages.staged(_JOURNEYS, _TRACE)
    assert first.stages_us == (100, 100, 0, 50, 250, 0, 100, 50)
    assert second.stages_us == (290, 50, 150, 50, 250, 100, 100, 100)
    assert [sum(each.stages_us) for each in (first, second)] == [650, 1_090]


def test_the_table_shows_the_stage_in_which_slow_changes_wait() -> None:
    journeys = [Journey(2, 1_000, 1_650)] * 99 + [Journey(4, 1_010, 2_100)]
    table = latency_stages.table(latency_stages.staged(journeys, _TRACE))
    assert list(table) == list(STAGES)
    assert table["received"]["slow_mean_ms"] == 0.29
    assert table["batch before"]["of_what_slow_take_more"] == pytest.approx(150 / 440, abs=0.001)
    assert sum(each["of_what_slow_take_more"] for each in table.values()) == pytest.approx(1, 0.01)


def test_a_cause_counts_for_as_long_as_it_overlaps_the_change() -> None:
    waits = [ThreadSample(0, 1_000, {"broker": 9.0}, {"broker": 9.0})]
    waits.append(ThreadSample(1_000, 3_000, {"broker": 1.0}, {"broker": 2.0}))
    changes = latency_stages.staged(_JOURNEYS, _TRACE)
    causes = latency_stages.causes(changes, _TRACE, waits)
    assert causes["ms of garbage collection"] == {"all": 0.075, "slow": 0.15}
    assert causes["ms of log watch"] == {"all": 0.005, "slow": 0.0}
    assert causes["events of its batch"] == {"all": 2, "slow": 1}
    # A wait is spread evenly over its window: 2 ms in 2 ms, of which the slow one has 1.09.
    assert causes["ms of broker waiting for a core"]["slow"] == pytest.approx(1.09)


def test_windows_lie_between_two_lines_of_the_scheduling_log() -> None:
    lines = [{"at_us": 10, "broker": [0, 0]}, {"at_us": 30, "broker": [2.5, 1.5]}]
    assert latency_stages.windows(lines) == [ThreadSample(10, 30, {"broker": 2.5}, {"broker": 1.5})]


def test_round_trips_are_counted_by_batch() -> None:
    assert latency_stages.requests(_TRACE)["EndTxn"] == {
        "a_batch": 1.0,
        "p50_ms": 0.7,
        "p99_ms": 0.7,
        "max_ms": 0.7,
    }
