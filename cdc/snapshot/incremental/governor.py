"""How fast incremental snapshots may read, by how much they delay the stream. Pure.

A chunk's high watermark is a commit like any other: the time until Kafka has committed what it
carries is the delay of a change of that moment. So the watermarks themselves show when reading must
slow down: smaller chunks, one at a time, with a pause.

What counts is what the chunks add. The stream's own delay, which with a distant broker is more than
chunks may ever add, is measured with the smallest chunks: so few rows cost nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

# From the watermark to the end of its Kafka transaction, beyond the stream's own delay.
_QUICK_SECONDS: Final = 0.03
_SLOW_SECONDS: Final = 0.08
# Where the stream's own delay is long, it varies: this share of it still counts as quick, and twice
# that as slow.
_QUICK_SHARE: Final = 0.25
# The stream's own delay: some milliseconds where nothing waits. Above the maximum the cause is not
# a distant broker but a stream that lags: it needs all the capacity there is.
_FIRST_ALONE_SECONDS, _MOST_ALONE_SECONDS = 0.01, 1.0
_NEW_SHARE: Final = 0.5  # weight of a new measurement
_MOST_FLIGHTS: Final = 3
# However slow the stream is for other reasons, some rows a second are read.
_LEAST_ROWS, _MOST_ROWS = 100, 2_000
_LEAST_BYTES: Final = 64 << 10
_PAUSES: Final = (0.01, 0.25)


class _Sent(NamedTuple):
    """A published chunk: its high watermark's LSN and time, and whether it is the smallest."""

    lsn: int
    marked_at: float
    smallest: bool


class Governor:
    """Limits: chunks in flight at a time, rows per chunk, and the pause between two chunks."""

    def __init__(self) -> None:
        self.flights = 1
        self.rows = _LEAST_ROWS
        self._not_before = 0.0
        self._pause_seconds = 0.0
        self._alone_seconds = _FIRST_ALONE_SECONDS
        self._sent: deque[_Sent] = deque()

    def full(self, flying: int, now: float) -> bool:
        """Whether no further chunk may be read; `flying` are those before their high watermark."""
        return flying + len(self._sent) >= self.flights or now < self._not_before

    def sent(self, lsn: int, marked_at: float, rows: int, size: int) -> None:
        """Note a published chunk; its high watermark was written at `marked_at` (monotonic)."""
        smallest = self.flights == 1 and rows <= _LEAST_ROWS and size <= _LEAST_BYTES
        self._sent.append(_Sent(lsn, marked_at, smallest))

    def committed(self, lsn: int, now: float) -> None:
        """Note up to which LSN the log holds the stream."""
        while self._sent and self._sent[0].lsn < lsn:
            sent = self._sent.popleft()
            self._judge(now - sent.marked_at, smallest=sent.smallest)
            self._not_before = now + self._pause_seconds

    def _judge(self, seconds: float, *, smallest: bool) -> None:
        least, most = _PAUSES
        looked = min(seconds, _MOST_ALONE_SECONDS)
        if smallest:
            self._alone_seconds += _NEW_SHARE * (looked - self._alone_seconds)
        # A chunk that took less shows that the stream's own delay is less.
        self._alone_seconds = min(self._alone_seconds, looked)
        added = seconds - self._alone_seconds
        share = _QUICK_SHARE * self._alone_seconds
        if added > max(_SLOW_SECONDS, 2 * share):
            self.flights = 1
            self.rows = max(_LEAST_ROWS, self.rows // 2)
            self._pause_seconds = min(most, max(least, 2 * self._pause_seconds))
            return
        # The smallest chunks first measure the stream's own delay: the rest is left for larger
        # ones.
        quick = max(_QUICK_SECONDS, share)
        if added < (quick / 3 if smallest else quick):
            # Several in flight are published together: only where even the largest add little.
            if self.rows == _MOST_ROWS:
                self.flights = min(_MOST_FLIGHTS, self.flights + 1)
            self.rows = min(_MOST_ROWS, self.rows * 5 // 4)
        elif self.flights > 1:
            self.flights = 1
        else:
            self.rows = max(_LEAST_ROWS, self.rows * 49 // 50)
        self._pause_seconds = self._pause_seconds / 2 if self._pause_seconds > least else 0.0
