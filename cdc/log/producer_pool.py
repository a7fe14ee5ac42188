"""Transactional producers in turn: one sends a batch while the commits of others are in flight.

With one producer every change waits until the previous batch is sent and committed and its markers
are written. With several a batch may be sent as soon as the one before it has been acknowledged.
Not sooner: their records would mix within a partition. And the commits are sent in order, each when
the one before has ended, so the log always holds the stream up to some point, as with one producer.
A start fences all of them.

Each has a writer for large batches and, if `log.direct` allows it, one for small ones, each with a
transactional id of its own. Which of them sends a batch makes no difference to the order.

The producer whose commit has just ended is next: large batches need two, and the others cost
nothing meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc import failpoints
from cdc.errors import CDCError
from cdc.keyring.opening import ciphers_of
from cdc.log.direct.publisher import DirectPublisher
from cdc.log.direct.security import Unsupported
from cdc.log.publisher import DIRECT, TRANSACTION_TIMEOUT_SECONDS, Publisher
from cdc.log.trace import Moments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from cdc.config import Config
    from cdc.config.model import Log
    from cdc.log.batch import Batch, BatchContents
    from cdc.log.records import ResumePosition
    from cdc.runtime.background import BackgroundThread

log = logging.getLogger("cdc.log.producer_pool")

# A batch below this is small: round trips are most of its time. A larger one is worth compressing,
# and librdkafka sends it while it arrives.
SMALL_BYTES: Final = 24 << 10
# A batch that touches this many partitions, with little for each (`Batch.thin`), costs by its
# partitions: librdkafka sends a request for each of them, our own client one to each broker. Up to
# this size it is in memory three times while it is sent.
WIDE_PARTITIONS: Final = 64
WIDE_BYTES: Final = 32 << 20


def sends_small(log: Log) -> bool:
    """Return whether small batches are written directly, if the brokers can.

    With `auto`, not at replication factor 1: there a broker that dies while it ends a transaction
    may leave it open (docs/adr/0055), and with more transactions a second that happens more often.
    """
    return log.direct == "on" or (log.direct == "auto" and log.replication_factor > 1)


class PooledProducer:
    """A writer of large batches, one of small ones if there is any, and a worker for both."""

    def __init__(self, large: Publisher, worker: BackgroundThread) -> None:
        self.large = large
        self.direct: DirectPublisher | None = None
        self.worker = worker

    @property
    def writer(self) -> Publisher | DirectPublisher:
        """The writer with an open transaction; the one of large batches if none has one."""
        return self.direct if self.direct and self.direct.started else self.large


class InFlight(NamedTuple):
    """A batch in flight: first all of it is acknowledged, then it is committed."""

    producer: PooledProducer
    publisher: Publisher | DirectPublisher
    flushed: Future[None]
    ended: Future[None]
    position: ResumePosition  # where the log is when it is committed
    contents: BatchContents
    moments: Moments


class ProducerPool:
    """The pipeline's writers, and the batches in flight in their order."""

    def __init__(
        self,
        config: Config,
        workers: list[BackgroundThread],
        seconds: int = TRANSACTION_TIMEOUT_SECONDS,
    ) -> None:
        """One producer per worker; the caller owns the workers.

        The broker aborts a transaction of theirs that is open for `seconds`.
        """
        self._config, self._seconds = config, seconds
        self._ciphers = ciphers_of(config)
        self._sends_small = sends_small(config.log)
        self.producers = [
            PooledProducer(Publisher(config, number, transaction_seconds=seconds), worker)
            for number, worker in enumerate(workers)
        ]
        self._idle = deque(self.producers)  # the first is the current one
        self.in_flight: deque[InFlight] = deque()
        self._acknowledged = 0  # how many of those in flight, from the first

    @property
    def current(self) -> Publisher | DirectPublisher:
        """The current producer's writer."""
        return self._idle[0].writer

    @property
    def large(self) -> Publisher:
        """The current producer's writer of large batches."""
        return self._idle[0].large

    def begin(self, due: Batch | None) -> None:
        """Begin a transaction of the current producer, unless one is open.

        `due` is the batch if that is all it will hold, with our own records: only then may it be
        written directly.
        """
        producer = self._idle[0]
        if not producer.writer.started:
            direct = producer.direct if due is not None and self._is_direct(due) else None
            (direct or producer.large).begin()

    def _is_direct(self, batch: Batch) -> bool:
        """Return whether our own client writes this batch with less effort than librdkafka."""
        if batch.bytes < SMALL_BYTES:
            return self._sends_small
        is_wide = batch.thin and len(batch.waiting()) >= WIDE_PARTITIONS
        return is_wide and batch.bytes <= WIDE_BYTES

    @property
    def free(self) -> bool:
        """Whether the next batch may be sent: `acknowledged` has yielded all that were."""
        # Not `flushed.done()`: it may come true at any moment, and a frontier record must not be
        # written while the ends of a batch that it counts have not been taken.
        return self._acknowledged == len(self.in_flight) < len(self.producers)

    @property
    def has_results(self) -> bool:
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
        for producer in self.producers:
            producer.large.open()
        if self._config.log.direct == "off" or not self._open_direct():
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
            log.log(
                logging.WARNING if self._config.log.direct == "on" else logging.INFO,
                "all batches are left to librdkafka",
                extra={"fields": {"reason": str(why)}},
            )
            return False
        for producer, publisher in zip(self.producers, made, strict=True):
            producer.direct = publisher
        which = "small, wide" if self._sends_small else "wide"
        log.info("batches are written directly", extra={"fields": {"batches": which}})
        return True

    def commit(self, position: ResumePosition, contents: BatchContents, received_at: float) -> None:
        """Start the current writer's commit and make the next producer the current one.

        `received_at` is when the batch's first change was received.
        """
        producer = self._idle.popleft()
        publisher, worker = producer.writer, producer.worker
        moments = Moments(received_at, time.monotonic())
        before = self.in_flight[-1].ended if self.in_flight else None
        flushed = worker.submit(publisher.flush)

        def end() -> None:
            try:
                flushed.result()
                moments.acknowledged = time.monotonic()
                failpoints.reach("after_flush")
                if self._ciphers:
                    self._ciphers.make_durable()
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
        self.in_flight.append(
            InFlight(producer, publisher, flushed, ended, position, contents, moments)
        )

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
            self._idle.insert(1, batch.producer)
            yield batch

    def abandon(self) -> None:
        """Stop retrying commits in flight, and end an open transaction: their session is over.

        Does not wait: it ends on its worker, harmlessly if the next session has fenced it by then.
        """
        for producer in self.producers:
            producer.large.abandon()
            if producer.direct:
                producer.direct.abandon()
                producer.worker.submit(producer.direct.close)  # after what is in flight
        for producer in self._idle:  # what is in flight ends its transaction itself
            if producer.large.started:
                producer.worker.submit(producer.large.close)
