"""Transactional producers in turn: one sends a batch while the commits of others are on their way.

With one producer every change waits for the batch before: sent, committed, its markers written.
With several a batch may be sent as soon as the one before it has been acknowledged. Not sooner:
their records would mix within a partition. And the commits go out in order, each when the one
before has ended, so what the log holds is at every moment the stream up to some point, as with one
producer. A start fences all of them.

Whoever has just ended is next: large batches need two, and the others cost nothing meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cdc import failpoints
from cdc.errors import CDCError
from cdc.log.publisher import TRANSACTION_TIMEOUT_SECONDS, Publisher
from cdc.trace import Moments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from cdc.config import Config
    from cdc.control.metrics import Cut
    from cdc.log.records import ResumePosition
    from cdc.worker import Worker


class InFlight(NamedTuple):
    """A batch on its way: first all of it is acknowledged, then it is committed."""

    lane: tuple[Publisher, Worker]
    flushed: Future[None]
    ended: Future[None]
    position: ResumePosition  # where the log stands when it is committed
    cut: Cut
    moments: Moments

    @property
    def publisher(self) -> Publisher:
        """Who sends it."""
        return self.lane[0]


class Lanes:
    """The pipeline's writers, and the batches in flight in their order."""

    def __init__(
        self, config: Config, workers: list[Worker], seconds: int = TRANSACTION_TIMEOUT_SECONDS
    ) -> None:
        """One writer a worker; the workers stay the caller's.

        The broker aborts a transaction of theirs that is open for `seconds`.
        """
        self._lanes = [
            (Publisher(config, lane, transaction_seconds=seconds), worker)
            for lane, worker in enumerate(workers)
        ]
        self._idle = deque(self._lanes)  # the first is the current one
        self.in_flight: deque[InFlight] = deque()
        self._acknowledged = 0  # so many of those in flight, from the first

    @property
    def current(self) -> Publisher:
        """Whose turn it is."""
        return self._idle[0][0]

    @property
    def free(self) -> bool:
        """Whether the next batch may be sent: `acknowledged` has told all that were."""
        # Not `flushed.done()`: it may come true at any moment, and a frontier record must not be
        # written while the ends of a batch that it counts have not been taken.
        return self._acknowledged == len(self.in_flight) < len(self._lanes)

    @property
    def settling(self) -> bool:
        """Whether `acknowledged` or `committed` has something to tell."""
        batches, known = self.in_flight, self._acknowledged
        return (known < len(batches) and batches[known].flushed.done()) or (
            known > 0 and batches[0].ended.done()
        )

    @property
    def waiting_seconds(self) -> float:
        """For how long the oldest batch has been on its way; 0 where none is."""
        return time.monotonic() - self.in_flight[0].moments.handed_over if self.in_flight else 0.0

    def open(self) -> None:
        """Fence every older writer. Blocks."""
        for publisher, _ in self._lanes:
            publisher.open()

    def commit(self, position: ResumePosition, cut: Cut, received_at: float) -> None:
        """Send the current writer's commit on its way; it is the next one's turn.

        `received_at` is when the batch's first change was received.
        """
        lane = publisher, worker = self._idle.popleft()
        moments = Moments(received_at, time.monotonic())
        before = self.in_flight[-1].ended if self.in_flight else None
        flushed = worker.submit(publisher.flush)

        def end() -> None:
            try:
                flushed.result()
                moments.acknowledged = time.monotonic()
                failpoints.reach("after_flush")
                if before:
                    before.result()
                    failpoints.reach("in_turn")
                moments.in_turn = time.monotonic()
            except CDCError:
                publisher.abort()
                raise
            publisher.commit()
            moments.answered = time.monotonic()

        self.in_flight.append(InFlight(lane, flushed, worker.submit(end), position, cut, moments))

    def acknowledged(self) -> Iterator[InFlight]:
        """Yield each batch that has come to be acknowledged; raise why one can't be."""
        while self._acknowledged < len(self.in_flight):
            batch = self.in_flight[self._acknowledged]
            if not batch.flushed.done():
                return
            batch.flushed.result()
            self._acknowledged += 1
            yield batch

    def committed(self) -> Iterator[InFlight]:
        """Yield each acknowledged batch whose commit has ended; raise what went wrong."""
        while self._acknowledged and self.in_flight[0].ended.done():
            batch = self.in_flight.popleft()
            batch.ended.result()
            self._acknowledged -= 1
            # Behind the current one, which may have begun to send.
            self._idle.insert(1, batch.lane)
            yield batch

    def abandon(self) -> None:
        """Let commits in flight end at their next doubt: their session is over."""
        for publisher, _ in self._lanes:
            publisher.abandon()
