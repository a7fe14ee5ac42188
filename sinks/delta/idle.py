"""Hold back frontiers at which no mirror has changed: canaries, and tables of other followers.

Readers see the same rows without such a frontier, so it may be written late, by a bounded time. The
follower reports it at once: a process that waits for it finds in the mirrors what was committed up
to there. If the follower is killed, the next one reads the log again from the frontier before.
"""

from __future__ import annotations

import time
from contextlib import suppress
from threading import RLock, Timer
from typing import TYPE_CHECKING

from cdc.errors import CDCError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.sinks.contract import Applied


class IdleFrontier:
    """The newest frontier that is not written yet, if any; at most `seconds` after the last one."""

    def __init__(self, seconds: float, write: Callable[[Applied], object]) -> None:
        self._seconds, self._write = seconds, write
        self._held: Applied | None = None
        self._timer: Timer | None = None
        self._written_at = float("-inf")
        # For each use of the table of frontiers: another thread writes the held one.
        self.lock = RLock()

    def holds(self, applied: Applied) -> bool:
        """Hold a frontier and return True, unless the last one was written long enough ago."""
        left = self._written_at + self._seconds - time.monotonic()
        if left <= 0:
            return False
        self._held = applied
        if self._timer is None:
            self._timer = Timer(left, self._flush_late)
            self._timer.daemon = True
            self._timer.start()
        return True

    def written(self) -> None:
        """Note that a later frontier than the held one was written."""
        self._written_at = time.monotonic()
        self.forget()

    def forget(self) -> None:
        """Leave the held frontier to the next one."""
        self._held = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def flush(self) -> None:
        """Write the held frontier."""
        with self.lock:
            held = self._held
            self.forget()
            if held is not None:
                self._write(held)
                self._written_at = time.monotonic()

    def _flush_late(self) -> None:
        # The next frontier repeats what fails here, and reports why.
        with suppress(CDCError):
            self.flush()
