"""How long a program's threads were ready to run but had no core, sampled over time.

A separate program: `python -m benchmarks.scheduling FILE NAME=PID...` appends a line of JSON to
FILE every tenth of a second until it is stopped: the time, and for each name the CPU time and the
waiting time of all the process' threads since the previous line, in milliseconds; with `NAME=PID+`
also of its children. The times are the kernel's (schedstat, proc(5)); where the kernel records
none, waits are 0.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

_EVERY_SECONDS = 0.1
_PROC = Path("/proc")
_NS_PER_MS = 1e6


def main(file: str, *named: str) -> None:
    pids = dict(each.split("=") for each in named)
    known: dict[str, tuple[int, int]] = {}
    with Path(file).open("a", encoding="utf-8") as out:
        while True:
            line: dict[str, object] = {"at_us": time.time_ns() // 1000}
            for name, pid in pids.items():
                line[name] = [round(ns / _NS_PER_MS, 3) for ns in _since(pid, known)]
            out.write(json.dumps(line) + "\n")
            out.flush()
            time.sleep(_EVERY_SECONDS)


def _since(pid: str, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Return how long the threads ran and waited since the last sample, in nanoseconds."""
    ran_ns = waited_ns = 0
    for task in _tasks(pid):
        with suppress(OSError):  # it has ended
            ran, waited, _ = (int(each) for each in (task / "schedstat").read_text().split())
            before = known.get(str(task), (ran, waited))
            known[str(task)] = ran, waited
            ran_ns += ran - before[0]
            waited_ns += waited - before[1]
    return ran_ns, waited_ns


def _tasks(pid: str) -> list[Path]:
    number = pid.removesuffix("+")
    own = _PROC / number / "task"
    found: list[Path] = []
    with suppress(OSError):
        found = list(own.iterdir())
        if number != pid:
            for child in (own / number / "children").read_text().split():
                found += list((_PROC / child / "task").iterdir())
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
