"""All I/O of incremental snapshots: chunks read between two watermarks, and visibility checks.

Its calls return at once. What they start blocks, and runs on the incremental snapshots' own worker,
on one connection: a chunk may wait for a lock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cdc import failpoints
from cdc.errors import StoppedError
from cdc.snapshot.incremental import watermarks
from cdc.snapshot.incremental.watermarks import Signer

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from cdc.runtime.background import BackgroundThread
    from cdc.snapshot.incremental.records import TableName
    from cdc.snapshot.incremental.visibility import VisibilityBarrier
    from cdc.source.chunks import Chunk, ChunkReader, ChunkRequest, InProgress


class Clock(Protocol):
    """The `time` module, or a model of it."""

    def monotonic(self) -> float: ...

    def time_ns(self) -> int: ...


class Fetch:
    """A chunk that is read. The worker sets the results before it writes the high watermark."""

    def __init__(self, snapshot: str, number: int, table: TableName, asked: ChunkRequest) -> None:
        self.snapshot, self.number = snapshot, number
        self.table, self.asked = table, asked
        self.estimate: int | None = None  # of the table's rows, where it was looked up
        self.chunk: Chunk | None = None
        self.high_at = 0.0  # monotonic, when the high watermark was written


class _Check(NamedTuple):
    barrier: VisibilityBarrier
    future: Future[InProgress]


class Fetcher:
    """Reads for one session of the daemon."""

    def __init__(
        self, worker: BackgroundThread, connect: Callable[[], ChunkReader], clock: Clock = time
    ) -> None:
        """Connect when there is something to read."""
        self.signer = Signer()  # of the session's watermarks
        self._worker, self._connect, self._clock = worker, connect, clock
        self._source: ChunkReader | None = None
        self._closed = False
        self._reading: Future[None] | None = None
        self._check: _Check | None = None

    # -- the loop's side -----------------------------------------------------------------------

    def start(self, fetch: Fetch) -> None:
        """Start reading a chunk; one at a time."""
        assert self._reading is None
        self._reading = self._worker.submit(lambda: self._fetch(fetch))

    def finished(self) -> bool:
        """Whether the chunk that was started has ended, once. Raises its error."""
        if self._reading is None or not self._reading.done():
            return False
        reading, self._reading = self._reading, None
        reading.result()
        return True

    def cancel(self) -> None:
        """End what the chunk that is read waits for; `finished` raises that."""
        if source := self._source:
            source.cancel()

    def poll(self, barrier: VisibilityBarrier) -> None:
        """Show the barrier the open transactions whenever it is due. Raises the check's error."""
        now = self._clock.monotonic()
        # A check for an earlier barrier may be older than the recording that this one stands for.
        if self._check is None or self._check.barrier is not barrier:
            if barrier.is_due(now):
                self._check = _Check(barrier, self._worker.submit(self._in_progress))
        elif self._check.future.done():
            future, self._check = self._check.future, None
            barrier.check(future.result(), now)

    def disconnect(self) -> None:
        """Close the connection; the next read opens another."""
        self._worker.submit(self._disconnect)

    def close(self) -> None:
        """Close the connection, whatever it waits for, and refuse further reads."""
        self._closed = True
        if source := self._source:
            source.cancel()
            source.end()  # a frozen server does not obey, and the next session has the same worker
        self._worker.submit(self._disconnect)

    # -- the worker's side ---------------------------------------------------------------------

    def _fetch(self, fetch: Fetch) -> None:
        source, asked = self._connected(), fetch.asked
        if not asked.relation_id:
            relation_id, fetch.estimate = source.find(fetch.table.schema, fetch.table.table)
            asked = asked._replace(relation_id=relation_id)
        failpoints.reach("before_low")
        self._write(source, fetch, asked.relation_id, low=True)
        failpoints.reach("after_low")
        chunk = source.read(asked)
        failpoints.reach("after_select")
        fetch.chunk = chunk  # before its high watermark can arrive
        failpoints.reach("before_high")
        fetch.high_at = self._clock.monotonic()
        self._write(source, fetch, asked.relation_id, low=False)
        failpoints.reach("after_high")

    def _write(self, source: ChunkReader, fetch: Fetch, relation_id: int, *, low: bool) -> None:
        content = self.signer.watermark(fetch.snapshot, fetch.number, relation_id, low=low)
        source.write_message(watermarks.PREFIX, content)

    def _in_progress(self) -> InProgress:
        return self._connected().in_progress()

    def _disconnect(self) -> None:
        if source := self._source:
            self._source = None
            source.close()

    def _connected(self) -> ChunkReader:
        if self._closed:
            raise StoppedError
        if self._source is None:
            self._source = self._connect()
        return self._source
