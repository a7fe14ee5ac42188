"""The console as the daemon's child: it ends with the daemon, and gives way to it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from cdc.runtime import parent

# A niceness at which the daemon gets what it needs of a busy processor.
_NICENESS: Final = 10
# Of -1000 to 1000: where memory is short, the kernel kills this process and not the daemon.
_KILLED_FIRST: Final = "800"
_STOP_SECONDS: Final = 3.0


def end_with_parent() -> None:
    """Give way to other processes, and stop when standard input ends: the parent holds it open."""
    os.nice(_NICENESS)
    with suppress(OSError):  # Linux has it
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST, "ascii")
    parent.end_with(sys.stdin.buffer.read, within=_STOP_SECONDS)
