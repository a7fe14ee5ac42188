"""Events that a webhook or a queue gave up, until somebody decides on them.

A record in the topic `<prefix>.cdc.groups` names the event's place in the log, not its content: so
nothing that is erased or masked there is kept here. The decision stays, with who took it.
"""

from __future__ import annotations

import getpass
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.errors import ConfigError, GapError
from cdc.events import row_key
from cdc.log import acknowledged, group_records, records, topics
from cdc.log.consumer import LogConsumer
from cdc.log.group_records import undelivered_key
from cdc.log.partitions import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config import Config
    from cdc.log.group_records import UndeliveredRecord, UndeliveredState
    from cdc.log.partitions import Partition


class _Source(msgspec.Struct):
    epoch: int
    seq: int


class _Numbered(msgspec.Struct):
    source: _Source


_decode: Final = msgspec.json.Decoder(_Numbered).decode


def write(config: Config, *written: UndeliveredRecord) -> None:
    """Return once the log has the records."""
    group_records.write_all(config, encoded(written))


def encoded(written: Sequence[UndeliveredRecord]) -> list[tuple[bytes, bytes | None]]:
    """Return the records' keys and values."""
    return [(undelivered_key(each), records.encode(each)) for each in written]


def event_id(config: Config, value: bytes) -> str:
    """Return an event's id: the same whenever it is sent."""
    source = _decode(value).source
    return f"{config.pipeline}-{source.epoch}-{source.seq}"


def place_id(partition: Partition, offset: int) -> str:
    """Return the id of an event that can't be read, of which nothing but the place is known."""
    return f"{partition[0]}-{partition[1]}-{offset}"


def read(config: Config, group: str) -> Iterator[UndeliveredRecord]:
    """Yield what a group gave up, oldest first, decided ones too."""
    found = group_records.read_once(config).undelivered_of(group)
    yield from sorted(found, key=lambda each: each.at_us)


def event(config: Config, record: UndeliveredRecord) -> bytes:
    """Return an event's JSON, read from its place in the log; raise GapError if it is deleted.

    Empty for a tombstone: in the place of what could not be read there may be one.
    """
    return message(config, record)[1]


def message(config: Config, record: UndeliveredRecord) -> tuple[bytes | None, bytes]:
    """Return the key of an event's row and what `event` does."""
    partition = record.topic, record.partition
    wanted = OffsetRange(record.offset, record.offset + 1)
    with closing(LogConsumer(config)) as consumer:
        consumer.expect_complete(partition, wanted)
        for _, messages in consumer.pieces({partition: wanted}):
            for message in messages:
                return row_key(message.key()), message.value() or b""
    raise GapError(
        f"{record.topic} [{record.partition}] has no event at offset {record.offset}",
        hint=f"it was erased or deleted; `{_command(record.group, 'discard')} {record.id}`",
    )


def chosen(
    config: Config, group: str, ids: tuple[str, ...], *more: UndeliveredState
) -> list[UndeliveredRecord]:
    """Return the undelivered events with these ids, or all; raise ConfigError for an unknown id.

    Where ids are given, events in the states `more` are found, too.
    """
    states = {"undelivered", *(more if ids else ())}
    there = {each.id: each for each in read(config, group) if each.state in states}
    if missing := [each for each in ids if each not in there]:
        raise ConfigError(
            f"the {' '.join(group.split('.', 1))} has no undelivered event {missing[0]}",
            hint=f"`{_command(group, 'undelivered')}` lists them",
        )
    return [there[each] for each in ids or there]


def queue_again(config: Config, group: str, ids: tuple[str, ...]) -> list[str]:
    """Give out undelivered events of a queue again, as if for the first time; return their ids.

    The decision is noted first: a member may give one up again at once. So what was noted and not
    queued, because this process was killed in between, may be named once more.
    """
    found = chosen(config, group, ids, "sent again")
    topic = topics.retries_topic(config)
    topics.ensure(topics.admin(config), config, [topic])
    write(config, *(decided(each, "sent again") for each in found))
    acknowledged.write(config, topic.name, encoded(found))
    return [each.id for each in found]


def discard(config: Config, group: str, ids: tuple[str, ...]) -> list[str]:
    """Decide that undelivered events are not delivered any more; return their ids."""
    found = chosen(config, group, ids)
    write(config, *(decided(each, "discarded") for each in found))
    return [each.id for each in found]


def decided(record: UndeliveredRecord, state: UndeliveredState) -> UndeliveredRecord:
    """Return the record with a decision of the user who runs this process."""
    return msgspec.structs.replace(
        record, state=state, decided_by=getpass.getuser(), decided_at_us=time.time_ns() // 1_000
    )


def _command(group: str, what: str) -> str:
    kind, _, name = group.partition(".")
    return f"cdc {kind} {what} {name}"
