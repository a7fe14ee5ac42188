"""The daemon's numbers, for Prometheus: names `lockstep_*`, units last.

The pipeline writes plain attributes, once a batch and never per row; they become samples only when
somebody reads `/metrics`. Each `Metrics` has its own registry, so that several pipelines in one
process (as in tests) do not meet. Python's and the process's own numbers stand beside ours.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cdc.control.health import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from cdc.log.records import ResumePosition

# A commit takes some milliseconds at rest and up to a second with a full batch.
_COMMIT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_EVENT_BUCKETS = (1, 10, 100, 1_000, 5_000, 10_000, 25_000, 50_000, 100_000)
_BYTE_BUCKETS = tuple(4.0**power * 1_024 for power in range(9))

_GAUGES = {
    "wal_end_lsn": "The server's WAL end, as the walsender last told it.",
    "received_lsn": "The newest WAL position received.",
    "published_lsn": "The end LSN of the newest source transaction that is whole in the log.",
    "confirmed_lsn": "The LSN up to which Postgres was told that it may forget WAL.",
    "frontier_lsn": "The LSN of the newest frontier record.",
    "seq": "The newest event's seq.",
    "timeline": "The source's timeline; another after a promotion.",
    "lag_bytes": "WAL between the server's end and the published LSN.",
    "lag_seconds": "Age of the newest published commit while behind; 0 when caught up.",
    "pending_events": "Events in the Kafka transaction that is open.",
    "pending_bytes": "Bytes in the Kafka transaction that is open.",
}


class Cut(NamedTuple):
    """What one Kafka transaction carried."""

    events: int
    bytes: int
    frontier_lsn: int | None


class Metrics(Collector):
    """Plain attributes in, Prometheus text out.

    Set the gauges, add to the counters, `observe` the histograms. `feedback_at` is the monotonic
    time of the last feedback to Postgres.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.registry = CollectorRegistry()
        self.wal_end_lsn = 0
        self.received_lsn = 0
        self.published_lsn = 0
        self.confirmed_lsn = 0
        self.frontier_lsn = 0
        self.seq = 0
        self.timeline = 0
        self.lag_seconds = 0.0
        self.pending_events = 0
        self.pending_bytes = 0
        self.feedback_at: float | None = None
        self.state = State.STARTING
        self.events = 0
        self.kafka_transactions = 0
        self.bytes = 0
        self.reconnects: dict[str, int] = {}  # by reason: few and fixed, never a message
        self.commit_seconds = Histogram(
            "lockstep_kafka_commit_seconds",
            "Duration of Kafka transactions' commits.",
            buckets=_COMMIT_BUCKETS,
            registry=self.registry,
        )
        self.batch_events = Histogram(
            "lockstep_batch_events",
            "Events of a Kafka transaction.",
            buckets=_EVENT_BUCKETS,
            registry=self.registry,
        )
        self.batch_bytes = Histogram(
            "lockstep_batch_bytes",
            "Bytes of a Kafka transaction.",
            buckets=_BYTE_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    @property
    def lag_bytes(self) -> int:
        return max(0, self.wal_end_lsn - self.published_lsn)

    def turn(
        self,
        *,
        wal_end: int,
        received: int,
        confirmed: int,
        feedback_at: float,
        pending_events: int,
        pending_bytes: int,
    ) -> None:
        """Note where the stream stands after a turn of the loop."""
        self.wal_end_lsn = wal_end
        self.received_lsn = received
        self.confirmed_lsn = confirmed
        self.feedback_at = feedback_at
        self.pending_events = pending_events
        self.pending_bytes = pending_bytes
        if self.published_lsn >= wal_end:
            self.lag_seconds = 0.0

    def committed(self, position: ResumePosition, batch: Cut, seconds: float) -> None:
        """Count a Kafka transaction that has committed in `seconds`, up to `position`."""
        self.kafka_transactions += 1
        self.events += batch.events
        self.bytes += batch.bytes
        self.batch_events.observe(batch.events)
        self.batch_bytes.observe(batch.bytes)
        self.commit_seconds.observe(seconds)
        self.published_lsn = position.end_lsn
        self.seq = position.seq
        self.frontier_lsn = batch.frontier_lsn or self.frontier_lsn
        if batch.events:
            self.lag_seconds = max(0.0, time.time() - position.committed_at_us / 1e6)

    def reconnected(self, reason: str) -> None:
        """Count a reconnect; `reason` is an error's class name or another fixed word."""
        self.reconnects[reason] = self.reconnects.get(reason, 0) + 1

    def text(self) -> bytes:
        """Return every sample in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for name, meaning in _GAUGES.items():
            # A clock that was set back must not make a lag negative.
            value = max(0, getattr(self, name))
            yield GaugeMetricFamily(f"lockstep_{name}", meaning, value=value)
        if self.feedback_at is not None:
            age = max(0.0, self._now() - self.feedback_at)
            yield GaugeMetricFamily(
                "lockstep_feedback_age_seconds", "Time since the last feedback.", value=age
            )
        state = GaugeMetricFamily("lockstep_state", "1 for what it is doing.", labels=["state"])
        for each in State:
            state.add_metric([each.value], float(each is State(self.state)))
        yield state
        yield CounterMetricFamily("lockstep_events", "Events published.", value=self.events)
        yield CounterMetricFamily(
            "lockstep_kafka_transactions",
            "Kafka transactions committed.",
            value=self.kafka_transactions,
        )
        yield CounterMetricFamily("lockstep_bytes", "Bytes of events published.", value=self.bytes)
        reconnects = CounterMetricFamily("lockstep_reconnects", "Reconnects.", labels=["reason"])
        for reason, count in list(self.reconnects.items()):
            reconnects.add_metric([reason], count)
        yield reconnects
