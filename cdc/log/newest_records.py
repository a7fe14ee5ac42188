"""Read what the log says of itself again and again: what is new, by connections that stay open.

What `cdc.log.reader` reads once, for those who ask every few seconds. A first reading is as
certain: two clients say where a topic ends. A later one asks one client, whose answer may be old:
then so is the result, until the next. A topic that was created again has another id, and is read
from its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from confluent_kafka import Message

from cdc.errors import CDCError
from cdc.log import absence, names, topics
from cdc.log.client import REACH_SECONDS, reach
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        # In this order they are first read: what a record names is in a topic before its own.
        self.topics = (
            *(names.resume_topic(config.prefix), self._frontiers),
            *(names.schema_topic(config.prefix), names.snapshot_topic(config.prefix)),
        )
        self._known: dict[str, NewestRecords] = {}
        self._opened: tuple[LogConsumer, topics.Admin] | None = None

    def read(self) -> Mapping[str, NewestRecords]:
        """Return what each topic holds now; topics that are proven not to exist are left out.

        Of the frontiers' topic only the newest record is sure to be among them. Blocks. Raises
        UnavailableError if the brokers do not answer.
        """
        if self._opened is not None:
            try:
                self._read_new(*self._opened)
            except CDCError:
                self.close()  # what failed may be the connection: once more, with others
            else:
                return self._known
        reach(self._config)
        self._opened = LogConsumer(self._config), topics.admin(self._config)
        try:
            self._read_all(*self._opened)
        except CDCError:
            self.close()
            raise
        return self._known

    def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None

    def _read_new(self, consumer: LogConsumer, admin: topics.Admin) -> None:
        """Read on, if the topics are still the same."""
        admin.poll(0)  # its log lines are kept until then
        described = topics.describe(admin, self.topics, REACH_SECONDS)
        ids = {topic: each.topic_id for topic, each in described.items()}
        ends = absence.ends(admin, [(topic, 0) for topic in ids])
        known = self._known
        if ids != {topic: each.topic_id for topic, each in known.items()} or any(
            ends[topic, 0] < each.next for topic, each in known.items()
        ):
            self._read_all(consumer, admin)
            return
        for topic, each in known.items():
            self._add(consumer, topic, OffsetRange(each.next, ends[topic, 0]))

    def _read_all(self, consumer: LogConsumer, admin: topics.Admin) -> None:
        """Look up by two clients where each topic ends, and read what is not known of it."""
        described = topics.describe(admin, self.topics)
        before, self._known = self._known, {}
        for topic in self.topics:
            there = consumer.confirmed_if_exists((topic, 0))
            if there is None:
                continue
            topic_id = described[topic].topic_id if topic in described else ""
            known = before.get(topic)
            if known is None or known.topic_id != topic_id or known.next > there.end:
                known = NewestRecords(topic_id)
            self._known[topic] = known
            self._add(consumer, topic, OffsetRange(max(known.next, there.start), there.end))

    def _add(self, consumer: LogConsumer, topic: str, wanted: OffsetRange) -> None:
        """Add the records of a range; of the frontiers, which may be millions, only the last."""
        known, found = self._known[topic], list[Message]()
        for tail in wanted.tails(_TAIL_OFFSETS) if topic == self._frontiers else [wanted]:
            pieces = consumer.pieces({(topic, 0): tail})
            found = [message for _, messages in pieces for message in messages]
            if found:
                break
        for message in found:
            known.add(message)
        known.next = wanted.end
