"""Processes that outlive their starter, identified by pid and start time.

A pid alone is no identity: after a reboot or an unclean stop it may belong to another program. So a
process is recorded as (pid, boot and start tick), read from /proc, and a signal is sent only to the
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
_KILL_SECONDS: Final = 10.0

# Children of this interpreter: they must be reaped, and a Popen object warns when it is collected
# while its process runs. Those started by an earlier interpreter belong to init.
_children: dict[int, subprocess.Popen[bytes]] = {}


def _start_tick(pid: int) -> str | None:
    """Return when the process started, or None if there is none (a zombie is none).

    The first thread of a killed process is a zombie while others are still closing its files and
    ports: until they have ended, the process counts as alive.
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
    """One process, identified also across reboots of the machine."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        tick = _start_tick(pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return None if tick is None else cls(pid, f"{boot}:{tick}")

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
        """Return whether the process has ended within the timeout."""
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
        """Return the resident memory of the process tree; shared pages count for each process."""
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
    # A process that ended at once has no identity; this one counts as not alive.
    return ProcessId.of(child.pid) or ProcessId(child.pid, "ended")


def kill_session(leader: int) -> None:
    """Kill all processes of a session, also when its leader has ended before them."""
    deadline = time.monotonic() + _KILL_SECONDS
    while members := _session(leader):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def _session(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # A zombie stays in its session until its parent has waited for it.
            if os.getsid(pid) == leader and ProcessId.of(pid) is not None:
                found.append(pid)
    return found
