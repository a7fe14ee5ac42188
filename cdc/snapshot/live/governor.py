"""How fast live snapshots may read, by what they do to the stream. Pure.

A chunk's high mark is a commit like any other: how long it takes until Kafka has committed what it
carries is how late a change of that moment is in the log. So the marks themselves tell when reading
must make room: smaller chunks, one at a time, with a pause.

What counts is what the chunks add. How long the stream takes by itself, which with a broker far
away is more than chunks ever may add, the smallest ones tell: so few rows cost nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

# From the mark to the end of its Kafka transaction, beyond what the stream takes by itself.
_QUICK_SECONDS: Final = 0.03
_SLOW_SECONDS: Final = 0.08
# Where that is long it goes up and down by itself: so much of it is quick, and twice that slow.
_QUICK_SHARE: Final = 0.25
# By itself: some milliseconds where nothing waits. Beyond the most it is no broker that is far
# away, but a stream that falls behind: it needs all the room there is.
_FIRST_ALONE_SECONDS, _MOST_ALONE_SECONDS = 0.01, 1.0
_NEW_SHARE: Final = 0.5  # of a new look at it
_MOST_FLIGHTS: Final = 3
# However slow the stream is for other reasons, some rows a second are read.
_LEAST_ROWS, _MOST_ROWS = 100, 2_000
_LEAST_BYTES: Final = 64 << 10
_PAUSES: Final = (0.01, 0.25)


class _Sent(NamedTuple):
    """A chunk that goes out: its high mark's LSN, when that was written, and how little it is."""

    lsn: int
    marked_at: float
    smallest: bool


class Governor:
    """The chunks that may be on their way at a time, their rows, and the pause between two."""

    def __init__(self) -> None:
        self.flights = 1
        self.rows = _LEAST_ROWS
        self._not_before = 0.0
        self._pause_seconds = 0.0
        self._alone_seconds = _FIRST_ALONE_SECONDS
        self._sent: deque[_Sent] = deque()

    def full(self, flying: int, now: float) -> bool:
        """Whether no further chunk may be read now, beside those before their high mark."""
        return flying + len(self._sent) >= self.flights or now < self._not_before

    def sent(self, lsn: int, marked_at: float, rows: int, size: int) -> None:
        """Note that a chunk goes out, whose high mark was written at that time (monotonic)."""
        smallest = self.flights == 1 and rows <= _LEAST_ROWS and size <= _LEAST_BYTES
        self._sent.append(_Sent(lsn, marked_at, smallest))

    def committed(self, lsn: int, now: float) -> None:
        """Note up to where the log holds the stream."""
        while self._sent and self._sent[0].lsn < lsn:
            sent = self._sent.popleft()
            self._judge(now - sent.marked_at, smallest=sent.smallest)
            self._not_before = now + self._pause_seconds

    def _judge(self, seconds: float, *, smallest: bool) -> None:
        least, most = _PAUSES
        looked = min(seconds, _MOST_ALONE_SECONDS)
        if smallest:
            self._alone_seconds += _NEW_SHARE * (looked - self._alone_seconds)
        # A chunk that took less has shown that it is less.
        self._alone_seconds = min(self._alone_seconds, looked)
        added = seconds - self._alone_seconds
        share = _QUICK_SHARE * self._alone_seconds
        if added > max(_SLOW_SECONDS, 2 * share):
            self.flights = 1
            self.rows = max(_LEAST_ROWS, self.rows // 2)
            self._pause_seconds = min(most, max(least, 2 * self._pause_seconds))
            return
        # The smallest first tell all they know: what is left is for larger ones to add.
        quick = max(_QUICK_SECONDS, share)
        if added < (quick / 3 if smallest else quick):
            # Several at once come out together: only where even the largest add little.
            if self.rows == _MOST_ROWS:
                self.flights = min(_MOST_FLIGHTS, self.flights + 1)
            self.rows = min(_MOST_ROWS, self.rows * 5 // 4)
        elif self.flights > 1:
            self.flights = 1
        else:
            self.rows = max(_LEAST_ROWS, self.rows * 49 // 50)
        self._pause_seconds = self._pause_seconds / 2 if self._pause_seconds > least else 0.0
