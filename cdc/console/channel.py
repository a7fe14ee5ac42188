"""One reader of a table for all of its clients: a thread, and the newest changes in memory.

The thread reads the log cut by cut and never waits for a client. What it has read is kept for
`LAG_SECONDS`, and longer while it is small; a client is only a position in it. One whose next
change is no longer kept is too slow, or has to read the log first (`stream`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from cdc.console.filters import Sent
from cdc.errors import CDCError, GapError, Policy
from cdc.log.frontier_search import FrontierSearch
from cdc.log.table_cuts import ReadStart, TableCuts, oldest_seq, start_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.records import FrontierRecord
    from cdc.log.table_cuts import TableCut

log = logging.getLogger("cdc.console.channel")

# The stated lag: a client that has not taken a change after so long is disconnected.
LAG_SECONDS: Final = 30.0
# Of one table, as clients get them; with parsed rows it is a few times as much.
KEPT_BYTES: Final = 32 << 20
# What is small is kept so long, for clients that come back.
_KEPT_SECONDS: Final = 300.0
# Changes are collected for this long, so that a thousand clients get four writes a second each.
GATHER_SECONDS: Final = 0.25
# A frontier without changes of the table is shown so often.
FRONTIER_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 3.0
# An error that may be temporary ends the streams once nothing could be read for so long.
FAILING_SECONDS: Final = 30.0
# How far before a client that comes back a reader starts: others come back with it, from earlier.
_BACK_OFFSETS: Final = 2_000


class StreamPart(NamedTuple):
    """What clients get at once: every change above `low` up to `high`, and the frontier there."""

    number: int
    low: int
    high: int
    changes: list[Sent]
    all: bytes  # the changes without a filter, and the frontier
    frontier: bytes  # empty within a large transaction
    at: float  # monotonic


def frontier_event(record: FrontierRecord) -> bytes:
    fields = {
        "seq": record.seq,
        "lsn": str(record.lsn),
        "epoch": record.epoch,
        "at_us": record.committed_at_us,
    }
    return b"id: %d\nevent: frontier\ndata: %s\n\n" % (record.seq, orjson.dumps(fields))


def chunk_of(number: int, cut: TableCut) -> StreamPart:
    changes = [Sent(change) for change in cut.changes]
    frontier = frontier_event(cut.frontier) if cut.frontier else b""
    everything = b"".join([*(each.body for each in changes), frontier])
    return StreamPart(number, cut.low, cut.high, changes, everything, frontier, time.monotonic())


def after(cut: TableCut, seq: int) -> TableCut:
    """Return a cut without what is not above a seq."""
    left = [each for each in cut.changes if each.seq > seq]
    return cut._replace(low=max(seq, cut.low), high=max(seq, cut.high), changes=left)


class Channel:
    """Follows one table until `close`. `changed` is called in its thread after each chunk."""

    def __init__(
        self,
        config: Config,
        topic: str,
        partitions: int,
        changed: Callable[[], None],
        *,
        earlier: bool,
    ) -> None:
        """Start at the newest frontier, or somewhat `earlier`; blocks for a moment."""
        self.error = ""  # why the table can't be followed any more
        self.reason = ""  # of `closed`, once there is an error: `gap` or `error`
        self._config, self._topic, self._changed = config, topic, changed
        with closing(FrontierSearch(config)) as search:
            newest = start_at(search, None)
            self._start = newest or ReadStart(search.first, 0, None)
            if earlier and newest is not None:
                start = start_at(search, None, back=_BACK_OFFSETS)
                numbers = [(topic, number) for number in range(partitions)]
                if start is not None and start.seq >= oldest_seq(config, search, numbers):
                    self._start = start
        self.newest = newest.seq if newest else 0  # of the log, when it started
        self._seq, self._record = self._start.seq, self._start.record
        self._chunks = deque[StreamPart]()
        self._next = 0  # the number of the next chunk
        self._bytes = 0
        self._lock = threading.Lock()
        self._failing_since: float | None = None  # monotonic; None while it is read
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cdc-console-stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the thread ends after its current read."""
        self._over.set()

    @property
    def high(self) -> int:
        """The seq up to which everything has been read."""
        return self._seq

    def number_after(self, seq: int) -> int | None:
        """Return the number of the first chunk with changes above a seq; None if not kept."""
        with self._lock:
            if not self._chunks:
                return self._next if seq >= self._seq else None
            if seq < self._chunks[0].low:
                return None
            return next((each.number for each in self._chunks if each.high > seq), self._next)

    def frontier_at(self, seq: int) -> bytes:
        """Return the event of the frontier with exactly this seq; empty if none is kept."""
        with self._lock:
            for each in reversed(self._chunks):
                if each.high == seq and each.frontier:
                    return each.frontier
        return frontier_event(self._record) if self._record and self._record.seq == seq else b""

    def since(self, number: int, most: int) -> list[StreamPart] | None:
        """Return the chunks from a number on, of about `most` bytes; None if it is not kept."""
        with self._lock:
            if not self._chunks:
                return [] if number >= self._next else None
            index = number - self._chunks[0].number
            if index < 0:
                return None
            found: list[StreamPart] = []
            size = 0
            while index < len(self._chunks) and (not found or size < most):
                found.append(self._chunks[index])
                size += len(self._chunks[index].all)
                index += 1
            return found

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._follow()
            except GapError as error:
                self._end("gap", f"{error.what}; {error.hint}")
            except CDCError as error:
                if self._is_lasting(error):
                    self._end("error", f"{error.what}; {error.hint}")
            except Exception as error:
                log.exception("cannot follow a table")
                self._end("error", f"a bug: {type(error).__name__}")
            if self.error:
                return
            self._over.wait(AGAIN_SECONDS)

    def _is_lasting(self, error: CDCError) -> bool:
        """Return whether an error ends the streams; the first of a series is logged."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            fields = {"topic": self._topic, "error": error.what, "to_do": error.hint}
            log.warning("cannot follow a table", extra={"fields": fields})
        return error.policy is Policy.HALT or now - self._failing_since >= FAILING_SECONDS

    def _end(self, reason: str, error: str) -> None:
        self.reason, self.error = reason, error  # in this order: clients look at the error first
        self._changed()

    def _follow(self) -> None:
        start = self._start
        if self._next:  # after an error
            with closing(FrontierSearch(self._config)) as search:
                start = start_at(search, self._seq) or start
        with closing(TableCuts(self._config, self._topic, start)) as cuts:
            low = self._seq
            held: TableCut | None = None
            shown_at, began = 0.0, time.monotonic()
            while not self._over.wait(GATHER_SECONDS):
                for cut in cuts.read(FRONTIER_SECONDS):
                    held = after(cut, low)
                    # Within a large transaction, and with changes: at once.
                    if held.changes or held.frontier is None:
                        low, held, shown_at = self._show(held), None, time.monotonic()
                    if self._over.is_set():
                        return
                if held and time.monotonic() - shown_at >= FRONTIER_SECONDS:
                    low, held, shown_at = self._show(held), None, time.monotonic()
                if time.monotonic() - began > FAILING_SECONDS:
                    self._failing_since = None  # nothing new is no error

    def _show(self, cut: TableCut) -> int:
        chunk = chunk_of(self._next, cut)
        if cut.high > self._seq:
            self._failing_since = None
        with self._lock:
            self._chunks.append(chunk)
            self._next += 1
            self._bytes += len(chunk.all)
            self._seq = cut.high
            while len(self._chunks) > 1 and (
                self._bytes > KEPT_BYTES or chunk.at - self._chunks[0].at > _KEPT_SECONDS
            ):
                self._bytes -= len(self._chunks.popleft().all)
        self._changed()
        return cut.high
