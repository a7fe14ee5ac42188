"""The demo's children: the daemon, and one `cdc follow`, each started again whenever it ends.

A supervisor would restart them, too, except after exit codes that need a person. Each child leads
a session of its own, and what is left in the session after its leader has ended is killed before
another is started: a job's Java and its workers outlive a killed leader for a while. When this
process has ended, in any way, the stack's watcher kills the children.

The follower job follows into all stores. Mirrors and the SQL store are in the demo's folder. A
table without a key can be followed by mirrors only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from cdc.errors import CDCError, Exit
from cdc.operate.status import daemon_report
from cdc.playground.demo.schema import KEYLESS, TABLES
from cdc.playground.demo.views import view_followers
from cdc.playground.servers.home import Home, ServerState
from cdc.playground.servers.process import ProcessId, kill_session
from cdc.runtime.java import spark_home, system_java

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.config import Config
    from cdc.playground.servers.stack import Endpoints

_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 3.0
_STOP_SECONDS: Final = 20.0
# Exit codes after which a restart would only fail again.
_FINAL: Final = {Exit.USAGE, Exit.BUG, Exit.PERMISSION, Exit.CONFIG}


class ChildFailedError(CDCError):
    """A child ended in a way that a restart does not fix."""

    exit_code = Exit.FAILED


class Child:
    """One command of ours; call `supervise` often."""

    def __init__(self, home: Home, name: str, *arguments: str) -> None:
        self.name = name
        self.starts = 0
        self.env = dict(os.environ)
        self._home = home
        self._argv = [sys.executable, "-m", "cdc.cli.main", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = _PAUSE_SECONDS
        self._due = 0.0

    def start(self) -> None:
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
                f"{self.name}: ended with exit code {code}; the last lines:\n"
                f"{self._home.tail(self.name)}",
                hint=f"see {self._home.log(self.name)}",
            )
        elif self._due == 0.0:
            self._due = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)
        elif time.monotonic() >= self._due:
            self._due = 0.0
            self.kill()
            self.start()

    def kill(self) -> None:
        """SIGKILL all its processes, as a crash of its machine would."""
        if self._process is not None:
            kill_session(self._process.pid)
            self._process.wait()

    def stop(self) -> None:
        """End it by SIGTERM, and by SIGKILL what that does not end in time."""
        if self._process is not None and self.running:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        self.kill()


class DaemonChild(Child):
    """One `cdc run`."""

    def __init__(self, home: Home, config_file: Path, config: Config) -> None:
        super().__init__(home, "daemon", "run", "--config", str(config_file))
        self._listen, self._pipeline = config.http.listen, config.pipeline

    def state(self) -> str:
        """Return the state that the daemon reports, in a word. Takes two seconds at most."""
        if not self.running:
            return "down"
        report = daemon_report(self._listen, self._pipeline)
        return "starting" if report is None else str(report["state"])


class FollowersChild(Child):
    """One `cdc follow`."""

    def __init__(self, home: Home, config_file: Path) -> None:
        super().__init__(home, "followers", "follow", "--config", str(config_file))
        if system_java() is None:
            self.env["JAVA_HOME"] = str(spark_home(home.run / "java"))


def follower_settings(home: Home, ends: Endpoints) -> dict[str, Any]:
    """Return the section `followers` of the demo's configuration."""
    keyed = [f"public.{name}" for name in TABLES if name not in KEYLESS]
    return {
        "mirror": {"delta": {"path": str(home.data / "delta")}},
        "cache": {"tables": keyed, "redis": {"url": ends.redis_url}},
        "search": {"tables": keyed, "opensearch": {"url": ends.opensearch_url}},
        **view_followers("mirror", home, ends),
    }
