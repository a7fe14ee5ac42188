"""Traces of transactions, from the commit in Postgres into each store.

Everything they need is in the log: the commit's time and the record's own in the frontier topic,
each store's frontier in the followers' reports. So `cdc trace` only reads, and a trace costs the
daemon and the followers nothing.

A transaction is traced if it has a logical message `traceparent` (W3C Trace Context), as a part of
the application's own trace; or if it is the last one of a frontier that is sampled. Its spans are
`replicate`, and in it `publish` and one `apply NAME` for each follower.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import random
import re
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from cdc.config import Config
    from cdc.log.follower_reports import FollowerRecord
    from cdc.log.records import FrontierRecord

# The prefix of logical messages whose content is the header `traceparent`.
PREFIX: Final = "traceparent"
# Traces that wait for a frontier or a follower: who may write in the source may ask for any number.
MOST_OPEN: Final = 1_000
# A trace ends after so long without what it waits for.
MOST_SECONDS: Final = 600.0
# A message may arrive after the frontier of its transaction, which is in another topic.
_RECENT_FRONTIERS: Final = 1_000
# Of what W3C specifies, the version that exists, with the flag that its sender records it.
_TRACEPARENT: Final = re.compile(
    rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]"
)


class _Published(NamedTuple):
    """A frontier, and when the log took its record: without its partitions, which may be many."""

    seq: int
    lsn: str
    epoch: int
    at_us: int


@dataclass
class _Open:
    """A traced transaction that has not reached every store."""

    seq: int
    committed_at_us: int
    root: Span
    context: Context
    deadline: float
    waits_for: set[str]
    published: _Published | None = None
    end_us: int = 0


def parent_of(content: bytes) -> Context | None:
    """Return the context that a message's content names; None if it names none to record."""
    if _TRACEPARENT.fullmatch(content) is None:
        return None
    return TraceContextTextMapPropagator().extract({"traceparent": content.decode("ascii")})


class TransactionSpans:
    """Makes spans of what the log has. Give it messages and frontiers before reports."""

    def __init__(
        self,
        config: Config,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance` is asked for each frontier with rows; what is below the share is traced."""
        self._tracer, self._clock, self._chance = tracer, clock, chance
        self._pipeline, self._share = config.pipeline, config.tracing.sample
        self._own = f"{config.prefix}.cdc."
        self._followers = frozenset(config.followers)
        self._open: list[_Open] = []
        self._recent = deque[_Published](maxlen=_RECENT_FRONTIERS)
        self._reports: dict[str, FollowerRecord] = {}
        self.traced = self.expired = self.left_out = 0

    @property
    def open(self) -> int:
        """How many traces wait for a frontier or a follower."""
        return len(self._open)

    def message(self, content: bytes, source: dict[str, Any]) -> None:
        """Trace a message's transaction, if the content asks for it."""
        parent = parent_of(content)
        if parent is None:
            return
        seq = source["seq"]
        found = self._begin(seq, source["ts_us"], str(source["commit_lsn"]), parent)
        published = next((each for each in self._recent if each.seq >= seq), None)
        if found is not None and published is not None:
            self._publish(found, published)

    def frontier(self, record: FrontierRecord, at_us: int) -> None:
        """Note that the log has everything up to a frontier; trace its transaction if sampled."""
        if record.pipeline != self._pipeline:
            return
        published = _Published(record.seq, str(record.lsn), record.epoch, at_us)
        self._recent.append(published)
        reached = [each for each in self._open if not each.published and each.seq <= record.seq]
        if not reached and self._has_rows(record) and self._chance() < self._share:
            found = self._begin(record.seq, record.committed_at_us, str(record.lsn), None)
            reached = [found] if found else []
        for each in reached:
            self._publish(each, published)

    def _has_rows(self, record: FrontierRecord) -> bool:
        """Return whether there are changes of tables in it: more than a canary, or a new LSN."""
        return any(
            events and not topic.startswith(self._own) for topic, _, _, events in record.partitions
        )

    def report(self, record: FollowerRecord) -> None:
        """Note what a follower has applied."""
        if record.pipeline != self._pipeline or record.follower not in self._followers:
            return
        self._reports[record.follower] = record
        for each in list(self._open):
            self._apply(each, record)

    def expire(self) -> None:
        """End the traces that have waited for too long, as errors."""
        now = self._clock()
        while self._open and self._open[0].deadline <= now:
            found = self._open[0]
            missing = ", ".join(sorted(found.waits_for)) if found.published else "the log"
            what = f"not in {missing} after {MOST_SECONDS:.0f} s"
            found.root.set_status(Status(StatusCode.ERROR, what))
            self.expired += 1
            self._end(found, found.committed_at_us + int(MOST_SECONDS * 1e6))

    def close(self) -> None:
        """End the traces that are open, as they are."""
        for each in list(self._open):
            each.root.set_attribute("lockstep.incomplete", value=True)
            self._end(each, each.end_us or each.committed_at_us)

    def _begin(
        self, seq: int, committed_at_us: int, lsn: str, parent: Context | None
    ) -> _Open | None:
        """Return a new trace; None if there is no room for one."""
        if len(self._open) >= MOST_OPEN:
            self.left_out += 1
            return None
        root = self._tracer.start_span(
            "replicate",
            parent,
            SpanKind.CONSUMER,
            {"lockstep.pipeline": self._pipeline, "lockstep.seq": seq, "lockstep.lsn": lsn},
            start_time=committed_at_us * 1_000,
        )
        within = trace.set_span_in_context(root)
        deadline = self._clock() + MOST_SECONDS
        found = _Open(seq, committed_at_us, root, within, deadline, set(self._followers))
        self._open.append(found)
        self.traced += 1
        return found

    def _publish(self, found: _Open, published: _Published) -> None:
        fields = {
            "lockstep.frontier.lsn": published.lsn,
            "lockstep.frontier.seq": published.seq,
            "lockstep.epoch": published.epoch,
        }
        found.published = published
        self._span(
            found, "publish", SpanKind.PRODUCER, found.committed_at_us, published.at_us, fields
        )
        self._apply(found, *self._reports.values())

    def _apply(self, found: _Open, *reports: FollowerRecord) -> None:
        """Make the spans of followers whose reports show the transaction; end after the last."""
        for each in reports:
            if found.published and each.follower in found.waits_for and each.seq >= found.seq:
                self._span_of(found, found.published, each)
        if found.published and not found.waits_for:
            self._end(found, found.end_us)

    def _span_of(self, found: _Open, published: _Published, record: FollowerRecord) -> None:
        name = record.follower
        found.waits_for.remove(name)
        fields = {
            "lockstep.follower": name,
            "lockstep.store": record.store,
            "lockstep.generation": record.generation,
            "lockstep.applied.lsn": str(record.lsn),
        }
        at_us = record.moved_at_us or record.at_us
        self._span(found, f"apply {name}", SpanKind.CONSUMER, published.at_us, at_us, fields)

    def _span(
        self,
        found: _Open,
        name: str,
        kind: SpanKind,
        start_us: int,
        end_us: int,
        fields: dict[str, Any],
    ) -> None:
        """Make a span within a trace; not one of a negative length, by clocks that differ."""
        end_us = max(start_us, end_us)
        span = self._tracer.start_span(
            name, found.context, kind, fields, start_time=start_us * 1_000
        )
        span.end(end_us * 1_000)
        found.end_us = max(found.end_us, end_us)

    def _end(self, found: _Open, end_us: int) -> None:
        self._open.remove(found)
        found.root.end(max(found.committed_at_us, end_us) * 1_000)
