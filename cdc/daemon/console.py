"""The console as a child of the daemon: started with it, started again when it ends, ended with it.

It shares nothing with the pipeline but the machine: one thread here waits for its lines and its
end. The child ends when its standard input does, so also when the daemon is killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from cdc.runtime import extras

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("cdc.daemon.console")

# Doubles from the first to the second; after a console that ran for longer it is the first again.
_AGAIN_SECONDS: Final = (1.0, 60.0)
_STOP_SECONDS: Final = 3.0


class ConsoleProcess:
    """Runs until `close`."""

    def __init__(self, config_file: Path, http: str) -> None:
        """Start at once; `http` is the address at which this daemon serves its health, or "".

        Raises MissingExtraError where the console is not installed.
        """
        extras.require("console.listen", "console")
        command = ("-m", "cdc.cli.main", "console", "-c", str(config_file.absolute()), "--child")
        self._command = (sys.executable, *command)
        # The file may give port 0.
        self._env = {**os.environ, "LOCKSTEP_HTTP_LISTEN": http}
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="cdc-console", daemon=True).start()

    def close(self) -> None:
        """End the child; return when it has ended."""
        with self._lock:
            self._over.set()
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _run(self) -> None:
        seconds = _AGAIN_SECONDS[0]
        while not self._over.is_set():
            began = time.monotonic()
            ended = self._run_child()
            if time.monotonic() - began > _AGAIN_SECONDS[1]:
                seconds = _AGAIN_SECONDS[0]
            if not self._over.is_set():
                fields = {"why": ended, "in_seconds": seconds}
                log.warning("the console has ended, starting it again", extra={"fields": fields})
            self._over.wait(seconds)
            seconds = min(2 * seconds, _AGAIN_SECONDS[1])

    def _run_child(self) -> str:
        """Log what the child prints until it ends; return why it ended."""
        with self._lock:
            if self._over.is_set():
                return "stopped"
            try:
                self._child = self._start()
            except OSError as error:  # no memory, or no process left for this user
                return str(error.strerror)
        with self._child as child:
            assert child.stdout is not None
            for line in child.stdout:
                log.info("the console reports", extra={"fields": {"line": line.rstrip()}})
        return f"exit code {child.returncode}"

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(  # noqa: S603 - our own command
            self._command,
            stdin=subprocess.PIPE,  # nothing is written: it ends with this process
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._env,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the daemon alone, which ends the child
        )
