"""A writer of small Kafka transactions, with the semantics of `cdc.log.publisher.Publisher`.

What is handed over is kept until `flush` sends it: one Produce request to each broker that leads
any of the partitions, sent to all of them before the first answer is awaited. With transactions V2
each end of a transaction raises the epoch, so the records of each partition are numbered from 0 in
each transaction. A retry, after an answer was lost or a leader has moved, sends the same bytes: the
brokers recognize them by producer, epoch and number, and append them once.

https://cwiki.apache.org/confluence/display/KAFKA/KIP-890:+Transactions+Server-Side+Defense
"""

from __future__ import annotations

import time
from collections import deque
from threading import Event
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import KafkaError

from cdc.errors import OutcomeUnknownError
from cdc.log.client import translate
from cdc.log.direct import records, requests, security
from cdc.log.direct.brokers import Brokers
from cdc.log.direct.connection import LoginError, LostError
from cdc.log.direct.requests import (
    END_TXN,
    INIT_PRODUCER_ID,
    NEEDED,
    PRODUCE,
    Broker,
    Error,
    Written,
)
from cdc.log.direct.security import Unsupported
from cdc.log.direct.wire import MalformedError
from cdc.log.publisher import BATCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cdc.config import Config
    from cdc.log.batch import Batch, Message
    from cdc.log.direct.requests import Api, Producer
    from cdc.log.partitions import Partition

_OPEN_SECONDS: Final = 10.0
# librdkafka's `socket.timeout.ms` as `cdc.log.client` sets it: by then there is another leader.
_ANSWER_MS: Final = 20_000
# The share of it that a leader may wait for the other replicas.
_COPIES_SHARE: Final = 0.75
# The pause between attempts, doubling from the first to the second value: a leader or a coordinator
# moves in tens of milliseconds to seconds.
_PAUSE_SECONDS: Final = (0.02, 0.5)
# The same while the markers of the id's last transaction are written: a few milliseconds.
_MARKERS_SECONDS: Final = (0.001, 0.02)

_MARKERS: Final = 51  # CONCURRENT_TRANSACTIONS
_TAKEN_BEFORE: Final = 46  # DUPLICATE_SEQUENCE_NUMBER
# Another broker is or becomes the leader: look it up.
_LEADER_MOVED: Final = frozenset(
    (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    )
)
_COORDINATOR_MOVED: Final = frozenset(
    (KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR)
)
# Temporary errors.
_AGAIN: Final = _COORDINATOR_MOVED | frozenset(
    (
        _MARKERS,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    )
)
# All errors that pass by themselves.
_PASSES: Final = _AGAIN | _LEADER_MOVED


class _Chunk(NamedTuple):
    """A record batch, and what is in it."""

    data: bytes
    messages: list[Message]
    number: int  # of its first record


class DirectPublisher:
    """One of the pipeline's writers (`cdc.log.producer_pool`), by the same rules as `Publisher`."""

    def __init__(self, config: Config, name: str, transaction_seconds: int) -> None:
        """`name` ends the transactional id. Raises Unsupported if librdkafka must do it."""
        if not records.QUICK:
            raise Unsupported("google-crc32c has no compiled part here")
        settings = config.log.kafka
        self.started = False
        self.transactional_id = f"{config.prefix}.{config.pipeline}.{name}"
        self.transaction_ms = int(
            settings.get("transaction.timeout.ms", 1_000 * transaction_seconds)
        )
        longest_ms = min(_ANSWER_MS, self.transaction_ms)
        self._answer_seconds = int(settings.get("socket.timeout.ms", longest_ms)) / 1_000
        self.brokers = Brokers(
            config.log.bootstrap_servers,
            security.of(settings),
            str(settings.get("client.id", f"lockstep-{config.pipeline}")),
            self._answer_seconds,
        )
        self.producer: Producer = requests.NOBODY
        self._handed_over: dict[Partition, list[Message]] = {}
        self._numbers: dict[Partition, int] = {}  # of the next record, within the transaction
        self._sent = False  # whether a broker may know of the transaction
        # By partition: one past the newest record acknowledged; -1 if the broker did not report it.
        self._ends: dict[Partition, int] = {}
        self._abandoned = Event()

    # -- the start ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Fence every older writer of this id and end its open transaction. Blocks.

        Raises Unsupported if the brokers have no transactions V2.
        """
        body = requests.init_producer_id(self.transactional_id, self.transaction_ms)

        def ask() -> Producer | Error:
            self._expect_v2()
            return self.ask_coordinator(INIT_PRODUCER_ID, body)

        deadline = time.monotonic() + _OPEN_SECONDS
        tries = _Tries(self._abandoned, "fencing older writers", deadline)
        self.producer = tries.until_answered(ask)

    def _expect_v2(self) -> None:
        found = self.brokers.features()
        if isinstance(found, Error):
            raise Unsupported(f"the brokers do not speak ApiVersions 3 (error {found.code})")
        level = found.finalized.get(requests.TRANSACTION_VERSION, 0)
        if level < requests.TRANSACTIONS_V2:
            raise Unsupported(f"the cluster's transaction.version is {level}, and 2 is needed")
        for key, version in NEEDED:
            lowest, highest = found.versions.get(key, (0, -1))
            if not lowest <= version <= highest:
                raise Unsupported(f"the brokers lack version {version} of request {key}")

    # -- a transaction -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a transaction if none is open."""
        self.started = True

    def produce(self, batch: Batch) -> None:
        """Take the batch's waiting messages, each partition's in order; `flush` sends them."""
        self.begin()
        for queue in batch.waiting():
            partition = queue.topic, queue.number
            self._handed_over.setdefault(partition, []).extend(queue.take())
        batch.handed_over()

    def add(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Take one record of our own, for partition 0; without a value it is a tombstone."""
        self.begin()
        self._handed_over.setdefault((topic, 0), []).append({"key": key, "value": value})

    def flush(self) -> None:
        """Return when all that was handed over is acknowledged; raise if some can't be. Blocks."""
        waiting = {partition: deque(chunks) for partition, chunks in self._chunks()}
        deadline = time.monotonic() + self.transaction_ms / 1_000
        tries = _Tries(self._abandoned, "sending a batch", deadline)
        while waiting:
            try:
                self.brokers.learn(waiting)
            except LostError as error:
                tries.lost(error)
                continue
            heads = {partition: chunks[0] for partition, chunks in waiting.items()}
            answers, lost = self._send(heads)
            failed: Error | None = None
            for partition, answer in answers.items():
                refused = self._judge(partition, answer, waiting)
                if refused and (failed is None or failed.code in _PASSES):
                    failed = refused
            if failed:
                tries.refused(failed)
            elif lost:
                tries.lost(lost)

    def _judge(
        self, partition: Partition, answer: Written, waiting: dict[Partition, deque[_Chunk]]
    ) -> Error | None:
        """Note a partition's answer to its first record batch; return the error if refused."""
        chunks = waiting[partition]
        if answer.code in (0, _TAKEN_BEFORE):
            count = len(chunks.popleft().messages)
            self._ends[partition] = answer.base_offset + count if answer.base_offset >= 0 else -1
            if not chunks:
                del waiting[partition]
            return None
        if answer.code == KafkaError.MSG_SIZE_TOO_LARGE and len(chunks[0].messages) > 1:
            chunks.extendleft(reversed([*self._singly(chunks.popleft())]))
            return None
        if answer.code in _LEADER_MOVED:
            self.brokers.moved(partition)
        return Error(answer.code, answer.message)

    def _chunks(self) -> Iterator[tuple[Partition, list[_Chunk]]]:
        """Yield what was handed over as record batches, and forget it."""
        now_ms = time.time_ns() // 1_000_000
        for partition, messages in self._handed_over.items():
            chunks = []
            number = self._numbers.get(partition, 0)
            for part in records.parts(messages, BATCH_BYTES):
                chunks.append(self._chunk(part, number, now_ms))
                number += len(part)
            self._numbers[partition] = number
            yield partition, chunks
        self._handed_over = {}

    def _chunk(self, messages: list[Message], number: int, now_ms: int) -> _Chunk:
        data = records.batch(messages, *self.producer, number, now_ms)
        return _Chunk(data, messages, number)

    def _singly(self, chunk: _Chunk) -> Iterator[_Chunk]:
        """Yield the records of a batch that its topic does not accept, each as its own batch."""
        now_ms = time.time_ns() // 1_000_000
        for at, message in enumerate(chunk.messages):
            yield self._chunk([message], chunk.number + at, now_ms)

    def _send(
        self, heads: Mapping[Partition, _Chunk]
    ) -> tuple[dict[Partition, Written], LostError | None]:
        """Send a record batch to each partition; return the answers, and why some are missing."""
        by_node: dict[Broker, dict[str, list[tuple[int, bytes]]]] = {}
        answers: dict[Partition, Written] = {}
        lost: LostError | None = None
        for (topic, number), chunk in heads.items():
            node = self.brokers.leader((topic, number))
            if node is None:
                code = self.brokers.why((topic, number)) or KafkaError.LEADER_NOT_AVAILABLE
                answers[topic, number] = Written(topic, number, code, -1, None)
            else:
                by_node.setdefault(node, {}).setdefault(topic, []).append((number, chunk.data))
        asked = []
        copies_ms = int(_COPIES_SHARE * 1_000 * self._answer_seconds)
        for node, batches in by_node.items():
            try:
                connection = self.brokers.connection(node)
                self._sent = True
                connection.send(
                    PRODUCE, requests.produce(self.transactional_id, batches, copies_ms)
                )
                asked.append((node, connection))
            except LostError as error:
                self.brokers.lost(node)
                lost = error
        for node, connection in asked:
            try:
                for written in requests.read_produce(connection.receive()):
                    answers[written.topic, written.partition] = written
            except (MalformedError, LostError) as error:
                self.brokers.lost(node)
                lost = LostError(str(error))
        if unknown := answers.keys() ^ heads.keys():
            lost = lost or LostError(f"the brokers' answer is not about {min(unknown)}")
        return {partition: answers[partition] for partition in heads if partition in answers}, lost

    def take_ends(self) -> dict[Partition, int]:
        """Return the ends of the partitions that the last batch touched, once."""
        taken, self._ends = self._ends, {}
        return taken

    def commit(self) -> None:
        """Commit, however long it takes. Blocks. Raises the error that ends this publisher.

        If the request is repeated after the answer was lost, the coordinator sees from the epoch
        that it has committed, and answers so: the request only ever means this transaction.
        """
        assert not self._handed_over, "a commit follows a flush"
        body = requests.end_txn(self.transactional_id, self.producer, commit=True)
        tries = _Tries(self._abandoned, "committing a Kafka transaction", None)
        self.producer = tries.until_answered(lambda: self.ask_coordinator(END_TXN, body))
        self._numbers.clear()
        self.started = self._sent = False

    def abort(self) -> None:
        """Abort, so that readers do not wait for the broker to time the transaction out."""
        if not self._sent:
            return
        body = requests.end_txn(self.transactional_id, self.producer, commit=False)
        try:
            self.ask_coordinator(END_TXN, body)
        except LostError:
            return  # the next writer's `open` ends it

    def ask_coordinator(self, api: Api, body: bytes) -> Producer | Error:
        """Send a request to the coordinator of our transactions; return its answer."""
        node = self.brokers.coordinator(self.transactional_id)
        if isinstance(node, Error):
            return node
        found = self.brokers.ask(node, api, body, requests.read_producer)
        if isinstance(found, Error) and found.code in _COORDINATOR_MOVED:
            self.brokers.coordinator_moved()
        return found

    # -- the end -----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Interrupt requests in flight: their session is over. From any thread."""
        self._abandoned.set()
        self.brokers.cut()

    def close(self) -> None:
        """Close the connections; nothing may be in flight."""
        self.brokers.close()


class _Tries:
    """Retries something until a deadline, with growing pauses."""

    def __init__(self, abandoned: Event, doing: str, deadline: float | None) -> None:
        """`doing` names what is tried; without a deadline only `abandoned` ends the retries."""
        self._abandoned, self._doing, self._deadline = abandoned, doing, deadline
        self._pause, self._pause_max = _PAUSE_SECONDS
        self._markers, self._markers_max = _MARKERS_SECONDS

    def until_answered(self, ask: Callable[[], Producer | Error]) -> Producer:
        """Return what `ask` returns, once it is no error that passes by itself."""
        while True:
            try:
                found = ask()
            except LostError as error:
                self.lost(error)
                continue
            if not isinstance(found, Error):
                return found
            self.refused(found)

    def refused(self, error: Error) -> None:
        """Wait until it may be retried; raise if a retry is useless."""
        code = error.code
        if code == _MARKERS:
            self._wait(self._markers, KafkaError(code))
            self._markers = min(2 * self._markers, self._markers_max)
        elif code in _PASSES:
            self._wait_longer(KafkaError(code))
        else:
            raise translate(KafkaError(code, error.message, fatal=True), self._doing)

    def lost(self, error: LostError) -> None:
        """Wait until another connection may be tried; raise if that is useless."""
        if isinstance(error, LoginError):
            reason = KafkaError(KafkaError._AUTHENTICATION, str(error))  # noqa: SLF001
            raise translate(reason, self._doing) from error
        self._wait_longer(KafkaError(KafkaError._TRANSPORT, str(error)))  # noqa: SLF001

    def _wait_longer(self, reason: KafkaError) -> None:
        self._wait(self._pause, reason)
        self._pause = min(2 * self._pause, self._pause_max)

    def _wait(self, seconds: float, reason: KafkaError) -> None:
        if self._abandoned.wait(seconds):
            raise OutcomeUnknownError(
                f"{self._doing}: abandoned", hint="the next session reads the resume record"
            )
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise translate(reason, self._doing)
