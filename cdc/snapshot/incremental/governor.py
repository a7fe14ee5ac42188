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

# From the watermark to the end of its Kafka transaction, beyond the stream's own delay: below the
# first value is quick, above the second is slow.
ADDED_SECONDS: Final = (0.03, 0.08)
# Where the stream's own delay is long, it varies: this share of it still counts as quick, and twice
# that as slow.
_QUICK_SHARE: Final = 0.25
# The stream's own delay: some milliseconds where nothing waits. Above the maximum the cause is not
# a distant broker but a stream that lags: it needs all the capacity there is.
_FIRST_OWN_DELAY_SECONDS, _MAX_OWN_DELAY_SECONDS = 0.01, 1.0
_NEW_SHARE: Final = 0.5  # weight of a new measurement
_MAX_CHUNKS: Final = 3
# However slow the stream is for other reasons, some rows a second are read.
_LEAST_ROWS, _MOST_ROWS = 100, 2_000
_LEAST_BYTES: Final = 64 << 10
_PAUSES: Final = (0.01, 0.25)


class _Sent(NamedTuple):
    """A published chunk: its high watermark's LSN and time, and whether it is the smallest."""

    lsn: int
    high_at: float
    smallest: bool


class Governor:
    """Limits: chunks in flight at a time, rows per chunk, and the pause between two chunks."""

    def __init__(self, added_seconds: tuple[float, float] = ADDED_SECONDS) -> None:
        self._quick_seconds, self._slow_seconds = added_seconds
        self.max_chunks = 1
        self.rows = _LEAST_ROWS
        self._not_before = 0.0
        self._pause_seconds = 0.0
        self._own_delay_seconds = _FIRST_OWN_DELAY_SECONDS
        self._sent: deque[_Sent] = deque()

    def full(self, chunks: int, now: float) -> bool:
        """Whether no further chunk may be read; `chunks` are those before their high watermark."""
        return chunks + len(self._sent) >= self.max_chunks or now < self._not_before

    def sent(self, lsn: int, high_at: float, rows: int, size: int) -> None:
        """Note a published chunk; its high watermark was written at `high_at` (monotonic)."""
        smallest = self.max_chunks == 1 and rows <= _LEAST_ROWS and size <= _LEAST_BYTES
        self._sent.append(_Sent(lsn, high_at, smallest))

    def committed(self, lsn: int, now: float) -> None:
        """Note up to which LSN the log holds the stream."""
        while self._sent and self._sent[0].lsn < lsn:
            sent = self._sent.popleft()
            self._measure(now - sent.high_at, smallest=sent.smallest)
            self._not_before = now + self._pause_seconds

    def _measure(self, seconds: float, *, smallest: bool) -> None:
        least, most = _PAUSES
        measured = min(seconds, _MAX_OWN_DELAY_SECONDS)
        if smallest:
            self._own_delay_seconds += _NEW_SHARE * (measured - self._own_delay_seconds)
        # A chunk that took less shows that the stream's own delay is less.
        self._own_delay_seconds = min(self._own_delay_seconds, measured)
        added = seconds - self._own_delay_seconds
        share = _QUICK_SHARE * self._own_delay_seconds
        if added > max(self._slow_seconds, 2 * share):
            self.max_chunks = 1
            self.rows = max(_LEAST_ROWS, self.rows // 2)
            self._pause_seconds = min(most, max(least, 2 * self._pause_seconds))
            return
        # The smallest chunks first measure the stream's own delay: the rest is left for larger
        # ones.
        quick = max(self._quick_seconds, share)
        if added < (quick / 3 if smallest else quick):
            # Several in flight are published together: only where even the largest add little.
            if self.rows == _MOST_ROWS:
                self.max_chunks = min(_MAX_CHUNKS, self.max_chunks + 1)
            self.rows = min(_MOST_ROWS, self.rows * 5 // 4)
        elif self.max_chunks > 1:
            self.max_chunks = 1
        else:
            self.rows = max(_LEAST_ROWS, self.rows * 49 // 50)
        self._pause_seconds = self._pause_seconds / 2 if self._pause_seconds > least else 0.0
