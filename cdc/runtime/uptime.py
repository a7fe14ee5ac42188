"""Since when this process has run, before Python and its imports: what a person waits for."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

_imported_at: Final = time.monotonic()
# The position of `starttime` after the command's name, which is in parentheses: proc_pid_stat(5).
_START: Final = 19


def started_at() -> float:
    """Return when the process started, on the clock of `time.monotonic`.

    A process that was replaced (`exec`) started when the first program did. Exact to a hundredth of
    a second; where there is no /proc it is when this module was imported.
    """
    if sys.platform != "linux":
        return _imported_at
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    ticks = int(fields.rpartition(")")[2].split()[_START])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age
