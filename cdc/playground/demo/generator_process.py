"""The generator as a child: started, read, and stopped by closing its stdin."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError, Exit

if TYPE_CHECKING:
    from cdc.playground.servers.home import Home

_NAME: Final = "generator"
_STOP_SECONDS: Final = 20.0


class GeneratorFailedError(CDCError):
    """The generator ended by itself."""

    exit_code = Exit.FAILED


class Generator:
    """One `cdc.playground.demo.generator`; `written` is how many changes it has seen committed."""

    def __init__(self, home: Home, dsn: str, seed: int, rate: float) -> None:
        self.written = 0
        self._home = home
        self._argv = [sys.executable, "-m", "cdc.playground.demo.generator", dsn]
        self._argv += ["--seed", str(seed), "--rate", str(rate)]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, if it has not been."""
        if self._child is not None:
            return
        with self._home.log(_NAME).open("ab") as log:
            self._child = subprocess.Popen(  # noqa: S603 - our own module
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo
            )
        self._thread = threading.Thread(target=self._listen, name="generator", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise GeneratorFailedError if it has ended."""
        code = self._child and self._child.poll()
        if code is not None:
            raise GeneratorFailedError(
                f"the generator ended with exit code {code}:\n{self._home.tail(_NAME)}",
                hint="report it with these lines",
            )

    def stop(self) -> None:
        """Let it finish its current actions, and wait for that. May be called twice."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._thread.join()
        self._child.stdout.close()

    def _listen(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.written = int(line)
