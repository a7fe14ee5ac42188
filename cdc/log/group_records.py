"""What the topic `<prefix>.cdc.groups` holds of groups of readers, by key.

- Where each group started. Kafka forgets the offsets of a group that had no member for
  `offsets.retention.minutes`; this record stays, so a group without offsets is not taken for a new
  one.
- What each process that runs a webhook reports of it. A process that ends deletes its report.
- Where each queue started.
- The events that a webhook or a queue gave up, and what was decided on them: their place in the
  log, not their content, so nothing that is erased or masked there is kept here.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from cdc.log import acknowledged, names, records, topics
from cdc.log.follower_reports import SILENT_SECONDS
from cdc.log.topic_readings import TopicReadings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from confluent_kafka import Message

    from cdc.config import Config

WebhookState = Literal["delivering", "away", "halted"]
UndeliveredState = Literal["undelivered", "sent again", "discarded"]
# Which field a key has.
_GROUP, _REPORT, _UNDELIVERED, _QUEUE = "group", "process", "undelivered", "queue"
_WEBHOOK: Final = "webhook"


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


class QueueRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a queue started: its topics with Kafka's ids, and the seq after which it gives out."""

    format: int = records.FORMAT
    pipeline: str
    queue: str
    topics: dict[str, str]
    start_seq: int
    start_seconds_ago: float  # how long the log had that seq when the queue was started
    began_at_us: int
    lock_seconds: float


class WebhookReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a webhook is in one process that runs it.

    `away`: its receiver does not answer. `halted`: the process has ended, and needs a person.
    """

    format: int = records.FORMAT
    pipeline: str
    webhook: str
    owner: str
    state: WebhookState
    since_us: int  # since when it has this state
    moved_at_us: int  # when it last delivered or gave up something, or got something to deliver
    delivered: int = 0
    given_up: int = 0
    held: int = 0
    failing: int = 0  # keys that the receiver refuses
    what: str = ""  # why it is away, has halted, starts again, or was refused last
    hint: str = ""
    failed_since_us: int | None = None  # since when it starts again after errors
    at_us: int

    @property
    def age_seconds(self) -> float:
        """How long ago it was written, by two machines' clocks."""
        return max(0.0, time.time() - self.at_us / 1e6)

    @property
    def runs(self) -> bool:
        """Whether its process seems to run: it has not halted, and reports."""
        return self.state != "halted" and self.age_seconds < SILENT_SECONDS


class UndeliveredRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An event that a webhook or a queue gave up: its id and place, why, what was decided."""

    format: int = records.FORMAT
    pipeline: str
    group: str
    id: str
    topic: str
    partition: int
    offset: int
    why: str
    attempts: int
    at_us: int
    state: UndeliveredState = "undelivered"
    decided_by: str = ""
    decided_at_us: int | None = None


def webhook_group(name: str) -> str:
    """Return the name of a webhook's group."""
    return f"{_WEBHOOK}.{name}"


def queue_group(name: str) -> str:
    """Return the name of a queue's group."""
    return f"{_QUEUE}.{name}"


def of_configured(config: Config, record: GroupRecord) -> GroupRecord:
    """Return a group's record without the topics that a webhook was configured to read before."""
    webhooks = {webhook_group(name): its for name, its in config.webhooks.items()}
    if (webhook := webhooks.get(record.group)) is None:
        return record
    kept = {
        topic: began
        for topic, began in record.topics.items()
        if names.table_name(config.prefix, topic) in webhook.tables
    }
    return msgspec.structs.replace(record, topics=kept)


def key(pipeline: str, group: str) -> bytes:
    """Return the key of a group's record."""
    return msgspec.json.encode({"pipeline": pipeline, _GROUP: group})


def report_key(report: WebhookReport) -> bytes:
    """Return the key of a process's report."""
    fields = {"pipeline": report.pipeline, _WEBHOOK: report.webhook, _REPORT: report.owner}
    return msgspec.json.encode(fields)


def undelivered_key(record: UndeliveredRecord) -> bytes:
    """Return the key of an event that was given up."""
    fields = {"pipeline": record.pipeline, _GROUP: record.group, _UNDELIVERED: record.id}
    return msgspec.json.encode(fields)


def queue_key(record: QueueRecord) -> bytes:
    """Return the key of a queue's record."""
    return msgspec.json.encode({"pipeline": record.pipeline, _QUEUE: record.queue})


class GroupReadings(TopicReadings):
    """Everything in the topic that is of this pipeline."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, names.groups_topic(config.prefix))
        self.groups: dict[str, GroupRecord] = {}
        self.queues: dict[str, QueueRecord] = {}
        self._reports: dict[bytes, WebhookReport] = {}
        self._undelivered: dict[bytes, UndeliveredRecord] = {}

    def reports_of(self, webhook: str) -> list[WebhookReport]:
        """Return the newest report of each process that ran a webhook, the newest first."""
        found = [each for each in self._reports.values() if each.webhook == webhook]
        return sorted(found, key=lambda each: each.at_us, reverse=True)

    def undelivered(self) -> list[UndeliveredRecord]:
        """Return what all of them gave up, decided ones too."""
        return list(self._undelivered.values())

    def undelivered_of(self, group: str) -> Iterator[UndeliveredRecord]:
        """Yield what a webhook or a queue gave up, decided ones too."""
        return (each for each in self._undelivered.values() if each.group == group)

    def forget(self) -> None:
        for each in (self.groups, self.queues, self._reports, self._undelivered):
            each.clear()

    def note(self, message: Message) -> None:
        name, value = message.key() or b"", message.value()
        fields = records.decode_key(name, self._topic)
        if fields.get("pipeline") != self._config.pipeline:
            return
        if not value:
            self._reports.pop(name, None)
            if not {_REPORT, _UNDELIVERED} & fields.keys():  # nothing else is deleted
                self.groups.pop(fields.get(_GROUP, ""), None)
        elif _REPORT in fields:
            self._reports[name] = records.decode(WebhookReport, value, self._topic)
        elif _UNDELIVERED in fields:
            self._undelivered[name] = records.decode(UndeliveredRecord, value, self._topic)
        elif _QUEUE in fields:
            queue = records.decode(QueueRecord, value, self._topic)
            self.queues[queue.queue] = queue
        elif _GROUP in fields:
            record = records.decode(GroupRecord, value, self._topic)
            self.groups[record.group] = record


def read_once(config: Config) -> GroupReadings:
    """Return what the topic holds now; the connection is closed."""
    with closing(GroupReadings(config)) as readings:
        readings.read_new()
    return readings


def read(config: Config) -> dict[str, GroupRecord]:
    """Return the records of all groups that have started and were not removed, by name."""
    return read_once(config).groups


def write(config: Config, record: GroupRecord) -> None:
    """Return once the log has a group's record; creates the topic if it is missing."""
    write_all(config, [(key(record.pipeline, record.group), records.encode(record))])


def write_all(config: Config, written: Iterable[tuple[bytes, bytes | None]]) -> None:
    """Return once the topic holds these keys and values; creates it if it is missing."""
    topic = topics.groups_topic(config)
    topics.ensure(topics.admin(config), config, [topic])
    acknowledged.write(config, topic.name, written)
