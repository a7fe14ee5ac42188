"""What ends a long-running command while it still starts: SIGTERM and SIGINT, with its exit code.

Imports take most of a second, in which a supervisor may change its mind. Nothing is held by then,
so the process just ends; the command's own handlers replace these once there is something to end.
Imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

# By command: the exit code of one that was told to stop before it began.
_CODES: Final = {"run": 0, "tail": 0}
_PROGRAMS: Final = {"cdc", "main.py"}


def install() -> None:
    """Have the process end well where it is one of those commands, and not a test or a child."""
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
