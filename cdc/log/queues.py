"""A member of a Kafka share group that reads tables' topics: each record to one member at a time.

A record that is not acknowledged within the lock's time is delivered again, to any member; the
broker counts its deliveries. Needs Kafka 4.3 (KIP-932, and its settings by group).

Kafka assigns partitions to members all the same, each to as few as there are members for: so a
partition with one member waits for that one. And librdkafka gives a member all records of a
producer's batch at once, and no way to renew a lock: so it may hold many records, and each of their
deliveries counts. Of a batch that can't be read it gives an error for each record, and rejects
them. A record that was delivered as often as the group's limit allows would be dropped silently;
`Delivered.deliveries` shows it long before. Not for several threads at once.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from confluent_kafka import AcknowledgeType, KafkaError, KafkaException, ShareConsumer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from cdc.errors import ConfigError, GapError, UnavailableError
from cdc.events import LSN, row_key
from cdc.log import acknowledged, compaction, group_records, names, records, topics
from cdc.log.client import UNREADABLE, settings, translate, translated
from cdc.log.group_records import QueueRecord, queue_group
from cdc.log.groups import BEGINNING, NOW, described, frontier_at, group_id
from cdc.log.inspection import newest_frontier
from cdc.log.partitions import Partition

if TYPE_CHECKING:
    from collections.abc import KeysView, Mapping, Sequence
    from concurrent.futures import Future

    from confluent_kafka import TopicPartition

    from cdc.config import Config
    from cdc.log.groups import Start
    from cdc.log.topics import Admin

log = logging.getLogger("cdc.log.queues")

# What Kafka allows at most by default (group.share.max.delivery.count.limit): as many deliveries as
# possible remain for noting what is given up.
DELIVERY_LIMIT: Final = 10
# How many records after the first one that is open may be open in a partition: what Kafka allows at
# most by default. librdkafka 2.16 does not acknowledge a transaction marker that is delivered alone
# again, as after a member was killed: so nothing after this window is delivered until Kafka drops
# the marker, after as many locks as `DELIVERY_LIMIT`.
_WINDOW: Final = 4_000
# Most that members give out before they give up: the others are for noting that.
MOST_ATTEMPTS: Final = 7
# What Kafka allows by default (group.share.min and max.record.lock.duration.ms).
LEAST_LOCK_SECONDS, MOST_LOCK_SECONDS = 15, 60
# A batch of this many records is asked for; the broker gives all of a producer's batch.
_BATCH: Final = 1
_TIMEOUT_SECONDS: Final = 15.0
_APPLIED_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.05
# Clocks of a producer may have been set back in between.
_MARGIN_SECONDS: Final = 120
# After this long all partitions of that time have an offset, and those that are added later are
# read from their beginning.
_STARTED_SECONDS: Final = 600.0
_ISOLATION: Final = "share.isolation.level"
_UNSUPPORTED: Final = {
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_REQUEST,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE,  # noqa: SLF001 - librdkafka's local errors are spelled so
}


class Delivered(NamedTuple):
    """A record, the how many-th delivery this is, and until when its lock lasts (monotonic).

    `damage` says why it can't be read; it has no key and no value then.
    """

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes
    deliveries: int
    until: float
    damage: str = ""

    @property
    def place(self) -> tuple[Partition, int]:
        return self.partition, self.offset


class ShareMember:
    """One member. Close it: what it has not acknowledged goes to other members at once."""

    def __init__(self, config: Config, record: QueueRecord) -> None:
        """Join the queue, which `start` has recorded."""
        self._id = queue_id(config, record.queue)
        self._lock_seconds = record.lock_seconds
        self._open: dict[tuple[Partition, int], None] = {}
        self.late = 0  # acknowledgements that came after their lock's time
        with translated("creating a share consumer"):
            self._client = ShareConsumer(
                settings(
                    config,
                    **{
                        "group.id": self._id,
                        "share.acknowledgement.mode": "explicit",
                        "check.crcs": True,
                        "max.poll.records": _BATCH,
                    },
                )
            )
            self._client.set_acknowledgement_commit_callback(self._acknowledged)
            self._client.subscribe([*record.topics, names.retries_topic(config.prefix)])

    @property
    def undecided(self) -> KeysView[tuple[Partition, int]]:
        """The places of what was received and is neither done nor given back."""
        return self._open.keys()

    def receive(self, seconds: float) -> list[Delivered]:
        """Return records that this member alone has now; wait up to `seconds` for some.

        Those that were received before and are undecided are released first. Records of a batch
        that the broker's files have damaged are among them.
        """
        for at in list(self._open):
            self.release(*at)
        asked_at = time.monotonic()
        with translated(f"reading as a member of {self._id}"):
            messages = self._client.poll(seconds)
        # A lock begins when the broker answers: at the earliest when we asked.
        began = max(asked_at, time.monotonic() - seconds)
        found = []
        for message in messages:
            error, damage = message.error(), ""
            partition = str(message.topic()), int(message.partition() or 0)
            if error is not None:
                doing = f"reading {partition[0]} [{partition[1]}]"
                if error.fatal():
                    raise translate(error, doing)
                if error.code() not in UNREADABLE:
                    log.debug("%s as a member of %s: %s", doing, self._id, error.str())
                    continue
                damage = translate(error, doing).what
            offset, value = int(message.offset() or 0), message.value()
            self._open[partition, offset] = None
            if value is None and not damage:
                self.accept(partition, offset)  # a tombstone
                continue
            count, until = message.delivery_count() or 1, began + self._lock_seconds
            key, value = (None, b"") if damage else (row_key(message.key()), value or b"")
            found.append(Delivered(partition, offset, key, value, count, until, damage))
        return found

    def accept(self, partition: Partition, offset: int) -> None:
        """Note that a record is done; `send` or the next `receive` sends it."""
        self._decide(partition, offset, AcknowledgeType.ACCEPT)

    def release(self, partition: Partition, offset: int) -> None:
        """Note that a record is to be delivered again."""
        self._decide(partition, offset, AcknowledgeType.RELEASE)

    def reject(self, partition: Partition, offset: int) -> None:
        """Note that a record is never to be delivered again."""
        self._decide(partition, offset, AcknowledgeType.REJECT)

    def send(self, *, wait: bool = False) -> None:
        """Send what was noted; with `wait` until the broker has it."""
        with translated(f"acknowledging as a member of {self._id}"):
            if wait:
                self._client.commit_sync(_TIMEOUT_SECONDS)
            else:
                self._client.commit_async()

    def close(self) -> None:
        """Release what is undecided, and leave. Blocks until the broker has it."""
        for at in list(self._open):
            self.release(*at)
        with translated(f"leaving {self._id}"):
            self._client.close()

    def _decide(self, partition: Partition, offset: int, kind: AcknowledgeType) -> None:
        if (partition, offset) in self._open:
            del self._open[partition, offset]
            with translated(f"acknowledging as a member of {self._id}"):
                self._client.acknowledge_offset(*partition, offset, kind)

    def _acknowledged(
        self, offsets: dict[TopicPartition, set[int]], error: KafkaException | None
    ) -> None:
        if error is not None:
            self.late += sum(map(len, offsets.values()))
            log.warning("%s: an acknowledgement came too late: %s", self._id, error)


def queue_id(config: Config, name: str) -> str:
    """Return the share group's name in Kafka."""
    return group_id(config, queue_group(name))


def partitions_of(config: Config, record: QueueRecord) -> int:
    """Return how many partitions a queue's topics have together."""
    present = topics.describe(topics.admin(config), list(record.topics))
    return sum(its.partitions for its in present.values())


def start(
    config: Config, name: str, read: Sequence[str], at: Start, lock_seconds: float
) -> QueueRecord:
    """Return the record of a queue that reads these topics; a new one starts at `at`.

    Raises GapError if a topic was created again since, ConfigError where Kafka has no share groups.
    """
    client, wanted = topics.admin(config), topics.groups_topic(config)
    topics.ensure(client, config, [wanted, topics.retries_topic(config)])
    present = described(client, read)
    for topic in read:
        if compaction.is_compacted(config, topic):
            raise ConfigError(
                f"{topic} is compacted, and a queue gives out single records: what compaction"
                " removes before it is given out would be missed without a word",
                hint="set `cleanup: delete` for the table, or read it with `cdc follow` or a group",
            )
    ids = {topic: present[topic].topic_id for topic in read}
    known = group_records.read_once(config).queues.get(name)
    record = _record(config, name, ids, at, known, lock_seconds)
    began = time.time() - record.began_at_us / 1e6
    is_started = record.start_seq == 0 or began > _STARTED_SECONDS
    since = int(began + record.start_seconds_ago) + _MARGIN_SECONDS
    _configure(
        client,
        queue_id(config, name),
        {
            _ISOLATION: "read_committed",
            "share.auto.offset.reset": "earliest" if is_started else f"by_duration:PT{since}S",
            "share.record.lock.duration.ms": str(round(lock_seconds * 1_000)),
            "share.delivery.count.limit": str(DELIVERY_LIMIT),
            "share.partition.max.record.locks": str(_WINDOW),
        },
    )
    if record != known:
        written = group_records.queue_key(record), records.encode(record)
        acknowledged.write(config, wanted.name, [written])
    return record


def _record(
    config: Config,
    name: str,
    ids: dict[str, str],
    at: Start,
    known: QueueRecord | None,
    lock_seconds: float,
) -> QueueRecord:
    if known is None:
        seq, ago = _started_at(config, at)
        return QueueRecord(
            pipeline=config.pipeline,
            queue=name,
            topics=ids,
            start_seq=seq,
            start_seconds_ago=ago,
            began_at_us=time.time_ns() // 1_000,
            lock_seconds=lock_seconds,
        )
    for topic, its in ids.items():
        if known.topics.get(topic) not in {None, its}:
            raise GapError(
                f"{topic} was deleted or created again since the queue {name} began to read it",
                hint="its place cannot be known: use another name for the queue",
            )
    if new := ids.keys() - known.topics.keys():
        raise ConfigError(
            f"the queue {name} was started without {min(new)}",
            hint="a queue's tables cannot be changed later: use another name for the queue",
        )
    # The newest member's time holds for all: it is a setting of the group.
    return msgspec.structs.replace(known, lock_seconds=lock_seconds)


def _started_at(config: Config, at: Start) -> tuple[int, float]:
    """Return the seq after which a queue starts, and how long ago the log had it, in seconds."""
    if at == BEGINNING:
        return 0, 0.0
    newest = newest_frontier(config)
    if at == NOW:
        return (newest.seq, 0.0) if newest else (0, 0.0)
    if isinstance(at, LSN):
        placed = frontier_at(config, at, lambda record: record.lsn <= at)
    elif isinstance(at, datetime):
        at_us = at.astimezone(UTC).timestamp() * 1e6
        placed = frontier_at(config, at, lambda record: record.committed_at_us <= at_us)
    else:
        hint = "beginning, now, a time, an LSN"
        raise ConfigError(f"a queue can't start at {at!r}", hint=hint)
    return placed.record.seq, max(0.0, time.time() - placed.published_ms / 1e3)


def _configure(client: Admin, group: str, wanted: Mapping[str, str]) -> None:
    """Return once the brokers have these settings of a group."""
    changes = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in wanted.items()
    ]
    with translated(f"configuring the share group {group}"):
        if _settings(client, group).items() >= wanted.items():
            return
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=changes)
        _answered(client.incremental_alter_configs([resource]), group)
        deadline = time.monotonic() + _APPLIED_SECONDS
        while not _settings(client, group).items() >= wanted.items():
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the brokers do not apply the settings of the share group {group}",
                    hint="see their logs; then try again",
                )
            time.sleep(_LOOK_SECONDS)


def _settings(client: Admin, group: str) -> dict[str, str]:
    asked = ConfigResource(ResourceType.GROUP, group)
    found = _answered(client.describe_configs([asked]), group)
    return {name: str(entry.value) for name, entry in found.items()}


def _answered(
    futures: Mapping[ConfigResource, Future[dict[str, ConfigEntry]]], group: str
) -> dict[str, ConfigEntry]:
    try:
        return next(iter(futures.values())).result(_TIMEOUT_SECONDS) or {}
    except KafkaException as error:
        if error.args[0].code() not in _UNSUPPORTED:
            raise
        raise ConfigError(
            f"the brokers refuse the settings of the share group {group}: {error.args[0].str()}",
            hint="queues need Kafka 4.3 or later with the feature share.version 1, and allowed"
            " ranges as by default (group.share.max.delivery.count.limit 10)",
        ) from error
