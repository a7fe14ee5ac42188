"""CPU time and memory of processes, and the machine's other load, from /proc.

A process' CPU time is user plus system time of all its threads, ended ones included, without its
children. Peak memory is the kernel's own high-water mark of the resident set (VmHWM), so no peak
between two samples is missed. Reference: proc(5).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from benchmarks.progress import say

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
# As clock_getcpuclockid(3) does, which Python has for the own process' threads only.
_CPU_CLOCK = 2

# The cores that an idle machine still uses: timers, the page writer, this process' own sampling.
QUIET_CORES = 0.15


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that the process has used so far; 0 if it has ended.

    By its clock: /proc counts in ticks of 10 ms, and a small cut takes two.
    """
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return 0.0


def parse_cpu_seconds(line: str) -> float:
    # The second field is the command in parentheses, which may contain blanks and parentheses.
    fields = line.rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def family_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, its children, and those of them that have ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
        children = (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    ended = sum(int(field) for field in fields[13:15]) / _TICKS_PER_SECOND
    return ended + sum(cpu_seconds(each) for each in (pid, *map(int, children)))


def thread_cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a daemon's loop, of librdkafka's threads, and of all others."""
    seconds = {"loop": 0.0, "librdkafka": 0.0, "workers": 0.0}
    for task in (_PROC / str(pid) / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended between two samples
            line = (task / "stat").read_text()
            is_kafka = line.split("(", 1)[1].startswith("rdk:")
            name = "loop" if task.name == str(pid) else "librdkafka" if is_kafka else "workers"
            seconds[name] += parse_cpu_seconds(line)
    return seconds


def peak_rss_mb(pid: int) -> float:
    """Return the most memory that the process has held resident, in MB (10^6 bytes)."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return parse_peak_rss_mb(status)


def parse_peak_rss_mb(status: str) -> float:
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0  # a zombie has no memory left


def folder_mb(folder: Path, *, without: str) -> float:
    """Return the size of the files below the folder, in MB; a file named `without` is left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name != without:
                with suppress(FileNotFoundError):  # it has ended between two samples
                    total += (Path(parent) / name).stat().st_size
    return total / 1e6


def machine_busy_seconds() -> float:
    """Return the CPU seconds of everything on the machine, and those stolen by its host."""
    with (_PROC / "stat").open() as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_SECOND


class Foreign:
    """How many cores other processes used during a measurement: a figure's uncertainty."""

    def __init__(self, own: Callable[[], float]) -> None:
        """Start measuring; `own` returns the CPU seconds of all that belongs to the run."""
        self._own = own
        self._started = (time.monotonic(), machine_busy_seconds(), own())

    def cores(self) -> float:
        started, busy, own = self._started
        elapsed = time.monotonic() - started
        foreign = (machine_busy_seconds() - busy) - (self._own() - own)
        return round(max(0.0, foreign) / elapsed, 2)


def wait_until_quiet(seconds_max: float) -> float:
    """Wait until the machine is quiet, at most `seconds_max`; return the cores busy at the end.

    Work left by the previous run (the broker deleting, pages being written) must not count for the
    next. On a machine that others use it gives up, and the measurement starts anyway.
    """
    deadline = time.monotonic() + seconds_max
    while True:
        busy, started = machine_busy_seconds(), time.monotonic()
        time.sleep(1.0)
        cores = (machine_busy_seconds() - busy) / (time.monotonic() - started)
        if cores <= QUIET_CORES or time.monotonic() >= deadline:
            break
    if cores > QUIET_CORES:
        say(f"the machine is not quiet: {cores:.2f} cores are busy with something else")
    return round(cores, 2)


def total_cpu_seconds(pids: Iterable[int]) -> float:
    return sum(cpu_seconds(pid) for pid in pids)
