"""The part of Kafka that a transactional producer and a read_committed reader can see.

Partitions hold records and transaction markers, each with an offset. A transactional id has an
epoch; `init_transactions` raises it and aborts what an older producer left open, and a producer
with an older epoch is fenced. `Producer` has the methods of confluent-kafka's that the publisher
calls, and its errors; the schedule decides which acknowledgements are lost and which requests never
arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException

if TYPE_CHECKING:
    from tests.simulation.scheduler import Scheduler

Place = tuple[str, int]  # topic, partition


class Record(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass
class Transaction:
    """What one transaction has written so far: offsets by partition."""

    writer: str
    written: dict[Place, list[Record]] = field(default_factory=dict)


class Broker:
    """The committed records, and the current writers."""

    def __init__(self) -> None:
        self.committed: dict[Place, list[Record]] = {}
        self.ends: dict[Place, int] = {}
        self.epochs: dict[str, int] = {}
        self.open: dict[str, Transaction] = {}
        self.late = ""  # the writer whose last commit request is still on its way
        # Called with every transaction that commits, once a reader can see it.
        self.watch: Callable[[Transaction], None] = lambda _: None

    def fence(self, writer: str) -> int:
        """Raise the writer's epoch and abort what is open; return the epoch."""
        self.epochs[writer] = self.epochs.get(writer, 0) + 1
        self.abort(writer)
        return self.epochs[writer]

    def append(self, writer: str, place: Place, key: bytes | None, value: bytes | None) -> int:
        """Write into the writer's transaction; return the record's offset."""
        transaction = self.open.setdefault(writer, Transaction(writer))
        offset = self.ends.get(place, 0)
        self.ends[place] = offset + 1
        transaction.written.setdefault(place, []).append(Record(offset, key, value))
        return offset

    def stable(self, place: Place) -> int:
        """Return the last stable offset: the first record of an open transaction, or the end."""
        held = [
            each.written[place][0].offset for each in self.open.values() if place in each.written
        ]
        return min([self.ends.get(place, 0), *held])

    def commit(self, writer: str) -> None:
        transaction = self._end(writer)
        if transaction is None:
            return
        for place, written in transaction.written.items():
            self.committed.setdefault(place, []).extend(written)
        self.watch(transaction)

    def abort(self, writer: str) -> None:
        self._end(writer)

    def _end(self, writer: str) -> Transaction | None:
        if self.late == writer:
            self.late = ""
        transaction = self.open.pop(writer, None)
        if transaction is not None:
            for place in transaction.written:
                self.ends[place] += 1  # the marker
        return transaction


_TIMED_OUT: Final = KafkaError._TIMED_OUT
_RETRIABLE: Final = {"retriable": True}


def _error(code: int, **what: bool) -> KafkaException:
    return KafkaException(KafkaError(code, "simulated", **what))


class Producer:
    """confluent_kafka.Producer, in one process; `settings` as the publisher gives them."""

    def __init__(self, broker: Broker, scheduler: Scheduler, settings: dict[str, Any]) -> None:
        self._broker = broker
        self._scheduler = scheduler
        self.writer: str = settings["transactional.id"]
        self.epoch = 0
        self._started = False
        self._ending = False  # the commit has been sent, its answer has not arrived
        self._unsent: list[tuple[Place, dict[str, Any]]] = []
        self._reports: list[tuple[Callable[..., None], Message]] = []

    # -- what the publisher calls ------------------------------------------------------------------

    def init_transactions(self, _timeout: float) -> None:
        if self._scheduler.happens("init times out"):
            raise _error(_TIMED_OUT, retriable=True)
        if self._scheduler.happens("coordinator is wrong"):
            raise _error(KafkaError.NOT_COORDINATOR, retriable=True)
        self.epoch = self._broker.fence(self.writer)

    def begin_transaction(self) -> None:
        assert not self._started, "a transaction begins inside another"
        self._started, self._ending = True, False

    def produce_batch(self, topic: str, messages: list[dict[str, Any]], partition: int) -> int:
        self._unsent += [((topic, partition), message) for message in messages]
        return len(messages)

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes,
        partition: int,
        *,
        on_delivery: Callable[..., None],
        headers: None = None,
    ) -> None:
        assert headers is None
        message = {"key": key, "value": value, "callback": on_delivery}
        self._unsent.append(((topic, partition), message))

    def poll(self, _timeout: float) -> int:
        """Send some of the waiting messages, and deliver some reports."""
        self._send(self._scheduler.some(len(self._unsent)))
        self._report(self._scheduler.some(len(self._reports)))
        return 0

    def flush(self, _timeout: float) -> int:
        """Send all; return how many are not acknowledged yet."""
        if self._scheduler.happens("flush times out"):
            self._send(self._scheduler.some(len(self._unsent)))
            self._report(self._scheduler.some(len(self._reports)))
            return len(self._unsent) + len(self._reports)
        self._send(len(self._unsent))
        self._report(len(self._reports))
        return 0

    def commit_transaction(self, _timeout: float) -> None:
        assert self._started, "nothing to commit"
        if not self._ending:
            self._send(len(self._unsent))
            self._report(len(self._reports))
            self._fenced()
            if self._scheduler.happens("commit is refused"):
                raise _error(KafkaError.INVALID_TXN_STATE, txn_requires_abort=True)
            if self._scheduler.happens("commit request is lost"):
                raise _error(_TIMED_OUT, retriable=True)
            self._ending = True
            self._broker.commit(self.writer)
            if self._scheduler.happens("commit answer is lost"):
                raise _error(_TIMED_OUT, retriable=True)
            if self._scheduler.happens("commit outcome is unknown"):
                raise _error(KafkaError._FATAL, fatal=True)
        self._started = False

    def abort_transaction(self, _timeout: float) -> None:
        self._fenced()
        if self._scheduler.happens("abort is lost"):
            raise _error(_TIMED_OUT, retriable=True)
        self._broker.abort(self.writer)
        self._started = False

    def purge(self) -> None:
        """Drop what was not sent."""
        self._unsent = []

    # -- between the producer and the broker -------------------------------------------------------

    def _send(self, count: int) -> None:
        going, self._unsent = self._unsent[:count], self._unsent[count:]
        if going:
            self._fenced()
        for place, message in going:
            offset = self._broker.append(self.writer, place, message["key"], message["value"])
            if "callback" in message:
                reported = -1 if self._scheduler.happens("report has no offset") else offset
                self._reports.append((message["callback"], Message(place, reported)))

    def _report(self, count: int) -> None:
        coming, self._reports = self._reports[:count], self._reports[count:]
        for callback, message in coming:
            callback(None, message)

    def _fenced(self) -> None:
        if self._broker.epochs.get(self.writer) != self.epoch:
            raise _error(KafkaError._FENCED, fatal=True)


class Message:
    """A delivery report's message."""

    def __init__(self, place: Place, offset: int) -> None:
        self._place, self._offset = place, offset

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._offset
