"""Follow the data topics for people to look at: read_committed, and topics created later too.

Order: each partition's own, and `seq` within what arrives together. A backlog is read partition by
partition, so that across partitions older events may come after newer ones; a reader that needs the
total order reads cut by cut, between frontiers.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from cdc.errors import ConfigError
from cdc.events import row_key
from cdc.log import names, topics
from cdc.log.client import reach
from cdc.log.consumer import BEGINNING, END, LogConsumer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from confluent_kafka import Message

    from cdc.config import Config, TablePattern
    from cdc.log.partitions import Partition

# Records are collected for this long and then sorted: it is a reader's lag.
_GATHER_SECONDS: Final = 0.1
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
    wanted = partial(_matching, config, patterns)
    with closing(follow(config, wanted, from_beginning=from_beginning)) as batches:
        for messages in batches:
            yield decoded(messages)


def follow(
    config: Config,
    wanted: Callable[[dict[str, int]], set[Partition]],
    *,
    from_beginning: bool = False,
    exactly: bool = False,
) -> Generator[list[Message]]:
    """Yield the records that arrive, without tombstones; an empty list now and then.

    `wanted` chooses from the pipeline's topics, given with their numbers of partitions. Without
    `exactly` the client looks up by itself where they end, and a moment passes until then.
    """
    reach(config)
    admin = topics.admin(config)
    # A topic that is created meanwhile is read from its beginning.
    start = BEGINNING if from_beginning else END
    look_at = time.monotonic()
    with closing(LogConsumer(config)) as consumer:
        if exactly:
            ends = consumer.look_up(wanted(topics.existing(admin, config.prefix)))
            consumer.follow({each: held.end for each, held in ends.items()})
            start = BEGINNING
        while True:
            if time.monotonic() >= look_at:
                found = wanted(topics.existing(admin, config.prefix))
                consumer.follow(dict.fromkeys(found - consumer.positions.keys(), start))
                start = BEGINNING
                look_at = time.monotonic() + _LOOK_SECONDS
            messages = consumer.arrivals(_GATHER_SECONDS, gather=True)
            yield [each for each in messages if each.value() is not None]


def decoded(messages: Iterable[Message]) -> list[Arrived]:
    """Return the events of records, in the order of seq."""
    return sorted(map(_arrived, messages), key=lambda each: each.event["source"]["seq"])


def _matching(
    config: Config, patterns: Sequence[TablePattern], present: dict[str, int]
) -> set[Partition]:
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
    logical = names.messages_topic(config.prefix)
    return {
        (name, partition)
        for name, count in data.items()
        if not patterns or any(pattern.matches(*tables[name]) for pattern in patterns)
        for partition in range(count)
    } | ({(logical, 0)} if logical in present and not patterns else set())


def _arrived(message: Message) -> Arrived:
    value = message.value()
    assert value is not None
    return Arrived(
        topic=str(message.topic()),
        partition=int(message.partition() or 0),
        offset=int(message.offset() or 0),
        published_ms=message.timestamp()[1],
        key=row_key(message.key()),
        event=orjson.loads(value),
    )
