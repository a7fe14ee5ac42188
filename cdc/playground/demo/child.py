"""Run a command as a child that is started again whenever it ends, as a supervisor would.

It restarts a child after every end except with exit codes that need a person. Each child leads a
session of its own, and what is left in the session after its leader has ended is killed before
another is started: a job's Java and its workers outlive a killed leader for a while.

A watcher process kills all children when this process has ended, in any way: `python -m
cdc.playground.demo.child HOME` reads a pipe that only this process writes to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from cdc.errors import CDCError, Exit
from cdc.playground.servers.home import Home, ServerState
from cdc.playground.servers.process import ProcessId

# What the demo runs in addition to its servers.
DAEMON: Final = "daemon"
FOLLOWERS: Final = "followers"
_NAMES: Final = (DAEMON, FOLLOWERS)

_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 3.0
_STOP_SECONDS: Final = 20.0
_GONE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02
# Exit codes after which a restart would only fail again.
_FINAL: Final = {Exit.USAGE, Exit.BUG, Exit.PERMISSION, Exit.CONFIG}


class ChildFailedError(CDCError):
    """A child ended in a way that a restart does not fix."""

    exit_code = Exit.FAILED


class Child:
    """One command of ours; call `supervise` often."""

    def __init__(self, home: Home, name: str, *arguments: str) -> None:
        assert name in _NAMES
        self.name = name
        self.starts = 0
        self.env = dict(os.environ)
        self._home = home
        self._argv = [sys.executable, "-m", "cdc.cli.main", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = _PAUSE_SECONDS
        self._due = 0.0

    def start(self) -> None:
        """Start it, and kill one that an earlier run may have left."""
        kill_left_behind(self._home, self.name)
        self._spawn()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.running else None

    def supervise(self) -> None:
        """Restart it when that is due; raise ChildFailedError when a restart is useless."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            self._pause = _PAUSE_SECONDS
            self._due = 0.0
        elif code in _FINAL:
            raise ChildFailedError(
                f"{self.name}: ended with exit code {code}; the last lines:\n{self.tail()}",
                hint=f"see {self._home.log(self.name)}",
            )
        elif self._due == 0.0:
            self._due = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)
        elif time.monotonic() >= self._due:
            self._due = 0.0
            self._end_session()
            self._spawn()

    def kill(self) -> None:
        """SIGKILL all its processes, as a crash of its machine would."""
        if self._process is not None:
            _kill_session(self._process.pid)
            self._process.wait()

    def stop(self) -> bool:
        """End it by SIGTERM; return whether that worked."""
        clean = True
        if self._process is not None and self.running:
            self._process.terminate()
            try:
                clean = self._process.wait(_STOP_SECONDS) == 0
            except subprocess.TimeoutExpired:
                clean = False
        self._end_session()
        return clean

    def tail(self) -> str:
        return self._home.tail(self.name)

    def _end_session(self) -> None:
        if self._process is not None:
            _kill_session(self._process.pid)
            self._process.wait()

    def _spawn(self) -> None:
        self._home.rotate_log(self.name)
        with self._home.log(self.name).open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,  # Ctrl-C reaches only the demo, which stops its children
            )
        self.starts += 1
        process = ProcessId.of(self._process.pid)
        if process is not None:
            self._home.remember(self.name, ServerState(pid=process.pid, started=process.started))


class Watcher:
    """Kills the children when this process has ended; use it in a `with` block."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def __enter__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "cdc.playground.demo.child", str(self._home.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def kill_left_behind(home: Home, *names: str) -> None:
    """Kill the children that `home` has recorded, if they run: those named, or all."""
    for name in names or _NAMES:
        process = home.state(name).process
        if process.alive:
            _kill_session(process.pid)
            process.wait(_GONE_SECONDS)


def _kill_session(leader: int) -> None:
    """Kill all processes of a session, also when its leader has ended before them."""
    deadline = time.monotonic() + _GONE_SECONDS
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


def main() -> None:
    """Wait until stdin closes, then kill what is left."""
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.buffer.read()
    kill_left_behind(Home(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
