"""How fast live snapshots may read, by what they do to the stream. Pure.

A chunk's high mark is a commit like any other: how long it takes to come back is how far the loop
is behind what is written. So the marks themselves tell when reading must make room.
"""

from __future__ import annotations

from typing import Final

# A mark takes some milliseconds where nothing waits.
_QUICK_SECONDS: Final = 0.03
_SLOW_SECONDS: Final = 0.08
_MOST_FLIGHTS: Final = 3
# However slow the stream is for other reasons, some chunks a second are read.
_PAUSES: Final = (0.01, 0.25)


class Governor:
    """The chunks that may be on their way at a time, and the pause between two."""

    def __init__(self) -> None:
        self.flights = 1
        self.pause_seconds = 0.0

    def landed(self, seconds: float) -> float:
        """Note that a high mark came so long after it was written; return for how long to rest."""
        least, most = _PAUSES
        if seconds > _SLOW_SECONDS:
            self.flights = 1
            self.pause_seconds = min(most, max(least, 2 * self.pause_seconds))
            return self.pause_seconds
        self.flights = min(_MOST_FLIGHTS, self.flights + 1) if seconds < _QUICK_SECONDS else 1
        self.pause_seconds = self.pause_seconds / 2 if self.pause_seconds > least else 0.0
        return self.pause_seconds
