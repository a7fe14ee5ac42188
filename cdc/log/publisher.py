"""Kafka transactions: fenced, acks=all, one after another.

The caller's order is `open`, then `begin`, `produce` and `add` as often as needed, `flush` and
`commit`. `open`, `flush` and `commit` block and must run on a worker; nothing else may be called
from `flush` to the end of `commit`. After any error the publisher is unusable: discard it, open
another, read the resume record. That resolves every doubt about a transaction's outcome.

https://github.com/confluentinc/librdkafka/blob/master/INTRODUCTION.md (transactional producer)
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from cdc import failpoints
from cdc.errors import ConfigError, InvariantError, UnavailableError
from cdc.log.client import MAX_MESSAGE_BYTES, settings, thrown, translate, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from confluent_kafka import Message

    from cdc.config import Config
    from cdc.log.batch import Batch, PartitionQueue

    Taken = Callable[[KafkaError | None, Message], None]

# How many writers take turns (`cdc.log.producer_pool`). A commit is answered before its markers are
# written, and a transaction that begins before that is refused once (CONCURRENT_TRANSACTIONS);
# librdkafka retries only 20 ms later. With three others in between, 5 to 15 ms pass.
PRODUCERS: Final = 4
# The suffixes of the transactional ids of the writers of small batches (`cdc.log.direct`).
DIRECT: Final = tuple(f"direct.{number}" for number in range(PRODUCERS))
# All writers that may append to the log: a start fences all of them, whatever its own settings are.
WRITERS: Final[tuple[int | str, ...]] = (*range(PRODUCERS), *DIRECT)
# The broker aborts a transaction that is open for longer; ours are open for milliseconds.
TRANSACTION_TIMEOUT_SECONDS: Final = 60
# What a topic accepts unless it is configured otherwise: Kafka's default is a little more.
BATCH_BYTES: Final = 1_000_000
_OPEN_TIMEOUT_SECONDS: Final = 30.0
# One attempt of a commit; after a retriable error or a timeout the same commit is retried.
_COMMIT_TRY_SECONDS: Final = 10.0
# What may wait in the producer of a dead letter or of a snapshot's rows: some batches for each of a
# few brokers, a fraction of a second.
IN_FLIGHT_BYTES: Final = 16 << 20
_POLL_SECONDS: Final = 0.05
# Brokers that accept nothing for this long are down; librdkafka itself would wait for minutes.
_STALLED_SECONDS: Final = 60.0
_PURGED: Final = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # noqa: SLF001


class Publisher:
    """One of the pipeline's writers (`cdc.log.producer_pool`)."""

    def __init__(
        self,
        config: Config,
        name: int | str = 0,
        *,
        transaction_seconds: int = TRANSACTION_TIMEOUT_SECONDS,
        transactional_id: str | None = None,
    ) -> None:
        """`name` ends the transactional id; a start fences it only if it is one of `WRITERS`.

        `transactional_id`, if given, is the complete one.
        """
        self.started = False
        # By partition: one past the newest record acknowledged; -1 if the broker did not report it.
        self._ends: dict[tuple[str, int], int] = {}
        self._failed: KafkaError | None = None
        self._abandoned = False
        self._unacknowledged_bytes = 0  # of what was handed over; counted where it is limited
        # Room for a complete batch and what comes while it commits: `produce` never finds it full.
        ending = f".{name}" if name else ""
        kbytes = max(4 * config.batch.max_bytes, 2 * MAX_MESSAGE_BYTES) // 1024 + 65_536
        ours: dict[str, str | float | bool] = {
            "transactional.id": transactional_id or f"{config.prefix}.{config.pipeline}{ending}",
            "transaction.timeout.ms": transaction_seconds * 1_000,
            "compression.type": "lz4",
            # Batches fill while a transaction is open; its commit sends what is left.
            "linger.ms": 20,
            "batch.size": BATCH_BYTES,
            "queue.buffering.max.messages": max(1_000_000, 8 * config.batch.max_events),
            "queue.buffering.max.kbytes": min(kbytes, 2_097_151),
            "message.max.bytes": MAX_MESSAGE_BYTES,
            "socket.nagle.disable": True,
        }
        with translated("creating a producer"):
            self.producer = Producer(settings(config, **ours))

    def open(self) -> None:
        """Fence every older writer of this pipeline and end its open transaction. Blocks."""
        deadline = time.monotonic() + _OPEN_TIMEOUT_SECONDS
        while True:
            try:
                self.producer.init_transactions(max(1.0, deadline - time.monotonic()))
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise translate(error.args[0], "fencing older writers") from error
            else:
                return

    def begin(self) -> None:
        """Begin a transaction if none is open."""
        if not self.started:
            with translated("beginning a Kafka transaction"):
                self.producer.begin_transaction()
            self.started = True

    def produce(self, batch: Batch) -> None:
        """Hand over the batch's waiting messages, each partition's in order."""
        self.begin()
        for partition in batch.waiting():
            self._hand_over(partition, self._delivered)
        batch.handed_over()
        with translated("producing"):
            self.producer.poll(0)

    def send_letters(self, batch: Batch) -> None:
        """Send the batch's dead letters, each record when there is room for it. Blocks.

        What waits for the brokers stays below `IN_FLIGHT_BYTES` whatever a letter's length, so the
        queue has room for it.
        """
        self.begin()
        for partition, key, value in batch.send_letters():
            self.send(partition.topic, key, value, None, partition.number)
            failpoints.reach("in_letter")

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None,
        number: int = 0,
    ) -> None:
        """Hand over one record, to that partition; wait while too many bytes are in flight."""
        self.begin()
        size, delivered = len(key or b"") + len(value or b""), self._delivered

        def taken(error: KafkaError | None, message: Message) -> None:
            delivered(error, message)
            self._unacknowledged_bytes -= size

        with translated(f"producing to {topic}"):
            self.producer.produce(
                topic,
                value,
                key,
                number,
                on_delivery=taken,
                headers={**headers} if headers else None,
            )
        self._unacknowledged_bytes += size
        self._wait_for_room("sending records")

    def _wait_for_room(self, doing: str) -> None:
        """Wait until at most `IN_FLIGHT_BYTES` are not acknowledged."""
        with translated("producing"):
            self.producer.poll(0)
            left, moved_at = self._unacknowledged_bytes, time.monotonic()
            while self._unacknowledged_bytes > IN_FLIGHT_BYTES:
                self.producer.poll(_POLL_SECONDS)
                if self._failed:
                    raise translate(self._why(self._failed), doing)
                if self._unacknowledged_bytes < left:
                    left, moved_at = self._unacknowledged_bytes, time.monotonic()
                elif self._abandoned or time.monotonic() - moved_at > _STALLED_SECONDS:
                    raise UnavailableError(
                        f"Kafka has taken nothing for {time.monotonic() - moved_at:.0f} s",
                        hint="see that the brokers run and log.bootstrap_servers is right",
                    )

    def _hand_over(self, partition: PartitionQueue, taken: Taken) -> None:
        """Hand over a partition's waiting messages; `taken` is called for the last of them."""
        messages = partition.take()
        # One report per partition and chunk is enough: it has the newest offset.
        messages[-1]["callback"] = taken
        with translated(f"producing to {partition.topic}"):
            try:
                queued = self.producer.produce_batch(partition.topic, messages, partition.number)
            except BufferError as error:
                raise ConfigError(
                    "the producer's queue is full within one batch",
                    hint="lower batch.max_events and batch.max_bytes, or take queue.buffering.*"
                    " out of log.kafka",
                ) from error
        if queued != len(messages):
            self._refused(partition.topic, messages[queued:])

    def add(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Hand over one record of our own, to partition 0; without a value it is a tombstone."""
        self.begin()
        with translated(f"producing to {topic}"):
            self.producer.produce(topic, value, key, 0, on_delivery=self._delivered)

    def flush(self) -> None:
        """Return when all that was handed over is acknowledged; raise if some can't be. Blocks."""
        with translated("sending a batch"):
            while self.producer.flush(_COMMIT_TRY_SECONDS):
                if self._abandoned:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001
        if self._failed:
            raise translate(self._why(self._failed), "sending a batch")

    def _why(self, failed: KafkaError) -> KafkaError:
        """Return the cause: a failed transaction only purges its messages, its commit raises it."""
        if failed.code() in _PURGED:
            try:
                self.producer.commit_transaction(_COMMIT_TRY_SECONDS)
            except (KafkaException, SystemError) as error:
                return thrown(error)
        return failed

    def take_ends(self) -> dict[tuple[str, int], int]:
        """Return the ends of the partitions that the last batch touched, once."""
        taken, self._ends = self._ends, {}
        return taken

    def commit(self) -> None:
        """Commit, however long it takes. Blocks. Raises the error that ends this publisher."""
        while True:
            try:
                self.producer.commit_transaction(_COMMIT_TRY_SECONDS)
            except (KafkaException, SystemError) as error:
                reason = thrown(error)
                if reason.retriable() and not self._abandoned:
                    continue
                if reason.txn_requires_abort():
                    self.abort()
                failed = self._failed
                if failed is None or failed.code() in _PURGED:  # of what the transaction held
                    failed = reason
                raise translate(failed, "committing a Kafka transaction") from error
            else:
                self.started = False
                return

    def abort(self) -> None:
        """Abort, so that readers do not wait for the broker to time the transaction out."""
        try:
            # Without the flush librdkafka may send the abort ahead of messages in flight, and the
            # broker answers with a fatal INVALID_TXN_STATE.
            self.producer.flush(_COMMIT_TRY_SECONDS)
            self.producer.abort_transaction(_COMMIT_TRY_SECONDS)
        except (KafkaException, SystemError) as error:
            # The next writer's `open` ends it. The client keeps a fatal error for good, and with
            # its traceback this publisher.
            raised: BaseException | None = error
            while raised is not None:
                raised.__traceback__ = None
                raised = raised.__cause__ or raised.__context__

    def close(self) -> None:
        """End an open transaction and drop what was not sent. Blocks.

        A message that is never reported refers to this publisher: librdkafka's threads,
        connections and queued rows would stay for as long as the process runs.
        """
        if self.started:
            self.abort()
            self.producer.purge()
            self.producer.poll(0)

    def abandon(self) -> None:
        """Stop retrying a commit in flight: its session is over."""
        self._abandoned = True

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed = error
            return
        offset = message.offset()
        partition = (str(message.topic()), int(message.partition() or 0))
        self._ends[partition] = -1 if offset is None or offset < 0 else offset + 1

    @staticmethod
    def _refused(topic: str, messages: list[dict[str, object]]) -> None:
        errors = [m["_error"] for m in messages if "_error" in m]
        if errors:
            raise translate(errors[0], f"producing to {topic}")  # type: ignore[arg-type]
        raise InvariantError(
            f"{len(messages)} messages for {topic} were neither queued nor refused"
        )


class BoundedPublisher(Publisher):
    """A publisher that holds at most `IN_FLIGHT_BYTES` that no broker has acknowledged.

    The daemon keeps its transactions small enough for the producer's queue. A snapshot's are as
    large as a range of a table, and reading is faster than writing: here `produce` waits for the
    brokers.
    """

    def produce(self, batch: Batch) -> None:
        """Hand over the batch's waiting messages; wait while too many bytes are in flight."""
        self.begin()
        self.send_letters(batch)
        partitions = batch.waiting()
        if not partitions:
            return
        size, unacknowledged = batch.bytes, len(partitions)
        batch.bytes = 0
        self._unacknowledged_bytes += size

        # Looked up beforehand: after a fatal error the client reports with an exception pending,
        # and then the interpreter finds no inherited method.
        delivered = self._delivered

        def taken(error: KafkaError | None, message: Message) -> None:
            nonlocal unacknowledged
            delivered(error, message)
            unacknowledged -= 1
            if not unacknowledged:
                self._unacknowledged_bytes -= size

        for partition in partitions:
            self._hand_over(partition, taken)
        self._wait_for_room("sending rows")


def fence(config: Config, names: Sequence[int | str] = WRITERS) -> Publisher:
    """Fence these writers and end their open transactions; return the first of them. Blocks.

    All at once: librdkafka takes up to half a second for each.
    """

    def opened(name: int | str) -> Publisher:
        made = Publisher(config, name)
        made.open()
        return made

    with ThreadPoolExecutor(len(names)) as threads:
        first, *_ = threads.map(opened, names)
    return first
