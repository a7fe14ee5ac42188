"""Events that a webhook gave up, until somebody has them sent again or discards them.

A record in the topic `<prefix>.cdc.groups` names the event's place in the log, not its content: so
nothing that is erased or masked there is kept here. The decision stays, with who took it.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from cdc.errors import ConfigError, GapError
from cdc.log import acknowledged, records, topics
from cdc.log.consumer import LogConsumer
from cdc.log.group_records import GroupReadings, undelivered_key
from cdc.log.partitions import Range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.group_records import UndeliveredRecord


def write(config: Config, *written: UndeliveredRecord) -> None:
    """Return once the log has the records."""
    topic = topics.groups_topic(config)
    topics.ensure(topics.admin(config), config, [topic])
    made = [(undelivered_key(each), records.encode(each)) for each in written]
    acknowledged.write(config, topic.name, made)


def read(config: Config, webhook: str) -> Iterator[UndeliveredRecord]:
    """Yield what a webhook gave up, oldest first, decided ones too."""
    with closing(GroupReadings(config)) as readings:
        readings.read_new()
    yield from sorted(readings.undelivered_of(webhook), key=lambda each: each.at_us)


def event(config: Config, record: UndeliveredRecord) -> bytes:
    """Return an event's JSON, read from its place in the log; raise GapError if it is deleted."""
    partition = record.topic, record.partition
    wanted = Range(record.offset, record.offset + 1)
    with closing(LogConsumer(config)) as consumer:
        consumer.expect_complete(partition, wanted)
        for _, messages in consumer.pieces({partition: wanted}):
            for message in messages:
                return message.value() or b""
    raise GapError(
        f"{record.topic} [{record.partition}] has no event at offset {record.offset}",
        hint=f"it was erased or deleted; `cdc webhook discard {record.webhook} {record.id}`",
    )


def chosen(config: Config, webhook: str, ids: tuple[str, ...]) -> list[UndeliveredRecord]:
    """Return the undelivered events with these ids, or all; raise ConfigError for an unknown id."""
    there = {each.id: each for each in read(config, webhook) if each.state == "undelivered"}
    if missing := [each for each in ids if each not in there]:
        raise ConfigError(
            f"the webhook {webhook} has no undelivered event {missing[0]}",
            hint=f"`cdc webhook undelivered {webhook}` lists them",
        )
    return [there[each] for each in ids or there]
