"""The followers' reports in `<prefix>.cdc.followers`: written by their jobs, read by all.

A report is written after the commit in the store: it may be late, never early. So what a report
gives as applied is in the store. The newest report counts, even if it gives less than an earlier
one; a report of an older generation does not count, since readers of the store see another by then.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
from confluent_kafka import Producer

from cdc.events import LSN
from cdc.log import absence, names, records, topics
from cdc.log.client import settings, translate, translated
from cdc.log.topic_readings import TopicReadings

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

    from cdc.config import Config

# What a follower's job is doing. `waiting`: for a store or a broker that does not answer;
# `rebuilding`: the store had lost something, and another generation is being built.
FollowerState = Literal[
    "starting", "following", "catching_up", "waiting", "rebuilding", "halted", "stopped"
]
# The prefix of logical messages whose content is when they were sent, in microseconds since 1970.
CANARY: Final = "cdc.canary"
# A job reports at least every REPORT_SECONDS; without a report for SILENT_SECONDS it counts as not
# running.
REPORT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 20.0
# A standby takes over after this many seconds without a report. Sooner than a job counts as not
# running, because two active copies are harmless.
TAKE_OVER_SECONDS: Final = 8.0
_TIMEOUT_SECONDS: Final = 15.0


class ViewWork(msgspec.Struct, frozen=True):
    """How a view was computed in the last cut that changed a table of it."""

    how: str  # `keys`, `full` or `build`
    why: str
    seconds: float
    lsn: str  # of the cut


class TableCommit(NamedTuple):
    """A version of a Delta table, and the SHA-256 of its commit, hexadecimal."""

    version: int
    digest: str


class FollowerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's report: its applied frontier, and what its job is doing."""

    format: int = records.FORMAT
    pipeline: str
    follower: str
    store: str  # delta, redis, opensearch, sql, or the kind of another package
    generation: int
    state: FollowerState
    # The applied frontier; `place` is the frontier topic's offset after its record.
    epoch: int
    lsn: LSN
    seq: int
    committed_at_us: int
    place: int
    # Of a store that lost a part: up to where it held everything. It has no applied frontier then.
    had_lsn: LSN | None = None
    tables: int = 0  # how many it has applied events of
    # Since this job began.
    events: int = 0
    batches: int = 0
    errors: int = 0
    # Recently.
    events_per_second: float = 0.0
    batch_seconds: float = 0.0
    canary_at_us: int | None = None  # when the newest canary that it has applied was sent
    # For how long it is stalled, if it is: when this job started, when it last applied something
    # (before the first time: when it started), and since when errors have prevented that.
    began_at_us: int | None = None
    moved_at_us: int | None = None
    failing_since_us: int | None = None
    views: dict[str, ViewWork] = {}  # since this job began
    # Of the archive, and of its bases: the newest commit of the table, which `cdc prove` expects.
    commit: TableCommit | None = None
    # If it waits, rebuilds or has halted: why, and what to do.
    what: str = ""
    hint: str = ""
    owner: str
    at_us: int

    @property
    def age_seconds(self) -> float:
        """How long ago it was written, by two machines' clocks."""
        return max(0.0, time.time() - self.at_us / 1e6)

    @property
    def runs(self) -> bool:
        """Whether its job seems to run: it has not ended, and reports."""
        return self.state not in {"halted", "stopped"} and self.age_seconds < SILENT_SECONDS


def key(pipeline: str, follower: str) -> bytes:
    """Return the key of a follower's reports."""
    return msgspec.json.encode({"pipeline": pipeline, "follower": follower})


class Reports:
    """Writes reports, in order; creates the topic if it is missing."""

    def __init__(self, config: Config, wanted: topics.Topic | None = None) -> None:
        """Write into the followers' topic, or into another with one partition.

        Raises UnavailableError if the pipeline is not set up.
        """
        absence.expect_set_up(config)
        wanted = wanted or topics.followers_topic(config)
        self._topic = wanted.name
        self._failed: KafkaError | None = None
        topics.ensure(topics.admin(config), config, [wanted])
        with translated("creating a producer"):
            self._producer = Producer(
                settings(
                    config,
                    **{"enable.idempotence": True, "acks": "all", "linger.ms": 0},
                )
            )

    def write(self, record: FollowerRecord) -> None:
        """Send a report without waiting. Raises the error of an earlier one."""
        self.send(key(record.pipeline, record.follower), records.encode(record))

    def send(self, key: bytes, value: bytes | None) -> None:
        """Send a key and its value without waiting. Raises the error of an earlier one."""
        with translated(f"producing to {self._topic}"):
            self._producer.poll(0)
            failed, self._failed = self._failed, None
            if failed is not None:
                raise translate(failed, f"producing to {self._topic}")
            self._producer.produce(
                self._topic,
                value,
                key,
                partition=0,
                on_delivery=self._delivered,
            )

    def flush(self, seconds: float = _TIMEOUT_SECONDS) -> None:
        """Wait until all are acknowledged, `seconds` at most."""
        with translated(f"producing to {self._topic}"):
            self._producer.flush(seconds)

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        self._failed = error or self._failed


class Readings(TopicReadings):
    """Reads reports."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, names.followers_topic(config.prefix))
        self.newest: dict[str, FollowerRecord] = {}
        # By follower: when the log received the first of the newest reports in a row with the same
        # frontier, of those that compaction has left.
        self.reached_at_us: dict[str, int] = {}

    def refresh(self, seconds: float = _TIMEOUT_SECONDS) -> dict[str, FollowerRecord]:
        """Read all that the topic holds now; return the newest report of each follower.

        Raises UnavailableError if the brokers do not answer within `seconds`.
        """
        self.read_new(seconds)
        return self.newest

    def forget(self) -> None:
        self.newest.clear()
        self.reached_at_us.clear()

    def note(self, message: Message) -> None:
        value = message.value()
        if value is None:
            return
        record = records.decode(FollowerRecord, value, self._topic)
        known = self.newest.get(record.follower)
        ours = record.pipeline == self._config.pipeline
        if ours and (known is None or record.generation >= known.generation):
            at_us = int(message.timestamp()[1]) * 1_000
            if known is None or _frontier(known) != _frontier(record):
                self.reached_at_us[record.follower] = at_us
            self.newest[record.follower] = record


def _frontier(record: FollowerRecord) -> tuple[int, int, int, int]:
    return record.generation, record.epoch, record.lsn, record.seq


def read(config: Config) -> dict[str, FollowerRecord]:
    """Return every follower's newest report."""
    with closing(Readings(config)) as readings:
        return readings.refresh()
