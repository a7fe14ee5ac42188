"""Transactional producers in turn: one sends a batch while the commits of others are in flight.

With one producer every change waits until the previous batch is sent and committed and its markers
are written. With several a batch may be sent as soon as the one before it has been acknowledged.
Not sooner: their records would mix within a partition. And the commits are sent in order, each when
the one before has ended, so the log always holds the stream up to some point, as with one producer.
A start fences all of them.

A lane has a writer for large batches and, if `log.direct` allows it, one for small ones, each with
a transactional id of its own. Which of them sends a batch makes no difference to the order.

The lane whose commit has just ended is next: large batches need two lanes, and the others cost
nothing meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc import failpoints
from cdc.errors import CDCError
from cdc.log.direct.publisher import DirectPublisher
from cdc.log.direct.security import Unsupported
from cdc.log.publisher import DIRECT, TRANSACTION_TIMEOUT_SECONDS, Publisher
from cdc.log.trace import Moments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from cdc.config import Config
    from cdc.config.model import Log
    from cdc.log.records import ResumePosition
    from cdc.operate.metrics import Cut
    from cdc.runtime.background import Worker

log = logging.getLogger("cdc.log.producer_pool")

# A batch below this is small: round trips are most of its time. A larger one is worth compressing,
# and librdkafka sends it while it arrives.
SMALL_BYTES: Final = 24 << 10


def wants_direct(log: Log) -> bool:
    """Return whether small batches are to have writers of their own, if the brokers can.

    With `auto`, not at replication factor 1: there a broker that dies while it ends a transaction
    may leave it open (docs/adr/0055), and with more transactions a second that happens more often.
    """
    return log.direct == "on" or (log.direct == "auto" and log.replication_factor > 1)


class Lane:
    """A writer of large batches, one of small ones if there is any, and a worker for both."""

    def __init__(self, large: Publisher, worker: Worker) -> None:
        self.large = large
        self.small: DirectPublisher | None = None
        self.worker = worker

    @property
    def writer(self) -> Publisher | DirectPublisher:
        """The writer with an open transaction; the one of large batches if none has one."""
        return self.small if self.small and self.small.begun else self.large


class InFlight(NamedTuple):
    """A batch in flight: first all of it is acknowledged, then it is committed."""

    lane: Lane
    publisher: Publisher | DirectPublisher
    flushed: Future[None]
    ended: Future[None]
    position: ResumePosition  # where the log is when it is committed
    cut: Cut
    moments: Moments


class Lanes:
    """The pipeline's writers, and the batches in flight in their order."""

    def __init__(
        self, config: Config, workers: list[Worker], seconds: int = TRANSACTION_TIMEOUT_SECONDS
    ) -> None:
        """One lane per worker; the caller owns the workers.

        The broker aborts a transaction of theirs that is open for `seconds`.
        """
        self._config, self._seconds = config, seconds
        self._lanes = [
            Lane(Publisher(config, lane, transaction_seconds=seconds), worker)
            for lane, worker in enumerate(workers)
        ]
        self._idle = deque(self._lanes)  # the first is the current one
        self.in_flight: deque[InFlight] = deque()
        self._acknowledged = 0  # how many of those in flight, from the first

    @property
    def current(self) -> Publisher | DirectPublisher:
        """The current lane's writer."""
        return self._idle[0].writer

    @property
    def large(self) -> Publisher:
        """The current lane's writer of large batches."""
        return self._idle[0].large

    def begin(self, size: int) -> None:
        """Begin a transaction of the current lane for `size` bytes, unless one is open.

        If `size` is below `SMALL_BYTES`, only our own records may be added later.
        """
        lane = self._idle[0]
        if not lane.writer.begun:
            (lane.small if lane.small and size < SMALL_BYTES else lane.large).begin()

    @property
    def free(self) -> bool:
        """Whether the next batch may be sent: `acknowledged` has yielded all that were."""
        # Not `flushed.done()`: it may come true at any moment, and a frontier record must not be
        # written while the ends of a batch that it counts have not been taken.
        return self._acknowledged == len(self.in_flight) < len(self._lanes)

    @property
    def settling(self) -> bool:
        """Whether `acknowledged` or `committed` has something to yield."""
        batches, known = self.in_flight, self._acknowledged
        return (known < len(batches) and batches[known].flushed.done()) or (
            known > 0 and batches[0].ended.done()
        )

    @property
    def waiting_seconds(self) -> float:
        """How long the oldest batch has been in flight; 0 if there is none."""
        return time.monotonic() - self.in_flight[0].moments.handed_over if self.in_flight else 0.0

    def open(self) -> None:
        """Fence every older writer, those of small batches too even if unused now. Blocks."""
        for lane in self._lanes:
            lane.large.open()
        if not wants_direct(self._config.log) or not self._open_direct():
            for name in DIRECT:
                Publisher(self._config, name).open()

    def _open_direct(self) -> bool:
        """Return whether small batches have writers of their own."""
        config, made = self._config, list[DirectPublisher]()
        try:
            for name in DIRECT:
                made.append(DirectPublisher(config, name, self._seconds))
                made[-1].open()
        except (Unsupported, CDCError) as why:
            for publisher in made:
                publisher.close()
            # Not worth a stop: librdkafka, which has just reached the brokers, does the same.
            log.warning(
                "small batches are left to librdkafka", extra={"fields": {"reason": str(why)}}
            )
            return False
        for lane, publisher in zip(self._lanes, made, strict=True):
            lane.small = publisher
        log.info("small batches are written directly", extra={"fields": {"writers": len(made)}})
        return True

    def commit(self, position: ResumePosition, cut: Cut, received_at: float) -> None:
        """Start the current writer's commit and make the next lane the current one.

        `received_at` is when the batch's first change was received.
        """
        lane = self._idle.popleft()
        publisher, worker = lane.writer, lane.worker
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

        ended = worker.submit(end)
        self.in_flight.append(InFlight(lane, publisher, flushed, ended, position, cut, moments))

    def acknowledged(self) -> Iterator[InFlight]:
        """Yield each batch that has been acknowledged; raise the error of one that can't be."""
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
            # After the current one, which may have started to send.
            self._idle.insert(1, batch.lane)
            yield batch

    def abandon(self) -> None:
        """Stop retrying commits in flight: their session is over."""
        for lane in self._lanes:
            lane.large.abandon()
            if lane.small:
                lane.small.abandon()
                lane.worker.submit(lane.small.close)  # after what is in flight
