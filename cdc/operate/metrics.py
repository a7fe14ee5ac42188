"""The daemon's metrics, for Prometheus: names `lockstep_*`, units last.

The pipeline writes plain attributes, once per batch and never per row; they become samples only
when `/metrics` is read. Each `Metrics` has its own registry, so that several pipelines in one
process (as in tests) stay separate. Python's and the process's own metrics are exported alongside
ours.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cdc.log.trace import STAGES, Moments
from cdc.operate.findings import Level
from cdc.operate.followers import STATES, FollowerStatus
from cdc.operate.health import HealthState
from cdc.operate.metric_table import (
    COUNTED,
    COUNTERS,
    FOLLOWER,
    GAUGES,
    INCREMENTAL_SNAPSHOT,
    OTHERS,
    REPORTED,
    SNAPSHOT,
    SOURCE,
    WEBHOOK,
)
from cdc.operate.webhooks import STATES as WEBHOOK_STATES
from cdc.operate.webhooks import WebhookStatus
from cdc.source.authority import Refusals

if TYPE_CHECKING:
    from cdc.log.batch import BatchContents
    from cdc.log.completeness import IncompleteTopic
    from cdc.log.records import ResumePosition
    from cdc.operate.monitor import Monitor
    from cdc.operate.retention import Retention
    from cdc.operate.verdict import Verdict
    from cdc.snapshot.incremental.records import IncrementalRecord
    from cdc.snapshot.initial.progress import Report
    from cdc.source.server import OpenTransaction

# An idle daemon writes how far it is every ten seconds: sooner than this nothing lags.
_IDLE_SECONDS = 15.0
# A stage takes a millisecond or two on an idle system.
_STAGE_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.5, 2.0, 10.0)
# A commit takes some milliseconds on an idle system and up to a second with a full batch.
_COMMIT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_EVENT_BUCKETS = (1, 10, 100, 1_000, 5_000, 10_000, 25_000, 50_000, 100_000)
_BYTE_BUCKETS = tuple(4.0**power * 1_024 for power in range(9))

_WAL_STATUS = ("reserved", "extended", "unreserved", "lost")


class Durations:
    """A histogram that costs a third of a microsecond per observation, a tenth of the library's."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(_STAGE_BUCKETS) + 1)  # by bucket, the last without a bound
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation; only the pipeline's thread calls it."""
        self.counts[bisect_left(_STAGE_BUCKETS, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return Prometheus' cumulative counts by upper bound."""
        bounds = (*(str(bound) for bound in _STAGE_BUCKETS), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Metrics(Collector):
    """Plain attributes in, Prometheus text out.

    Set the gauges, add to the counters, `observe` the histograms. `feedback_at` is the monotonic
    time of the last feedback to Postgres.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.registry = CollectorRegistry()
        self.pipeline = ""
        self.wal_end_lsn = 0
        self.received_lsn = 0
        self.published_lsn = 0
        self.confirmed_lsn = 0
        self.frontier_lsn = 0
        self.seq = 0
        self._newest_seconds = 0.0  # how old the newest commit was when it was published
        self._moved_at = now()  # when something was last published, or all of the WAL was
        self.held_seconds = 0.0
        self.wrong_policies: dict[str, str] = {}  # cleanup.policy by topic, where another is meant
        self.compaction_held: list[str] = []  # the readers for which nothing is compacted
        self.unknown_type_columns = 0
        self.pending_events = 0
        self.pending_bytes = 0
        self.feedback_at: float | None = None
        self._source: tuple[float, dict[str, float | None], str | None] | None = None
        self.state = HealthState.STARTING
        self.snapshot: Report | None = None
        self.initial_stage: str | None = "done"  # in the log, once the daemon streams
        # Called when metrics are read: the verdict.
        self.verdict: Callable[[], Verdict | None] = lambda: None
        # Called when metrics are read: the incremental snapshots that are not over.
        self.incremental_snapshots: Callable[[], list[IncrementalRecord]] = list
        # Also those that are over.
        self.all_incremental_snapshots: Callable[[], list[IncrementalRecord]] = list
        self.incomplete_topics: list[IncompleteTopic] = []  # by the last check of the source
        self.followers: Callable[[], list[FollowerStatus]] = list
        self.webhooks: Callable[[], list[WebhookStatus]] = list
        # What reads these and other reports in the background, by what it reads.
        self.monitors: dict[str, Monitor[Any]] = {}
        self.events = 0
        self.dead_letter_events = 0
        self.kafka_transactions = 0
        self.direct_transactions = 0
        self.bytes = 0
        self.refusals = Refusals()
        self.reconnects: dict[str, int] = {}  # by reason: few and fixed, never a message
        self.commit_seconds = Histogram(
            "lockstep_kafka_commit_seconds",
            OTHERS["kafka_commit_seconds"],
            buckets=_COMMIT_BUCKETS,
            registry=self.registry,
        )
        self.stage_seconds = {name: Durations() for name in STAGES}
        self.batch_events = Histogram(
            "lockstep_batch_events",
            OTHERS["batch_events"],
            buckets=_EVENT_BUCKETS,
            registry=self.registry,
        )
        self.batch_bytes = Histogram(
            "lockstep_batch_bytes",
            OTHERS["batch_bytes"],
            buckets=_BYTE_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    @property
    def lag_seconds(self) -> float:
        """How late the newest published commit was, or for how long none has followed it."""
        waited = self._now() - self._moved_at
        lacks = self.published_lsn < self.wal_end_lsn and waited > _IDLE_SECONDS
        return max(self._newest_seconds, waited if lacks else 0.0)

    @property
    def lag_bytes(self) -> int:
        return max(0, self.wal_end_lsn - self.published_lsn)

    def unread(self) -> list[dict[str, object]]:
        """Return what monitors cannot read now, as the body of /readyz has it."""
        found = [each.unread for each in [*self.monitors.values()]]
        return [each._asdict() for each in found if each is not None]

    def note_stream(
        self,
        *,
        wal_end: int,
        received: int,
        confirmed: int,
        feedback_at: float,
        pending_events: int,
        pending_bytes: int,
    ) -> None:
        """Note the stream's state after an iteration of the loop."""
        self.wal_end_lsn = wal_end
        self.received_lsn = received
        self.confirmed_lsn = confirmed
        self.feedback_at = feedback_at
        self.pending_events = pending_events
        self.pending_bytes = pending_bytes
        if self.published_lsn >= wal_end:
            self._newest_seconds, self._moved_at = 0.0, self._now()

    def committed(self, position: ResumePosition, batch: BatchContents, moments: Moments) -> None:
        self.kafka_transactions += 1
        self.direct_transactions += batch.direct
        self.events += batch.events
        self.dead_letter_events += batch.dead_letters
        self.bytes += batch.bytes
        self.batch_events.observe(batch.events)
        self.batch_bytes.observe(batch.bytes)
        self.commit_seconds.observe(moments.confirmed - moments.handed_over)
        for stage, seconds in moments.seconds():
            self.stage_seconds[stage].observe(seconds)
        if position.end_lsn != self.published_lsn or batch.events:
            self._moved_at = self._now()
        self.published_lsn = position.end_lsn
        self.seq = position.seq
        self.frontier_lsn = batch.frontier_lsn or self.frontier_lsn
        if batch.events:
            self._newest_seconds = max(0.0, time.time() - position.committed_at_us / 1e6)

    def source_checked(
        self, timeline: int, retention: Retention | None, holders: list[OpenTransaction]
    ) -> None:
        """Note what a check of the source found; `retention` is None where the slot was missing."""
        ages = {
            prepared: max(
                (each.age_seconds or 0.0 for each in holders if bool(each.prepared) is prepared),
                default=0.0,
            )
            for prepared in (False, True)
        }
        values: dict[str, float | None] = {
            "timeline": timeline,
            "oldest_transaction_seconds": ages[False],
            "oldest_prepared_seconds": ages[True],
        }
        if retention is not None:
            values |= {
                "slot_retained_bytes": retention.slot.retained_bytes,
                "slot_safe_bytes": retention.slot.safe_wal_bytes,
                "slot_stalled_seconds": retention.stalled_seconds,
                "slot_lost_in_seconds": retention.lost_in_seconds,
                "wal_bytes_per_second": retention.wal_bytes_per_second,
            }
        wal_status = retention.slot.wal_status if retention else None
        self._source = self._now(), values, wal_status

    def be_standby(self) -> None:
        """Forget what the daemon that streams measures: another one does now. Counters stay."""
        self.wal_end_lsn = self.received_lsn = self.published_lsn = self.confirmed_lsn = 0
        self.frontier_lsn = self.seq = 0
        self.pending_events = self.pending_bytes = 0
        self._newest_seconds, self._moved_at = 0.0, self._now()
        self.feedback_at = self._source = None
        self.incremental_snapshots = self.all_incremental_snapshots = list
        self.incomplete_topics, self.wrong_policies, self.compaction_held = [], {}, []

    def reconnected(self, reason: str) -> None:
        """Count a reconnect; `reason` is an error's class name or another fixed word."""
        self.reconnects[reason] = self.reconnects.get(reason, 0) + 1

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for name, meaning in GAUGES.items():
            # A clock that was set back must not make a lag negative.
            yield _gauge(name, meaning, max(0, getattr(self, name)))
        if self.feedback_at is not None:
            age = max(0.0, self._now() - self.feedback_at)
            yield _gauge("feedback_age_seconds", OTHERS["feedback_age_seconds"], age)
        yield from self._collect_verdict()
        yield from self._collect_source()
        yield from self._collect_snapshot()
        yield from self._collect_incremental_snapshots()
        yield from self._collect_followers()
        yield from self._collect_webhooks()
        yield _gauges("pipeline", OTHERS["pipeline"], ["pipeline"], [(self.pipeline, 1)])
        states = ((each.value, each is HealthState(self.state)) for each in HealthState)
        yield _gauges("state", OTHERS["state"], ["state"], states)
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"lockstep_{name}", meaning, value=getattr(self, name))
        stages = HistogramMetricFamily(
            "lockstep_batch_stage_seconds",
            OTHERS["batch_stage_seconds"],
            labels=["stage"],
        )
        for name, durations in self.stage_seconds.items():
            stages.add_metric([name], durations.buckets(), durations.seconds)
        yield stages
        reconnects = list(self.reconnects.items())
        yield _counters("reconnects", OTHERS["reconnects"], ["reason"], reconnects)
        yield _counters(
            "refused_messages",
            OTHERS["refused_messages"],
            ["kind", "reason"],
            list(self.refusals.counts.items()),
        )

    def _collect_verdict(self) -> Iterator[Metric]:
        found = self.verdict()
        if found is None:
            return
        levels = ((each.value, each is found.level) for each in Level)
        about = OTHERS["verdict"]
        yield _gauges("verdict", about, ["level"], levels)
        causes = Counter((each.level.value, each.about) for each in found.causes)
        about = OTHERS["verdict_causes"]
        yield _gauges("verdict_causes", about, ["level", "about"], causes.items())

    def _collect_snapshot(self) -> Iterator[Metric]:
        """Yield the progress of the initial snapshot, if this process has taken one."""
        for name, meaning in SNAPSHOT.items():
            if (value := getattr(self.snapshot, name, None)) is not None:
                yield _gauge(f"snapshot_{name}", meaning, value)

    def _collect_incremental_snapshots(self) -> Iterator[Metric]:
        found = self.incremental_snapshots()
        about = OTHERS["incremental_snapshots"]
        yield _gauge("incremental_snapshots", about, len(found))
        for name, meaning in INCREMENTAL_SNAPSHOT.items():
            values = (((each.id, each.name), getattr(each, name)) for each in found)
            yield _gauges(f"incremental_snapshot_{name}", meaning, ["id", "table"], values)

    def _collect_followers(self) -> Iterator[Metric]:
        """Yield how far each follower is; what it has not reported is absent."""
        found = self.followers()
        states = (((each.name, name), each.state == name) for each in found for name in STATES)
        about = OTHERS["follower_state"]
        yield _gauges("follower_state", about, ["follower", "state"], states)
        for name, meaning in (FOLLOWER | REPORTED).items():
            values = [
                (each.name, value)
                for each in found
                if (value := getattr(each if name in FOLLOWER else each.record, name, None))
                is not None
            ]
            yield _gauges(f"follower_{name}", meaning, ["follower"], values)
        for name, meaning in COUNTED.items():
            counts = ((each.name, getattr(each.record, name)) for each in found if each.record)
            yield _counters(f"follower_{name}", meaning, ["follower"], counts)

    def _collect_webhooks(self) -> Iterator[Metric]:
        """Yield how far each webhook is; the lag of one that has never run is absent."""
        found = self.webhooks()
        if not found:
            return
        states = (
            ((each.name, name), each.state == name) for each in found for name in WEBHOOK_STATES
        )
        yield _gauges("webhook_state", OTHERS["webhook_state"], ["webhook", "state"], states)
        for name, meaning in WEBHOOK.items():
            values = [
                (each.name, value) for each in found if (value := getattr(each, name)) is not None
            ]
            yield _gauges(f"webhook_{name}", meaning, ["webhook"], values)

    def _collect_source(self) -> Iterator[Metric]:
        if self._source is None:
            return
        at, values, wal_status = self._source
        for name, meaning in SOURCE.items():
            if (value := values.get(name)) is not None:
                yield _gauge(name, meaning, value)
        if wal_status is not None:
            states = ((each, each == wal_status) for each in _WAL_STATUS)
            yield _gauges("slot_wal_status", OTHERS["slot_wal_status"], ["wal_status"], states)
        incomplete = sum(each.captured for each in self.incomplete_topics)
        yield _gauge("incomplete_topics", OTHERS["incomplete_topics"], incomplete)
        age = max(0.0, self._now() - at)
        yield _gauge("source_check_age_seconds", OTHERS["source_check_age_seconds"], age)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"lockstep_{name}", meaning, value=value)


# One value for each label's value, or for each tuple of several labels' values.
_Samples = Iterable[tuple[str | tuple[str, ...], float]]


def _gauges(name: str, meaning: str, labels: list[str], samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"lockstep_{name}", meaning, labels=labels), samples)


def _counters(name: str, meaning: str, labels: list[str], samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(f"lockstep_{name}", meaning, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    for label, value in samples:
        family.add_metric([label] if isinstance(label, str) else label, float(value))
    return family
