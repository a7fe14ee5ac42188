"""The whole path on containers: the images that everybody pulls, the commands that users type."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Witness

pytestmark = [pytest.mark.containers, pytest.mark.slow]


def _cdc(config_file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "cdc.cli.main",
            arguments[0],
            "-c",
            str(config_file),
            *arguments[1:],
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def test_set_up_run_killed_and_run_again_the_log_equals_the_database(
    container_pipeline: NewPipeline,
) -> None:
    line = container_pipeline(*TABLES, batch={"max_events": 200, "max_wait_ms": 50})
    again = _cdc(line.config_file, "setup")
    assert again.returncode == 0, again.stderr
    witness = Witness(line)
    daemon = line.start("after_commit:5")
    with Load(line.database.dsn, seed=1) as load:
        assert daemon.wait_exit() == -signal.SIGKILL
        daemon = line.start().wait_ready()
        seen = load.commits
        wait_until(lambda: load.commits > seen + 100, "no load")
    assert witness.check().events > 100
    assert daemon.term() == 0
