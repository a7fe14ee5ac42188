"""End a long-running command that is still starting: on SIGTERM and SIGINT, by exit code.

Imports take most of a second, and a supervisor may stop the process meanwhile. Nothing needs
cleanup yet, so the process just exits; the command's own handlers replace these later. This module
imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

# By command: the exit code of one that was stopped before it started.
_CODES: Final = {"run": 0, "tail": 0, "console": 0}
_PROGRAMS: Final = {"cdc", "main.py"}


def install() -> None:
    """Install the handlers where the process is such a command, and not a test or a child."""
    program, *arguments = sys.argv or [""]
    if os.path.basename(program) not in _PROGRAMS or not arguments:  # noqa: PTH119 - pathlib is slow
        return
    code = _CODES.get(arguments[0])
    if code is None:
        return

    def leave(_signal: int, _frame: FrameType | None) -> None:
        os._exit(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
