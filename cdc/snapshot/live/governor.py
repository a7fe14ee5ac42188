"""How fast live snapshots may read, by what they do to the stream. Pure.

A chunk's high mark is a commit like any other: how long it takes until Kafka has committed what it
carries is how late a change of that moment is in the log. So the marks themselves tell when reading
must make room: smaller chunks, one at a time, with a pause.
"""

from __future__ import annotations

from collections import deque
from typing import Final

# From the mark to the end of its Kafka transaction; some milliseconds where nothing waits.
_QUICK_SECONDS: Final = 0.04
_SLOW_SECONDS: Final = 0.09
_MOST_FLIGHTS: Final = 3
# However slow the stream is for other reasons, some rows a second are read.
_LEAST_ROWS, _FIRST_ROWS, _MOST_ROWS = 100, 300, 2_000
_PAUSES: Final = (0.01, 0.25)


class Governor:
    """The chunks that may be on their way at a time, their rows, and the pause between two."""

    def __init__(self) -> None:
        self.flights = 1
        self.rows = _FIRST_ROWS
        self._not_before = 0.0
        self._pause_seconds = 0.0
        self._sent: deque[tuple[int, float]] = deque()  # LSN and time of the high marks

    def full(self, flying: int, now: float) -> bool:
        """Whether no further chunk may be read now, beside those before their high mark."""
        return flying + len(self._sent) >= self.flights or now < self._not_before

    def sent(self, lsn: int, marked_at: float) -> None:
        """Note that a chunk goes out, whose high mark was written at that time (monotonic)."""
        self._sent.append((lsn, marked_at))

    def committed(self, lsn: int, now: float) -> None:
        """Note up to where the log holds the stream."""
        while self._sent and self._sent[0][0] < lsn:
            self._judge(now - self._sent.popleft()[1])
            self._not_before = now + self._pause_seconds

    def _judge(self, seconds: float) -> None:
        least, most = _PAUSES
        if seconds > _SLOW_SECONDS:
            self.flights = 1
            self.rows = max(_LEAST_ROWS, self.rows // 2)
            self._pause_seconds = min(most, max(least, 2 * self._pause_seconds))
            return
        if seconds < _QUICK_SECONDS:
            self.flights = min(_MOST_FLIGHTS, self.flights + 1)
            self.rows = min(_MOST_ROWS, self.rows * 5 // 4)
        else:
            self.flights = 1
        self._pause_seconds = self._pause_seconds / 2 if self._pause_seconds > least else 0.0
