"""How fast a task may read: rows and bytes per second, which all tasks share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cdc.config.snapshot import Snapshot

# Unused time before this is not made up for: a pause is not followed by a burst.
_CREDIT_SECONDS: Final = 0.5


class Pace:
    """One task's share. Unlimited where the configuration gives no limit."""

    def __init__(self, settings: Snapshot, tasks: int) -> None:
        self._rows = settings.rows_per_second / tasks
        self._bytes = settings.bytes_per_second / tasks
        self._due_at = time.monotonic()

    def seconds(self, rows: int, size: int) -> float:
        """Return how many seconds this many rows and bytes should take."""
        slow = rows / self._rows if self._rows else 0.0
        return max(slow, size / self._bytes if self._bytes else 0.0)

    def wait(self, rows: int, size: int) -> None:
        """Return when the next rows may be read, after `rows` of `size` bytes."""
        now = time.monotonic()
        self._due_at = max(self._due_at, now - _CREDIT_SECONDS) + self.seconds(rows, size)
        if self._due_at > now:
            time.sleep(self._due_at - now)
