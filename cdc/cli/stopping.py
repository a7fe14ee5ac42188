"""End the process: while it is still starting, and with threads that are still in Kafka's client.

Imports take most of a second, and a supervisor may send SIGTERM or SIGINT meanwhile. Nothing needs
cleanup yet, so the process just exits; the command's own handlers replace these later. This module
imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from types import FrameType

# The commands that run until they are stopped.
_COMMANDS: Final = (("run",), ("tail",), ("console",), ("trace",), ("webhook", "run"))
_PROGRAMS: Final = {"cdc", "main.py"}


def install() -> None:
    """Install the handlers where the process is such a command, and not a test or a child."""
    program, *arguments = sys.argv or [""]
    if os.path.basename(program) not in _PROGRAMS or not arguments:  # noqa: PTH119 - pathlib is slow
        return
    if not any(tuple(arguments[: len(command)]) == command for command in _COMMANDS):
        return

    def exit_now(_signal: int, _frame: FrameType | None) -> None:
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_now)


def requested() -> threading.Event:
    """Return what is set once SIGTERM or SIGINT asks the process to stop."""
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    return over


def leave(code: int) -> NoReturn:
    """Exit with `code`; without the interpreter's cleanup if a daemon thread still runs.

    The cleanup takes apart what such a thread uses. One that is in librdkafka meanwhile has ended
    the process by SIGSEGV, after a clean stop.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # its reader has closed it
        os._exit(code)
    sys.exit(code)
