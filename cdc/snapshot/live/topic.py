"""The live snapshots' records in the log, read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cdc.log import names, reader, records, topics
from cdc.snapshot.live.records import LiveRecord

if TYPE_CHECKING:
    from cdc.config import Config


def load(config: Config, admin: topics.Admin) -> list[LiveRecord]:
    """Return the live snapshots that the log knows, those that ended too. Blocks."""
    topic = names.snapshot_topic(config.prefix)
    # A log that was set up by an older version has no such topic.
    own = [each for each in topics.internal_topics(config) if each.name == topic]
    topics.ensure(admin, config, own)
    return read(config)


def read(config: Config) -> list[LiveRecord]:
    """Return the live snapshots in the log, oldest first. Blocks."""
    topic = names.snapshot_topic(config.prefix)
    newest: dict[bytes, bytes | None] = {}
    for message in reader.read_if_there(config, topic):
        newest[message.key() or b""] = message.value()
    found = []
    for key, value in newest.items():
        at = msgspec.json.decode(key)
        if value and at.get("part") == "live" and at.get("pipeline") == config.pipeline:
            found.append(records.decode(LiveRecord, value, topic))
    return sorted(found, key=lambda record: record.began_at_us)
