"""An incremental snapshot that meets errors retries later each time, and not for ever."""

from __future__ import annotations

import time

from cdc.snapshot.incremental.commands import Command, Of
from cdc.snapshot.incremental.job import MOST_ERRORS, Job


def test_errors_in_a_row_are_counted_spaced_and_bounded() -> None:
    of = Of("public", "t")
    job = Job.begun("p", "a1", Command(do="start", id="a1", tables=(of,)), of)
    pauses = []
    for number in range(1, MOST_ERRORS + 1):
        began = time.monotonic()
        goes_on = job.erred("no memory")
        pauses.append(round(job.not_before - began, 1))
        assert goes_on is (number < MOST_ERRORS)
        assert (job.record.errors, job.record.why) == (number, "no memory")
        assert not job.runnable
    assert job.record.failing_since_us is not None
    assert pauses == sorted(pauses)
    assert pauses[0] == 1
    assert pauses[-1] == 30
