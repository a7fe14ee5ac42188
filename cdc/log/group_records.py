"""What the topic `<prefix>.cdc.groups` says of groups of readers: where each started.

Kafka forgets the offsets of a group that had no member for `offsets.retention.minutes`. This record
stays, so a group without offsets is not taken for a new one.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from cdc.log import acknowledged, names, records, topics
from cdc.log.consumer import LogConsumer

if TYPE_CHECKING:
    from cdc.config import Config


class StartedTopic(msgspec.Struct, frozen=True):
    """A topic that a group reads: Kafka's id of it, and the offset that each partition began at."""

    id: str
    offsets: tuple[int, ...]


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group started, by topic; a partition that was added later began at 0."""

    format: int = records.FORMAT
    pipeline: str
    group: str
    topics: dict[str, StartedTopic]


def key(pipeline: str, group: str) -> bytes:
    """Return the key of a group's record."""
    return msgspec.json.encode({"pipeline": pipeline, "group": group})


def read(config: Config) -> dict[str, GroupRecord]:
    """Return the records of all groups that ever started, by name."""
    topic = names.groups_topic(config.prefix)
    found = dict[str, GroupRecord]()
    with closing(LogConsumer(config)) as consumer:
        there = consumer.confirmed_if_exists((topic, 0))
        if there is None:
            return {}
        for _, messages in consumer.pieces({(topic, 0): there}):
            for message in messages:
                name, value = message.key() or b"", message.value()
                fields = msgspec.json.decode(name)
                if fields.keys() == {"pipeline", "group"} and value:
                    record = records.decode(GroupRecord, value, topic)
                    if record.pipeline == config.pipeline:
                        found[record.group] = record
    return found


def write(config: Config, record: GroupRecord) -> None:
    """Return once the log has a group's record; creates the topic if it is missing."""
    topic = topics.groups_topic(config)
    topics.ensure(topics.admin(config), config, [topic])
    written = key(record.pipeline, record.group), records.encode(record)
    acknowledged.write(config, topic.name, [written])
