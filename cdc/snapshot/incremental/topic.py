"""Read the records of incremental snapshots back from the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cdc.log import names, reader, records, topics
from cdc.snapshot.incremental.records import CommandRecord, LiveRecord

if TYPE_CHECKING:
    from cdc.config import Config


class Known(NamedTuple):
    """What the log holds: incremental snapshots, also those that ended, and recent commands."""

    snapshots: list[LiveRecord]
    commands: list[CommandRecord]


def load(config: Config, admin: topics.Admin) -> Known:
    """Return what the log holds. Blocks."""
    topic = names.snapshot_topic(config.prefix)
    # A log that was set up by an older version has no such topic.
    own = [each for each in topics.internal_topics(config) if each.name == topic]
    topics.ensure(admin, config, own)
    return _read(config)


def read(config: Config) -> list[LiveRecord]:
    """Return the incremental snapshots in the log, oldest first. Blocks."""
    return _read(config).snapshots


def _read(config: Config) -> Known:
    topic = names.snapshot_topic(config.prefix)
    newest: dict[bytes, bytes | None] = {}
    for message in reader.read_if_there(config, topic):
        newest[message.key() or b""] = message.value()
    found: list[LiveRecord] = []
    commands: list[CommandRecord] = []
    for key, value in newest.items():
        at = msgspec.json.decode(key)
        if not value or at.get("pipeline") != config.pipeline:
            continue
        if at.get("part") == "live":
            found.append(records.decode(LiveRecord, value, topic))
        elif at.get("part") == "command":
            commands.append(records.decode(CommandRecord, value, topic))
    return Known(sorted(found, key=lambda record: record.began_at_us), commands)
