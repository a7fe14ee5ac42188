"""`cdc snapshot --initial`: take the initial snapshot without streaming, and show progress."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING, Final

from cdc.cli.options import echo, next_step, print_json
from cdc.errors import CDCError, Exit, Policy, SlotBusyError, StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from cdc.config import Config
    from cdc.snapshot.initial.progress import Report

# How often a line is printed where there is no terminal for a bar.
_LINE_SECONDS: Final = 5.0
# A server that restarts is available again by then; the daemon would retry for ever.
_TRIES: Final = 20
_PAUSE_SECONDS: Final = 3.0


def initial(config: Config, config_file: Path, *, as_json: bool) -> int:
    """Take the snapshot where one is due; return the exit code."""
    from cdc.snapshot.initial import due  # noqa: PLC0415 - heavy, and not for --help
    from cdc.snapshot.initial import session as coordinator  # noqa: PLC0415

    state = due.state(config)
    if state is not None and state.stage != "done":
        host = _Terminal(config_file)
        with host.bar:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, host.stop)
            try:
                _take_with_retries(lambda: coordinator.take(config, host), host)
            except StoppedError:
                echo("stopped: the next one starts a new generation", err=True)
                return Exit.TEMPORARY
        state = due.state(config)
    if as_json:
        keep = ("stage", "generation", "rows", "bytes", "seconds")
        print_json(state and {name: getattr(state, name) for name in keep})
    elif state is None:
        echo("this pipeline starts without an initial snapshot")
    else:
        echo(f"the initial snapshot is {state.stage}: {state.rows:,} rows")
    next_step("cdc run")
    return Exit.OK


def _take_with_retries(take: Callable[[], object], host: _Terminal) -> None:
    """Take it; retry what passes by itself, as the daemon does."""
    left = _TRIES
    while True:
        try:
            take()
        except CDCError as error:
            # Another process that takes it may need hours: for that one this waits without a limit.
            left -= not isinstance(error, SlotBusyError)
            if error.policy is not Policy.BACKOFF or not left:
                raise
            host.snapshotting(error.what)
            time.sleep(_PAUSE_SECONDS)
            if host.stopping:
                raise StoppedError from error
        else:
            return


class _Terminal:
    """The process as a host: a progress bar on a terminal, else lines."""

    def __init__(self, config_file: Path) -> None:
        from rich.console import Console  # noqa: PLC0415 - not for --help
        from rich.progress import Progress  # noqa: PLC0415

        self.config_file: Path | None = config_file
        self.stopping = False
        self.bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self.bar.add_task("snapshot", total=100)
        self._last_line = ("", 0.0)

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def beat(self) -> None:
        """Do nothing: a command has no health checks."""

    def snapshotting(self, reason: str, report: Report | None = None) -> None:
        if not self.bar.disable:
            done = None if report is None else report.percent
            self.bar.update(self._task, description=reason, completed=done)
            return
        line, at = self._last_line
        if (report is None and reason != line) or time.monotonic() - at >= _LINE_SECONDS:
            self._last_line = (reason, time.monotonic())
            echo(reason, err=True)
