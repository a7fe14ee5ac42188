"""How fast a task may read: so many rows and bytes a second, of all tasks together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cdc.config.snapshot import Snapshot

# What was not used so long ago is not made up for: a pause is followed by no rush.
_CREDIT_SECONDS: Final = 0.5


class Pace:
    """One task's share. Unlimited where the configuration gives no limit."""

    def __init__(self, settings: Snapshot, tasks: int) -> None:
        self._rows = settings.rows_per_second / tasks
        self._bytes = settings.bytes_per_second / tasks
        self._due_at = time.monotonic()

    def seconds(self, rows: int, size: int) -> float:
        """Return how long so many rows, of so many bytes, are to take."""
        slow = rows / self._rows if self._rows else 0.0
        return max(slow, size / self._bytes if self._bytes else 0.0)

    def wait(self, rows: int, size: int) -> None:
        """Return when the next rows may be read, after so many."""
        now = time.monotonic()
        self._due_at = max(self._due_at, now - _CREDIT_SECONDS) + self.seconds(rows, size)
        if self._due_at > now:
            time.sleep(self._due_at - now)
