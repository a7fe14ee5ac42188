"""`cdc run` copies with Spark: the job is its child, and is submitted again when it dies."""

from __future__ import annotations

from contextlib import suppress

import psutil

from tests.fixtures.converge import converge
from tests.fixtures.daemon import Daemon, NewPipeline, wait_until

# The start of a Spark session, on a busy machine.
_SECONDS = 180.0


def jobs(daemon: Daemon) -> list[psutil.Process]:
    """Return the jobs that the daemon has submitted and that run."""
    found = []
    for each in psutil.Process(daemon.process.pid).children():
        with suppress(psutil.Error):  # it may just be ending
            if any("snapshot.py" in word for word in each.cmdline()):
                found.append(each)
    return found


def test_a_job_that_is_killed_is_submitted_again(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i",
        snapshot={"mode": "initial", "runner": "spark", "range_bytes": 200_000},
    )
    daemon = line.start()
    wait_until(lambda: jobs(daemon), "no job is submitted", _SECONDS)
    (first,) = jobs(daemon)
    first.kill()
    wait_until(lambda: "copying again" in daemon.log, "no other job", _SECONDS)
    daemon.wait_ready(_SECONDS)
    assert not jobs(daemon)
    converge(line.config)
