"""Which formats the log's own records have, by the kind of record.

For the decision to run another version: a version refuses records of formats that it does not know
(`cdc.log.records`). Topics that may be large are read at their end only: formats rise, so what was
written last is the newest. Nothing is changed.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from cdc.encode.ddl import DDLRecord
from cdc.errors import ConfigError
from cdc.events import row_key
from cdc.log import names, records
from cdc.log.consumer import LogConsumer
from cdc.log.dead_letters import DeadLetterHead
from cdc.log.follower_reports import FollowerRecord
from cdc.log.group_records import GroupRecord, QueueRecord, UndeliveredRecord, WebhookReport
from cdc.snapshot.incremental.records import CommandRecord, IncrementalRecord
from cdc.snapshot.initial.records import RangeRecord, SnapshotPlan, SnapshotState, SnapshotTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange

Kind = tuple[str, type[msgspec.Struct]]  # its name for people, and what it is read as

_RESUME: Final[dict[object, Kind]] = {
    "identity": ("resume identity", records.ResumeIdentity),
    "position": ("resume position", records.ResumePosition),
}
_SNAPSHOT: Final[dict[object, Kind]] = {
    "state": ("initial snapshot", SnapshotState),
    "plan": ("snapshot plan", SnapshotPlan),
    "table": ("planned table", SnapshotTable),
    "range": ("snapshot range", RangeRecord),
    "live": ("incremental snapshot", IncrementalRecord),
    "command": ("command", CommandRecord),
    "replacement": ("replacement", records.Replacement),
}
# By the field that the key has; a report's has `webhook` too, so the first one decides.
_GROUPS: Final[dict[str, Kind]] = {
    "process": ("webhook report", WebhookReport),
    "undelivered": ("event given up", UndeliveredRecord),
    "queue": ("queue", QueueRecord),
    "group": ("group", GroupRecord),
}
_SCHEMA: Final[dict[str, Kind]] = {
    "schema_id": ("table version", records.SchemaRecord),
    "columns": ("column numbers", records.ColumnNumbers),
    "ddl": ("DDL statement", DDLRecord),
}
_FRONTIER: Final[Kind] = ("frontier", records.FrontierRecord)
_REPORT: Final[Kind] = ("follower report", FollowerRecord)
_DEAD: Final[Kind] = ("dead letter", DeadLetterHead)
_ALTERATION: Final[Kind] = ("alteration", records.Alteration)


class KindFound(NamedTuple):
    """What there is of one kind of record in one place."""

    kind: str
    place: str  # a topic, or a store
    records: int  # how many were read
    newest: int  # the newest format among them
    reads: int  # the newest format that this version reads, which it also writes
    problem: str = ""  # why one of them can't be read, other than a newer format

    @property
    def is_readable(self) -> bool:
        """Whether this version reads all of them."""
        return self.newest <= self.reads and not self.problem

    @property
    def will_rise(self) -> bool:
        """Whether this version will write a newer format than the version before has written."""
        return self.newest < self.reads


class _Content(msgspec.Struct):
    content: bytes


class _MessageEvent(msgspec.Struct):
    message: _Content


_decode_event: Final = msgspec.json.Decoder(_MessageEvent).decode


def _by_field(kinds: dict[str, Kind]) -> Callable[[dict[str, Any]], Kind | None]:
    return lambda key: next((kinds[field] for field in kinds if field in key), None)


class _Topic(NamedTuple):
    """An internal topic: its kinds of records by their keys, and how much of its end is read."""

    name: Callable[[str], str]
    kind: Callable[[dict[str, Any]], Kind | None]  # None: it has no format, or is not known
    last: int | None = None  # offsets; None: all
    further: bool = False  # further back, if these hold no record


TOPICS: Final = (
    _Topic(names.resume_topic, lambda key: _RESUME.get(key.get("part"))),
    # Each record is followed by its transaction's marker; an aborted one leaves only markers.
    _Topic(names.frontier_topic, lambda _: _FRONTIER, last=100, further=True),
    _Topic(names.schema_topic, _by_field(_SCHEMA)),
    _Topic(names.snapshot_topic, lambda key: _SNAPSHOT.get(key.get("part"))),
    _Topic(names.followers_topic, lambda _: _REPORT),
    _Topic(names.groups_topic, _by_field(_GROUPS)),
    # A letter's pieces have up to a megabyte each.
    _Topic(
        names.dead_topic, lambda key: None if key.get("chunk") else _DEAD, last=100, further=True
    ),
    _Topic(
        names.messages_topic,
        lambda key: _ALTERATION if key.get("prefix") == records.ALTERED else None,
        last=10_000,
    ),
)


def read(config: Config) -> list[KindFound]:
    """Return what the log holds of each kind of record, in the order of their importance. Blocks.

    Raises UnavailableError if the brokers do not answer, ConfigError if the log has nothing of this
    pipeline: then nothing can be concluded.
    """
    found: list[KindFound] = []
    with closing(LogConsumer(config)) as consumer:
        for topic in TOPICS:
            found += _read_topic(config, consumer, topic)
            if not found:
                resume = names.resume_topic(config.prefix)
                raise ConfigError(
                    f"topic {resume} holds no resume record of pipeline {config.pipeline}",
                    hint="see that pipeline, log.prefix and log.bootstrap_servers are those of the"
                    " running daemon; before `cdc setup` there is nothing to check",
                )
    return found


def _read_topic(config: Config, consumer: LogConsumer, topic: _Topic) -> list[KindFound]:
    name = topic.name(config.prefix)
    there = consumer.confirmed_if_exists((name, 0))
    if there is None:
        return []
    for wanted in _ranges(topic, there):
        pieces = consumer.pieces({(name, 0): wanted})
        read: Iterable[tuple[bytes, bytes | None]] = (
            (row_key(message.key()) or b"", message.value())
            for _, piece in pieces
            for message in piece
        )
        if topic.last is None:
            read = dict(read).items()
        found = kinds_in(config, name, topic.kind, read)
        if found:
            return found
    return []


def _ranges(topic: _Topic, there: OffsetRange) -> Iterator[OffsetRange]:
    """Yield what is read of a topic, until something is found."""
    if topic.last is None:
        yield there
        return
    for tail in there.tails(topic.last):
        yield tail
        if not topic.further:
            return


def kinds_in(
    config: Config,
    topic: str,
    kind_of: Callable[[dict[str, Any]], Kind | None],
    read: Iterable[tuple[bytes, bytes | None]],
) -> list[KindFound]:
    """Return what keys and values of a topic hold of each kind of record of this pipeline."""
    found: dict[str, KindFound] = {}
    for key, value in read:
        fields = _fields(key)
        kind = kind_of(fields)
        if kind is None or not value or fields.get("pipeline", config.pipeline) != config.pipeline:
            continue
        name, struct = kind
        one = _examined(name, struct, topic, value)
        before = found.get(name)
        if before is not None:
            one = one._replace(
                records=before.records + 1,
                newest=max(one.newest, before.newest),
                problem=before.problem or one.problem,
            )
        found[name] = one
    return list(found.values())


def _fields(key: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(key)
    except msgspec.DecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _examined(name: str, struct: type[msgspec.Struct], topic: str, value: bytes) -> KindFound:
    """Return what one record shows."""
    reads, problem = records.newest_format(struct), ""
    try:
        if struct is records.Alteration:
            value = _decode_event(value).message.content
        # A kind that leaves out what is as by default states none while it is 1.
        newest = records.format_of(value) or records.FORMAT
        if newest <= reads:
            records.decode(struct, value, topic)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        newest, problem = 0, f"a record is not JSON of ours: {type(error).__name__}"
    except ConfigError as error:
        problem = error.what
    return KindFound(name, topic, 1, newest, reads, problem)
