"""The local runner: a plan's tasks in processes alongside the daemon.

Processes are spawned, not forked: the daemon has threads and clients that a fork would break. Each
runs one task to its end and reports finished ranges, the current range, and the error that ended it
to its parent. A process whose parent has ended ends too, and aborts its open Kafka transaction.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final, NoReturn

from cdc import errors
from cdc.errors import CDCError, Exit, UnavailableError
from cdc.runtime import bugs, parent
from cdc.snapshot.initial.task import CopyTask

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess
    from types import FrameType

    from cdc.config import Config
    from cdc.snapshot.initial.progress import SnapshotProgress
    from cdc.snapshot.initial.records import SnapshotPlan

# How long a process may take to abort its Kafka transaction; a supervisor gives us ten seconds.
_STOP_SECONDS: Final = 6.0
# How often a process reports on the current range.
_REPORT_SECONDS: Final = 0.25


class LocalRunner:
    """Processes that copy, one per task."""

    def __init__(self, config: Config, plan: SnapshotPlan, tasks: Iterable[int]) -> None:
        """Start a process for each of `tasks`."""
        spawning = multiprocessing.get_context("spawn")
        self._running: dict[Connection, SpawnProcess] = {}
        for number in tasks:
            ours, theirs = spawning.Pipe(duplex=False)
            process = spawning.Process(
                target=_work, args=(theirs, config, plan, number), name=f"cdc-snapshot-{number}"
            )
            process.start()
            theirs.close()
            self._running[ours] = process

    def turn(self, seconds: float, progress: SnapshotProgress) -> bool:
        """Process their reports, for `seconds` at most; return whether all have finished.

        Raises the error that ended one.
        """
        ready = connection.wait(list(self._running), seconds)
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            self._receive(pipe, progress)
        return not self._running

    def stop(self) -> None:
        processes = list(self._running.values())
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._running.clear()

    def _receive(self, pipe: Connection, progress: SnapshotProgress) -> None:
        try:
            while pipe.poll():
                kind, content = pipe.recv()
                if kind == "at hand":
                    progress.reported(*content)
                elif kind == "done":
                    progress.finished(content)
                else:
                    name, what, hint = content
                    kind_of_error: type[CDCError] = getattr(errors, name, CDCError)
                    raise kind_of_error(what, hint=hint)
        except EOFError:
            process = self._running.pop(pipe)
            process.join()
            if process.exitcode:
                raise UnavailableError(
                    f"{process.name} ended with code {process.exitcode}",
                    hint="it is started again with the ranges that it has left; where the kernel"
                    " killed it, there is too little memory",
                ) from None


# --- in the process ---


def _work(pipe: Connection, config: Config, plan: SnapshotPlan, number: int) -> None:
    """Run one task to its end."""
    bugs.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to all: the parent stops us
    signal.signal(signal.SIGTERM, _exit)
    if (host := multiprocessing.parent_process()) is not None:
        parent.end_with(host.join, within=_STOP_SECONDS, code=1)
    reporter = _Teller(pipe)
    try:
        with CopyTask(config, plan, number, report=reporter.at_hand) as task:
            for each in task.unfinished():
                reporter.range = each.table, each.number
                reporter.send("done", task.copy(each))
    except CDCError as error:
        reporter.send("failed", (type(error).__name__, error.what, error.hint))
    except Exception as error:  # noqa: BLE001 - multiprocessing would print its words
        sys.stderr.write(f"cdc: a bug in Lockstep, in a snapshot's task:\n{bugs.where(error)}")
        sys.exit(Exit.BUG)
    finally:
        pipe.close()


class _Teller:
    """Sends a process's reports to its parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._reported_at = 0.0
        self.range = (0, 0)

    def at_hand(self, rows: int, size: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = now
            self.send("at hand", (*self.range, rows, size))

    def send(self, kind: str, content: Any) -> None:  # noqa: ANN401 - what the kind says
        with contextlib.suppress(BrokenPipeError):  # the parent has ended, and so do we in a moment
            self._pipe.send((kind, content))


def _exit(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)
