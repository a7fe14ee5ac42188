"""CPU time and peak memory of a program and all its descendants, ended ones included.

Sampled, because an ended process reports nothing: what it used after the last sample is missing.
Peaks are the kernel's own. A Spark task is a fork of Spark's Python daemon, so memory that it
shares with its parent counts for both.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks import measure
from benchmarks.progress import say

_PROC = Path("/proc")
_QUIET_CORES: Final = 0.25
_QUIET_SECONDS: Final = 3.0
_QUIET_WITHIN_SECONDS: Final = 120.0


class Family:
    """The descendants of a process, by id."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu: dict[int, float] = {}
        self._peaks: dict[int, tuple[str, float]] = {}

    def look(self) -> None:
        """Sample every living process."""
        for pid in below(self._pid):
            self._cpu[pid] = max(self._cpu.get(pid, 0.0), measure.cpu_seconds(pid))
            peak = measure.peak_rss_mb(pid)
            if peak:
                self._peaks[pid] = (_kind(pid), peak)

    def cores(self, seconds: float) -> float:
        """Return how many cores all of them use on average in the next seconds."""
        self.look()
        used, began = self.cpu_seconds, time.monotonic()
        time.sleep(seconds)
        self.look()
        return (self.cpu_seconds - used) / (time.monotonic() - began)

    def wait_until_quiet(self) -> None:
        """Wait until they have nothing left to do, as a JVM that starts in the background has."""
        deadline = time.monotonic() + _QUIET_WITHIN_SECONDS
        while self.cores(_QUIET_SECONDS) > _QUIET_CORES:
            if time.monotonic() > deadline:
                say(f"still more than {_QUIET_CORES} cores after {_QUIET_WITHIN_SECONDS:.0f} s")
                return

    @property
    def cpu_seconds(self) -> float:
        """The CPU seconds that all of them have used, as of the last sample."""
        return sum(self._cpu.values())

    @property
    def peaks_mb(self) -> dict[str, float]:
        """The peak memory in MB of each kind of process; the program itself is `main`."""
        found: dict[str, float] = {}
        for pid, (kind, peak) in self._peaks.items():
            name = "main" if pid == self._pid else kind
            found[name] = max(found.get(name, 0.0), round(peak, 1))
        return found


def below(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found, asked = [], [pid]
    while asked:
        one = asked.pop()
        found.append(one)
        with suppress(OSError):  # a thread or the process has ended
            for children in _PROC.glob(f"{one}/task/*/children"):
                asked += [int(child) for child in children.read_text().split()]
    return found


def _kind(pid: int) -> str:
    """Return what a process is: `java`, or one of Python's."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended"
    if Path(words[0].decode(errors="replace")).name == "java":
        return "java"
    if b"pyspark.daemon" in words or b"--multiprocessing-fork" in words:
        return "worker"
    return "python"
