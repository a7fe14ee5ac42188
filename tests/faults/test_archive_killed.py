"""The archive's job killed at each step: every record is archived once, and the proof closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from cdc import failpoints
from cdc.runtime import spark as files
from lockstep.jobs.archiving import cuts, proving, running
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.spark import need_java

_JOB_SECONDS = 400


@pytest.mark.commit("each step of the archive")
@pytest.mark.long("in a bucket, too", sample=["folder"])
def test_a_job_killed_at_any_step_archives_every_record_once(
    pipeline: NewPipeline, archive_path: str
) -> None:
    """Also a second job that starts where a first one has just committed."""
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": archive_path, "every_seconds": 0, "optimize_minutes": 1e-6},
    )
    made.start().wait_ready()
    archived = Archived(made)
    for number, failpoint in enumerate(failpoints.ARCHIVE_NAMES):
        many = 9 if failpoint == "archive_joined" else 1  # fewer files are not worth joining
        for each in range(many):
            made.database.execute(
                f"INSERT INTO users SELECT {1000 * number + 100 * each} + g, 'n'"
                " FROM generate_series(1, 50) g",
                f"DELETE FROM users WHERE id % 9 = {number}",
            )
            archived.log_reach()
            if each < many - 1:
                plain(archived)
        command = [sys.executable, str(files.job("archive")), "--config", str(made.config_file)]
        killed = subprocess.run(
            [*command, "--once"],
            env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
            capture_output=True,
            timeout=_JOB_SECONDS,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        subprocess.run([*command, "--once"], timeout=_JOB_SECONDS, check=True, capture_output=True)
        assert archived.stored() == archived.logged(archived.position())
    proof = proving.prove(made.config, running.opened(made.config))
    assert not proof.findings
    assert proof.events == proof.seq == archived.position().applied.seq


@pytest.mark.long("minutes of Spark")
@pytest.mark.slow
def test_a_job_killed_while_executors_are_a_cut_ahead_archives_every_record_once(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    need_java()
    many = cuts.LARGE_EVENTS + 1_000
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0, "max_events": many},
        source={"canary_seconds": 0},
    )
    made.start().wait_ready()
    archived = Archived(made)
    for number in range(4):
        made.database.execute(
            f"INSERT INTO users SELECT {number * many} + g, 'n' FROM generate_series(1, {many}) g"
        )
        archived.log_reach()
    command = [sys.executable, str(files.job("archive")), "--config", str(made.config_file)]
    for failpoint in ("archive_written", "archive_committed:2", ""):
        done = subprocess.run(
            [*command, "--once"],
            env={**os.environ, "LOCKSTEP_FAILPOINT": failpoint},
            capture_output=True,
            timeout=_JOB_SECONDS,
            check=False,
        )
        assert done.returncode == (-signal.SIGKILL if failpoint else 0), done.stderr.decode()
    assert archived.stored() == archived.logged(archived.position())
    proof = proving.prove(made.config, running.opened(made.config))
    assert (proof.findings, proof.events) == ((), proof.seq)


def plain(archived: Archived) -> None:
    """Archive without joining files."""
    with patch.object(ArchiveUpkeep, "tick"):
        archived.reach()
