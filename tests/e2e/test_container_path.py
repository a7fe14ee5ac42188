"""The full path on containers: the public images, the commands that users type."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.log.follower_reports import Readings
from cdc.playground.demo.database import wal_end
from cdc.playground.demo.stores import prove_followers
from tests.fixtures.commands import CommandSession
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.spark import need_java
from tests.fixtures.witness import Witness

pytestmark = [
    pytest.mark.long("the embedded path is in the first tier, and images are in test_containers"),
    pytest.mark.containers,
    pytest.mark.slow,
]


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


@pytest.mark.timeout(900)
def test_three_stores_follow_and_equal_the_database_killed_or_not(
    container_pipeline: NewPipeline,
    redis_container: str,
    opensearch_container: str,
    tmp_path: Path,
) -> None:
    """From Postgres into Delta Lake, Redis and OpenSearch; the followers killed on the way."""
    need_java()
    # The tables that have keys: stores of keys and values follow no others.
    keyed = ["public.users", "public.pairs", "public.full_rows", "public.named"]
    line = container_pipeline(
        *TABLES,
        batch={"max_wait_ms": 50},
        followers={
            "mirror": {"delta": {"path": str(tmp_path / "mirrors")}},
            "cache": {"tables": keyed, "redis": {"url": redis_container}},
            "search": {"tables": keyed, "opensearch": {"url": opensearch_container}},
        },
    )
    line.start().wait_ready()
    copies = []
    try:
        with Load(line.database.dsn, seed=2, steps_per_second=200) as load:
            for number in range(2):
                folder = tmp_path / f"follow-{number}"
                folder.mkdir()
                copies.append(
                    CommandSession(line.config_file, "follow", log=folder / "log", scratch=folder)
                )
                seen = load.commits
                wait_until(lambda: load.commits > seen + 200, "no load")  # noqa: B023 - at once
                if number == 0:
                    reports = Readings(line.config)
                    wait_until(lambda: len(reports.refresh()) == 3, "nobody follows", 300)  # noqa: B023 - at once
                    reports.close()
                    copies[0].kill()
        proof = prove_followers(line.config, wal_end(line.config), wait_seconds=300)
        assert proof.findings == (), copies[-1].log[-4_000:]
        assert proof.rows.keys() == {"mirror", "cache", "search"}
        assert copies[-1].term() == 0
    finally:
        for copy in copies:
            copy.kill()
