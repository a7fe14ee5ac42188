"""An incremental snapshot that meets errors retries later each time, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cdc.snapshot.incremental.commands import Command
from cdc.snapshot.incremental.job import MAX_ERRORS, Job
from cdc.snapshot.incremental.records import TableName


def test_errors_in_a_row_are_counted_spaced_and_bounded() -> None:
    table = TableName("public", "t")
    clock: Any = SimpleNamespace(monotonic=lambda: 100.0, time_ns=lambda: 1_000)
    job = Job.start("p", "a1", Command(do="start", id="a1", tables=(table,)), table, clock=clock)
    pauses = []
    for number in range(1, MAX_ERRORS + 1):
        goes_on = job.count_error("no memory")
        pauses.append(job.not_before - clock.monotonic())
        assert goes_on is (number < MAX_ERRORS)
        assert (job.record.errors, job.record.why) == (number, "no memory")
        assert not job.runnable
    assert job.record.failing_since_us is not None
    assert pauses == sorted(pauses)
    assert pauses[0] == 1
    assert pauses[-1] == 30
