"""The comparison of two commits that ran in turns."""

from __future__ import annotations

from typing import Any

from benchmarks.against import compared


def run(value: float, p99: float | None, commit: str) -> dict[str, Any]:
    return {
        "value": value,
        "p99_ms": p99,
        "unit": "rows/s",
        "commit": commit,
        "machine": {},
        "versions": {},
        "at": "now",
    }


def test_medians_are_compared_and_every_run_is_kept() -> None:
    here = [run(value, None, "new") for value in (90, 110, 300)]
    there = [run(value, 4.0, "old") for value in (100, 10, 200)]
    reported = compared("drain-inserts", here, there)
    assert reported["ratios"] == {"value": 1.1}, "what only one side has is left out"
    assert reported["runs"] == {"value": {"here": [90, 110, 300], "there": [100, 10, 200]}}
    assert reported["name"] == "against-drain-inserts"
    assert (reported["commit"], reported["against"]) == ("new", "old")
