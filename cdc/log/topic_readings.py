"""Read a compacted topic with a consumer that stays open: what is new costs next to nothing."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from confluent_kafka import IsolationLevel, KafkaError

from cdc.errors import CDCError
from cdc.log import absence, topics
from cdc.log.client import translate, translated
from cdc.log.consumer import BEGINNING, LogConsumer

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.admin import AdminClient

    from cdc.config import Config

_TIMEOUT_SECONDS: Final = 15.0


class TopicReadings(ABC):
    """Reads a topic's only partition, again and again; `note` and `forget` keep what it holds."""

    def __init__(self, config: Config, topic: str) -> None:
        self._config = config
        self._topic = topic
        self._admin: AdminClient | None = None
        self._partition = (topic, 0)
        self._consumer: LogConsumer | None = None

    @abstractmethod
    def note(self, message: Message) -> None:
        """Take the next record."""

    @abstractmethod
    def forget(self) -> None:
        """Drop everything: the topic, or another of the same name, is read from its beginning."""

    def read_new(self, seconds: float = _TIMEOUT_SECONDS) -> None:
        """Read all that the topic holds now.

        Raises UnavailableError if the brokers do not answer within `seconds`.
        """
        deadline = time.monotonic() + seconds
        end = self._end(seconds)
        if end < self._next():  # another topic of the same name
            self.close()
            self.forget()
        if end and self._consumer is None:
            self._open(exactly=True)
        while self._next() < end:
            if not self.wait(0.1) and time.monotonic() > deadline:
                raise translate(
                    KafkaError(KafkaError._TIMED_OUT),  # noqa: SLF001
                    f"reading {self._topic}",
                )

    def _end(self, seconds: float) -> int:
        """Return the topic's end; 0 if there is no topic.

        With a separate client: a consumer's connection answers nothing else while a fetch waits.
        """
        only, every = (self._topic, 0), IsolationLevel.READ_UNCOMMITTED
        try:
            if self._admin is None:  # a client is false while it has no events to serve
                with translated(f"looking up the end of {self._topic}"):
                    self._admin = topics.connected(self._config, seconds)
            return absence.ends(self._admin, [only], every, seconds)[only]
        except CDCError as error:
            # A client may keep asking with the leader epoch from before a broker's restart.
            self._admin = None
            unknown = absence.means_unknown(error)
            if unknown and absence.absent(self._config, [self._topic]):
                return 0
            raise

    def wait(self, seconds: float) -> bool:
        """Read what arrives next, within `seconds`; return whether there was anything.

        After an error the topic is read again from its beginning.
        """
        consumer = self._consumer or self._open()
        before = self._next()
        try:
            for message in consumer.arrivals(seconds):
                self.note(message)
        except BaseException:
            # The consumer's position is already after records that were not noted.
            self.close()
            self.forget()
            raise
        return self._next() > before

    def _open(self, *, exactly: bool = False) -> LogConsumer:
        """Start to read at the topic's beginning; `exactly`: it exists, so that is looked up.

        A client that looks it up by itself before it is connected tries again half a second later.
        """
        # The broker answers as soon as there is something; else twice a second is enough.
        consumer = LogConsumer(self._config, skip_deleted=True, wait_ms=500)
        start = BEGINNING
        if exactly:
            with suppress(CDCError):  # of a topic that was just created: not every broker knows it
                start = consumer.look_up([self._partition])[self._partition].start
        consumer.assign({self._partition: start})
        self._consumer = consumer
        return consumer

    def _next(self) -> int:
        """Return the offset after the newest report read, and after what compaction deleted."""
        return self._consumer.positions[self._partition] if self._consumer else 0

    def close(self) -> None:
        """Close the connection. Reading again opens another."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
