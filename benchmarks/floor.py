"""The floor and the limit of a drain: the same WAL, read and discarded.

The floor is `pg_recvlogical` to /dev/null, which anyone can run. The embedded Postgres has no
client programs, so it is taken from PATH or from where Debian installs it; where there is none, our
own eager reader replaces it, and the result shows that. The limit is our own lazy reader: what the
walsender can send when it is not woken for every row.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import raw_reader
from benchmarks.failure import BenchmarkError

if TYPE_CHECKING:
    from benchmarks.backlog import Backlog

# Milliseconds. Long enough that the socket's window closes: only then are the walsender's rows sent
# in large segments instead of one by one (4 instead of 8 CPU-us per row).
NAP_MS = 20
_TIMEOUT_SECONDS = 900.0
_DEBIAN = Path("/usr/lib/postgresql")


@dataclass(frozen=True)
class Read:
    """One drain whose data is discarded."""

    seconds: float
    rows_per_second: float


def pg_recvlogical() -> str | None:
    """Return the newest pg_recvlogical that is installed."""
    found = sorted(
        _DEBIAN.glob("*/bin/pg_recvlogical"),
        key=lambda path: int(re.sub(r"\D", "", path.parts[-3]) or 0),
    )
    return str(found[-1]) if found else shutil.which("pg_recvlogical")


def describe(program: str | None) -> str:
    """Return which program measures the floor, for the result."""
    if program is None:
        return "own eager reader (no pg_recvlogical on this machine)"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def read_floor(
    program: str | None, port: int, slot: str, backlog: Backlog, *, in_progress: bool = False
) -> Read:
    """Read the backlog eagerly; `in_progress`: with open transactions streamed."""
    if program is None:
        return _read_raw(port, slot, backlog, nap_ms=0, in_progress=in_progress)
    command = [program, "--host=127.0.0.1", f"--port={port}", "--username=postgres"]
    command += ["--dbname=bench", f"--slot={slot}", "--start", "--no-loop", "--file=/dev/null"]
    command += [f"--endpos={backlog.end_lsn}", "--fsync-interval=0", "--status-interval=10"]
    options = raw_reader.options(in_progress=in_progress)
    command += [f"--option={name}={value}" for name, value in options.items()]
    started = time.perf_counter()
    _run(command, "pg_recvlogical")
    seconds = time.perf_counter() - started
    return Read(seconds=seconds, rows_per_second=backlog.rows / seconds)


def read_limit(port: int, slot: str, backlog: Backlog, *, in_progress: bool = False) -> Read:
    """Read the backlog so lazily that the walsender is not woken for every row."""
    return _read_raw(port, slot, backlog, nap_ms=NAP_MS, in_progress=in_progress)


def _read_raw(port: int, slot: str, backlog: Backlog, *, nap_ms: int, in_progress: bool) -> Read:
    command = [sys.executable, "-m", "benchmarks.raw_reader"]
    command += [str(port), slot, backlog.end_lsn, str(nap_ms), "on" if in_progress else "off"]
    seconds = float(json.loads(_run(command, "the raw reader"))["seconds"])
    return Read(seconds=seconds, rows_per_second=backlog.rows / seconds)


def _run(command: list[str], name: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(
            f"{name} is not done after {_TIMEOUT_SECONDS:.0f} s", hint="try fewer --rows"
        ) from error
    if done.returncode != 0:
        raise BenchmarkError(
            f"{name} ended with exit code {done.returncode}",
            hint=f"it printed: {done.stderr.strip()}",
        )
    return done.stdout
