"""Follow the data topics for people to look at: read_committed, and topics created later too.

Order: each partition's own, and `seq` within what arrives together. A backlog is read partition by
partition, so that across partitions older events may come after newer ones; a reader that needs the
total order reads cut by cut, between frontiers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, TopicPartition

from cdc.errors import ConfigError
from cdc.log import names, topics
from cdc.log.client import reach, translate, translated
from cdc.log.reader import consumer

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from confluent_kafka import Message

    from cdc.config import Config, TablePattern

# `consume` waits for its full timeout unless the batch is full: this is a reader's lag.
_WAIT_SECONDS: Final = 0.1
_AT_ONCE: Final = 1_000
# How soon the topic of a newly captured table is noticed.
_LOOK_SECONDS: Final = 3.0


class Arrived(NamedTuple):
    """One event with its position in the log."""

    topic: str
    partition: int
    offset: int
    published_ms: int  # when the daemon published it
    key: bytes | None
    event: dict[str, Any]


def tail(
    config: Config, patterns: Sequence[TablePattern], *, from_beginning: bool
) -> Generator[list[Arrived]]:
    """Yield the events of the tables that match, as they arrive; an empty list now and then.

    Without patterns: all tables, and logical messages. Tombstones are left out: they repeat their
    delete.
    """
    reach(config)
    client = consumer(config, **{"enable.partition.eof": False})
    admin = topics.admin(config)
    followed: set[tuple[str, int]] = set()
    # A topic that is created meanwhile is read from its beginning.
    start = OFFSET_BEGINNING if from_beginning else OFFSET_END
    look_at = time.monotonic()
    try:
        while True:
            if time.monotonic() >= look_at:
                found = _matching(config, patterns, topics.existing(admin, config.prefix))
                new = found - followed
                with translated("beginning to read the data topics"):
                    client.incremental_assign([TopicPartition(*place, start) for place in new])
                followed |= new
                start = OFFSET_BEGINNING
                look_at = time.monotonic() + _LOOK_SECONDS
            messages = client.consume(_AT_ONCE, timeout=_WAIT_SECONDS)
            arrived = [_arrived(message) for message in messages if _is_event(message)]
            yield sorted(arrived, key=lambda each: each.event["source"]["seq"])
    finally:
        client.close()


def _matching(
    config: Config, patterns: Sequence[TablePattern], present: dict[str, int]
) -> set[tuple[str, int]]:
    """Return topic and partition of every table that matches; raise if none can."""
    own = f"{config.prefix}.cdc."
    data = {name: count for name, count in present.items() if not name.startswith(own)}
    if not data:
        raise ConfigError(f"there are no topics {config.prefix}.*", hint="`cdc setup` creates them")
    tables = {name: names.table_of(config.prefix, name) for name in data}
    for pattern in patterns:
        if not any(pattern.matches(*table) for table in tables.values()):
            known = ", ".join(sorted(f"{schema}.{table}" for schema, table in tables.values()))
            raise ConfigError(
                f"the log holds no table {pattern.text}",
                hint=f"it holds {known}",
            )
    said = names.messages_topic(config.prefix)
    return {
        (name, partition)
        for name, count in data.items()
        if not patterns or any(pattern.matches(*tables[name]) for pattern in patterns)
        for partition in range(count)
    } | ({(said, 0)} if said in present and not patterns else set())


def _is_event(message: Message) -> bool:
    error = message.error()
    if error is None:
        return message.value() is not None
    if error.fatal() or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise translate(error, f"reading {message.topic()}")
    return False  # a broker that is down comes back


def _arrived(message: Message) -> Arrived:
    value = message.value()
    assert value is not None
    return Arrived(
        topic=str(message.topic()),
        partition=int(message.partition() or 0),
        offset=int(message.offset() or 0),
        published_ms=message.timestamp()[1],
        key=message.key(),
        event=orjson.loads(value),
    )
