"""A supervisor may stop a command at any moment of its start: it exits, not by the signal."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

# The grace period of supervisors, on a busy machine.
_GRACE_SECONDS = 60.0
_STEPS = [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    return pipeline("CREATE TABLE t (id int PRIMARY KEY)")


def started(*words: str) -> subprocess.Popen[bytes]:
    """Start a command; return once it catches SIGTERM: before that, the interpreter starts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cdc.cli.main", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    status = Path(f"/proc/{process.pid}/status")

    def caught() -> bool:
        lines = status.read_text("ascii").splitlines()
        mask = next((each.split()[1] for each in lines if each.startswith("SigCgt:")), "0")
        return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)

    wait_until(caught, "it takes no SIGTERM", pause=0.001)
    return process


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=_GRACE_SECONDS)
    return process.returncode, out.decode(errors="replace")


@pytest.mark.long("the other commands and signals", sample=["words0-15"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("words", [["run"], ["tail"]])
def test_a_start_that_is_stopped_at_any_moment_ends_with_0(
    words: list[str], number: signal.Signals, line: PipelineUnderTest
) -> None:
    for seconds in _STEPS:
        process = started(*words, "-c", str(line.config_file))
        time.sleep(seconds)
        process.send_signal(number)
        code, out = ended(process)
        assert code == 0, f"after {seconds} s: {code}: {out[-2_000:]}"
        assert "Traceback" not in out


@pytest.fixture
def silent() -> Iterator[int]:
    """Return the port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield int(server.getsockname()[1])


def test_a_start_that_waits_for_a_silent_server_ends_in_time(
    silent: int, line: PipelineUnderTest
) -> None:
    dsn = f"host=127.0.0.1 port={silent} dbname=x user=x"
    path = line.write("silent.yaml", source__dsn=dsn)
    process = started("run", "-c", str(path), "--log-format", "json")
    time.sleep(3.0)
    began = time.monotonic()
    process.terminate()
    code, _ = ended(process)
    assert code == 0
    assert time.monotonic() - began < _GRACE_SECONDS
