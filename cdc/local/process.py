"""Processes that outlive their starter, known by pid and start time.

A pid alone is no identity: after a reboot or an unclean stop it may belong to a stranger. So a
process is remembered as (pid, boot and start tick), read from /proc, and a signal goes only to the
process that still has both. Linux only.

Does not supervise: nothing restarts a server here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

_POLL_SECONDS: Final = 0.02

# Children of this interpreter: they must be reaped, and a Popen that is forgotten while its process
# runs warns. Those started by an earlier interpreter belong to init.
_children: dict[int, subprocess.Popen[bytes]] = {}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _start_tick(pid: int) -> str | None:
    """Return when the process started, or None if there is none (a zombie is none).

    The first thread of a killed process is a zombie while others are still closing its files and
    ports: until they are gone, so is the process not.
    """
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - only their number
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" and threads == 1 else fields[19]


@dataclass(frozen=True)
class ProcessId:
    """One process, for as long as the machine runs and beyond."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        tick = _start_tick(pid)
        return None if tick is None else cls(pid, f"{_boot_id()}:{tick}")

    @property
    def alive(self) -> bool:
        if ProcessId.of(self.pid) == self:
            return True
        if (child := _children.get(self.pid)) is not None and child.poll() is not None:
            del _children[self.pid]
        return False

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether the process is gone within the time."""
        deadline = time.monotonic() + timeout_seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def descendants(self) -> list[ProcessId]:
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in map(ProcessId.of, (each.pid for each in found)) if child]

    def memory_bytes(self) -> int:
        """Return the resident memory of the process and all below it; shared pages count each."""
        total = 0
        for each in (self, *self.descendants()):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += psutil.Process(each.pid).memory_info().rss
        return total


def spawn(argv: list[str], log: Path, cwd: Path, **options: Any) -> ProcessId:  # noqa: ANN401 - Popen's own
    """Start a process in a session of its own, with no stdin, appending to its log."""
    with log.open("ab") as out:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
            **options,
        )
    _children[child.pid] = child
    # A process that died at once has no identity left; a made-up one is simply not alive.
    return ProcessId.of(child.pid) or ProcessId(child.pid, "gone")
