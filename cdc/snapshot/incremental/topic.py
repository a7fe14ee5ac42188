"""Read the records of incremental snapshots back from the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.log import names, reader, records, topics
from cdc.log.completeness import Completeness, EmptiedTopic
from cdc.log.records import Replacement
from cdc.snapshot.incremental.records import (
    CommandRecord,
    IncrementalRecord,
    incremental_key,
    replacement_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from cdc.config import Config
    from cdc.log.records import SchemaRecord


class IncrementalLog(NamedTuple):
    """What the log holds: incremental snapshots, also those that ended, and recent commands."""

    snapshots: list[IncrementalRecord]  # oldest first
    commands: list[CommandRecord]
    replacements: list[Replacement]


def load(config: Config, admin: topics.Admin) -> IncrementalLog:
    """Return what the log holds. Blocks."""
    topic = names.snapshot_topic(config.prefix)
    # A log that was set up by an older version has no such topic.
    own = [each for each in topics.internal_topics(config) if each.name == topic]
    topics.ensure(admin, config, own)
    return read_all(config)


def read(config: Config) -> list[IncrementalRecord]:
    """Return the incremental snapshots in the log, oldest first. Blocks."""
    return read_all(config).snapshots


def read_all(config: Config) -> IncrementalLog:
    """Return what the log holds; nothing if there is no such topic. Blocks."""
    return log_in(config, entries(config))


def log_in(config: Config, read: Iterable[SnapshotEntry]) -> IncrementalLog:
    """Return what entries of the snapshots' topic hold of incremental ones."""
    topic = names.snapshot_topic(config.prefix)
    found: list[IncrementalRecord] = []
    commands: list[CommandRecord] = []
    replacements: list[Replacement] = []
    for entry in read:
        if entry.fields.get("part") == "live":
            found.append(records.decode(IncrementalRecord, entry.value, topic))
        elif entry.fields.get("part") == "command":
            commands.append(records.decode(CommandRecord, entry.value, topic))
        elif entry.fields.get("part") == "replacement":
            replacements.append(records.decode(Replacement, entry.value, topic))
    found.sort(key=lambda record: record.began_at_us)
    return IncrementalLog(found, commands, replacements)


def completeness(versions: Iterable[SchemaRecord], logged: IncrementalLog) -> Completeness:
    """Return which topics are incomplete by the log's records; `versions` are oldest first."""
    found = Completeness(versions, logged.replacements)
    # After the replacements: what one has filled is not in the snapshots' records any more.
    for record in logged.snapshots:
        if record.left_empty:
            found.empty(emptied_topic(record))
    return found


def emptied_topic(record: IncrementalRecord) -> EmptiedTopic:
    """Return what a snapshot that ended early has left."""
    name = record.schema, record.table
    return EmptiedTopic(name, record.emptied_under, record.emptied_lsn, record.id)


def incremental_record(config: Config, record: IncrementalRecord) -> tuple[str, bytes, bytes]:
    """Return topic, key and value of a snapshot's record."""
    key = incremental_key(config.pipeline, record.id)
    return names.snapshot_topic(config.prefix), key, records.encode(record)


def replacement_record(config: Config, replacement: Replacement) -> tuple[str, bytes, bytes]:
    """Return topic, key and value of a replacement."""
    key = replacement_key(config.pipeline, replacement.schema, replacement.table)
    return names.snapshot_topic(config.prefix), key, records.encode(replacement)


class SnapshotEntry(NamedTuple):
    """A record of the snapshots' topic, undecoded; `fields` are its key's."""

    key: bytes
    fields: dict[str, Any]
    value: bytes


def entries(config: Config) -> Iterator[SnapshotEntry]:
    """Return this pipeline's newest records of initial and incremental snapshots. Blocks."""
    read = reader.read_if_there(config, names.snapshot_topic(config.prefix))
    return entries_in(config, reader.newest_values(read))


def entries_in(config: Config, newest: Mapping[bytes, bytes]) -> Iterator[SnapshotEntry]:
    """Yield the pipeline's entries among the newest values of their topic's keys."""
    topic = names.snapshot_topic(config.prefix)
    for key, value in newest.items():
        fields = records.decode_key(key, topic)
        if value and fields.get("pipeline") == config.pipeline:
            yield SnapshotEntry(key, fields, value)
