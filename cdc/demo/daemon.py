"""Run the daemon as a child that is started again whenever it ends, as a supervisor would.

Restarts after every end but those that its exit code says need a person. Keeps a watcher beside
it, which kills the daemon when this process is gone, however it ended:
`python -m cdc.demo.daemon HOME` reads a pipe that only we write to.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from cdc.errors import CDCError, Exit
from cdc.local.home import Home, ServerState
from cdc.local.process import ProcessId

if TYPE_CHECKING:
    from cdc.config import Config

_NAME: Final = "daemon"
_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 3.0
_STOP_SECONDS: Final = 20.0
_PROBE_SECONDS: Final = 0.5
# Restarting these would only repeat them.
_FINAL: Final = {Exit.USAGE, Exit.BUG, Exit.PERMISSION, Exit.CONFIG}


class DaemonFailedError(CDCError):
    """The daemon ended in a way that starting it again does not mend."""

    exit_code = Exit.FAILED


class Daemon:
    """One `cdc run`; call `supervise` often."""

    def __init__(self, home: Home, config_file: Path, config: Config) -> None:
        self.starts = 0
        self._home = home
        self._argv = [sys.executable, "-m", "cdc.cli.main", "run", "--config", str(config_file)]
        self._ready_url = f"http://{config.http.listen}/readyz"
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._pause = _PAUSE_SECONDS
        self._due = 0.0

    def start(self) -> None:
        """Start the daemon, and end one that a run before this one may have left."""
        kill_left_behind(self._home)
        self._watcher = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "cdc.demo.daemon", str(self._home.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._spawn()

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None and self.running else None

    def supervise(self) -> None:
        """Start the daemon again when it is due; raise DaemonFailedError when that is no use."""
        assert self._child is not None
        code = self._child.poll()
        if code is None:
            self._pause = _PAUSE_SECONDS
            self._due = 0.0
        elif code in _FINAL:
            raise DaemonFailedError(
                f"the daemon ended with exit code {code}; its last lines:\n{self.tail()}",
                hint=f"see {self._home.log(_NAME)}",
            )
        elif self._due == 0.0:
            self._due = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)
        elif time.monotonic() >= self._due:
            self._due = 0.0
            self._spawn()

    def kill(self) -> None:
        """SIGKILL it, as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def stop(self) -> bool:
        """End it in its own clean way; return whether that worked."""
        clean = True
        if self._child is not None and self.running:
            self._child.terminate()
            try:
                clean = self._child.wait(_STOP_SECONDS) == 0
            except subprocess.TimeoutExpired:
                self.kill()
                clean = False
        if self._watcher is not None:
            self._watcher.terminate()
            self._watcher.communicate()
            self._watcher = None
        return clean

    def state(self) -> str:
        """Return what the daemon says of itself, in a few words. Takes half a second at most."""
        if not self.running:
            return "down"
        try:
            with urllib.request.urlopen(self._ready_url, timeout=_PROBE_SECONDS) as answer:  # noqa: S310 - http
                body = answer.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        except OSError:
            return "starting"
        try:
            return str(orjson.loads(body)["state"])
        except (ValueError, KeyError):
            return "unknown"

    def tail(self) -> str:
        return self._home.tail(_NAME)

    def _spawn(self) -> None:
        self._home.rotate_log(_NAME)
        with self._home.log(_NAME).open("ab") as log:
            self._child = subprocess.Popen(  # noqa: S603 - our own command
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which stops the daemon in turn
            )
        self.starts += 1
        process = ProcessId.of(self._child.pid)
        if process is not None:
            self._home.remember(_NAME, ServerState(pid=process.pid, started=process.started))


def kill_left_behind(home: Home) -> None:
    """Kill the daemon that `home` remembers, if it runs."""
    process = home.state(_NAME).process
    process.signal(signal.SIGKILL)
    process.wait(5)


def main() -> None:
    """Wait until stdin closes, then kill what is left."""
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.buffer.read()
    kill_left_behind(Home(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
