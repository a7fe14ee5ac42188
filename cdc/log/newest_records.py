"""Read what the log says of itself again and again: what is new, by connections that stay open.

What `cdc.log.reader` reads once, for those who ask every few seconds. The answers are as certain:
two clients say where a topic ends, and a topic that was created again has another id, and is read
from its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from cdc.errors import CDCError
from cdc.log import absence, names, topics
from cdc.log.client import reach
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import Range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka import Message

    from cdc.config import Config

# Each frontier record is followed by its transaction's marker; an aborted one leaves only markers.
_TAIL_OFFSETS: Final = 10


class NewestRecords(msgspec.Struct):
    """The newest record of each key of a topic; `next` is the offset to which it was read."""

    topic_id: str
    next: int = 0
    values: dict[bytes, bytes] = {}

    def add(self, message: Message) -> None:
        key, value = message.key() or b"", message.value()
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value


class NewestReader:
    """Reads the topics of resume records, frontiers, versions and snapshots, until `close`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._frontiers = names.frontier_topic(config.prefix)
        # In this order: what a record names is in a topic before its own.
        self._topics = (
            *(names.resume_topic(config.prefix), self._frontiers),
            *(names.schema_topic(config.prefix), names.snapshot_topic(config.prefix)),
        )
        self._known: dict[str, NewestRecords] = {}
        self._consumer: LogConsumer | None = None
        self._admin: topics.Admin | None = None

    def read(self) -> Mapping[str, NewestRecords]:
        """Return what each topic holds now; topics that are proven not to exist are left out.

        Of the frontiers' topic only the newest record is sure to be among them. Blocks. Raises
        UnavailableError if the brokers do not answer.
        """
        is_kept = self._consumer is not None
        try:
            self._read_new()
        except CDCError as error:
            self.close()
            if not (is_kept and absence.means_unknown(error)):
                raise
            self._read_new()  # a client may long believe that a topic is deleted
        return self._known

    def close(self) -> None:
        """Close the connections."""
        self._admin = None
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _read_new(self) -> None:
        if self._admin is None or self._consumer is None:
            self._admin = topics.admin(self._config)
            self._consumer = LogConsumer(self._config, second=self._admin)
        self._admin.poll(0)  # its log lines are kept until then
        reach(self._config, self._admin)
        described = topics.describe(self._admin, self._topics)
        for topic in self._topics:
            there = self._consumer.confirmed_if_exists((topic, 0))
            if there is None:
                self._known.pop(topic, None)
                continue
            topic_id = described[topic].topic_id if topic in described else ""
            known = self._known.get(topic)
            if known is None or known.topic_id != topic_id or not known.next <= there.end:
                known = self._known[topic] = NewestRecords(topic_id)
            wanted = Range(max(known.next, there.start), there.end)
            if topic == self._frontiers:
                self._add_last(self._consumer, topic, known, wanted)
            else:
                self._add(self._consumer, topic, known, wanted)
            known.next = there.end

    @staticmethod
    def _add(consumer: LogConsumer, topic: str, known: NewestRecords, wanted: Range) -> int:
        """Read a range; return how many records it has."""
        records = 0
        for _, messages in consumer.pieces({(topic, 0): wanted}):
            records += len(messages)
            for message in messages:
                known.add(message)
        return records

    def _add_last(
        self, consumer: LogConsumer, topic: str, known: NewestRecords, wanted: Range
    ) -> None:
        """Read a range's newest records only: it can hold millions."""
        back = _TAIL_OFFSETS
        while True:
            start = max(wanted.start, wanted.end - back)
            if self._add(consumer, topic, known, Range(start, wanted.end)) or start == wanted.start:
                return
            back *= 10
