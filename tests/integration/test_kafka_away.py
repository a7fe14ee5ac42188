"""A Kafka that does not answer: a command reports it in seconds, the daemon in a few lines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cdc.errors import Exit
from cdc.log import broker_log
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.servers import Database


@pytest.fixture
def mute() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def command(path: Path, *words: str) -> tuple[int, list[tuple[float, str]]]:
    """Run `cdc`; return its exit code and its stderr lines, each with its second."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "cdc.cli.main", *words, "-c", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [(time.monotonic() - began, line.rstrip()) for line in process.stdout]
    return process.returncode, lines


@pytest.mark.long("setup, which waits as status does", sample=["status", "tail"])
@pytest.mark.parametrize("words", [["status"], ["setup"], ["tail"]], ids=lambda words: words[0])
def test_a_command_says_what_it_waits_for_and_which_broker_does_not_answer(
    words: list[str], mute: str, database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    path = tmp_path / "lockstep.yaml"
    path.write_text(
        f"pipeline: away\nsource: {{dsn: '{database.dsn}'}}\n"
        f"log: {{bootstrap_servers: '{mute}'}}\n",
        encoding="utf-8",
    )
    code, lines = command(path, *words)
    assert code == Exit.UNAVAILABLE
    output = [line for _, line in lines]
    assert f"waiting for Kafka at {mute} …" in output
    assert any(f"no Kafka broker answers at {mute}" in line for line in output)
    waited = next(at for at, line in lines if line.startswith("waiting"))
    reported = next(at for at, line in lines if "no Kafka broker answers" in line)
    assert waited < reported


def test_a_refused_connection_is_named_with_its_reason(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "lockstep.yaml"
    path.write_text(
        f"pipeline: away\nsource: {{dsn: '{database.dsn}'}}\n"
        "log: {bootstrap_servers: '127.0.0.1:1'}\n",
        encoding="utf-8",
    )
    code, lines = command(path, "status")
    assert code == Exit.UNAVAILABLE
    assert any("127.0.0.1:1: Connection refused" in line for _, line in lines), lines


@pytest.mark.long("half a minute; commands that wait for a broker are in the first tier")
def test_the_daemon_logs_a_broker_that_is_away_once(pipeline: NewPipeline) -> None:
    line = pipeline("CREATE TABLE users (id int PRIMARY KEY)")
    file = line.write("away.yaml", log__bootstrap_servers="127.0.0.1:1")
    daemon = line.start(config_file=file)

    wait_until(lambda: "Connection refused" in daemon.log, "nothing is reported")
    wait_until(lambda: daemon.log.count("starting over") >= 2, "no second session", seconds=120)
    events = [json.loads(each) for each in daemon.log.splitlines() if each.startswith("{")]
    ours = [each for each in events if each["logger"] == "cdc.log.librdkafka"]
    output = [each for each in ours if "Connection refused" in each["event"]]
    took = datetime.fromisoformat(events[-1]["ts"]) - datetime.fromisoformat(events[0]["ts"])
    # What was not repeated for so long, as on a busy machine, is logged again.
    assert len(output) <= 2 * (1 + took // timedelta(seconds=broker_log.QUIET_SECONDS)), output
