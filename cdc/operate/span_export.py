"""Read the log for `cdc trace`, and send the spans by OTLP over HTTP until it is over.

The receiver may be away: spans wait in a queue of limited size, and what does not fit is lost.
Traces are samples; the log's reader waits for nobody.
"""

from __future__ import annotations

import base64
import logging
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from cdc import __version__
from cdc.errors import ConfigError
from cdc.log import names, records, tail
from cdc.log.follower_reports import FollowerRecord
from cdc.log.records import FrontierRecord
from cdc.operate.tracing import PREFIX, TransactionSpans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from cdc.config import Config
    from cdc.log.partitions import Partition

_FLUSH_MS: Final = 5_000
_SEND_SECONDS: Final = 10.0


class SpanCounts(NamedTuple):
    """What was traced since the start; `lost` spans were refused by the receiver, or not taken."""

    traced: int
    open: int
    expired: int
    left_out: int
    sent: int
    lost: int


class _Sender(SpanExporter):
    """Sends spans and counts them."""

    def __init__(self, to: SpanExporter) -> None:
        self._to = to
        self.sent = self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._to.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._to.shutdown()

    def force_flush(self, timeout_millis: int = _FLUSH_MS) -> bool:
        return self._to.force_flush(timeout_millis)


def export(
    config: Config, is_over: Callable[[], bool], report: Callable[[SpanCounts], None]
) -> SpanCounts:
    """Trace what is committed from now on, until it is over; return what was done.

    `report` is called after each read. Raises ConfigError without an endpoint or topics.
    """
    endpoint = config.tracing.endpoint
    if endpoint is None:
        raise ConfigError(
            "no receiver of traces is configured",
            hint="tracing: {endpoint: http://localhost:4318/v1/traces}; see docs/TRACING.md",
        )
    # It logs each failure with a traceback; the counts show them.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    sender = _Sender(OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_SECONDS))
    resource = Resource.create({"service.name": "lockstep", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(sender))
    tracing = TransactionSpans(config, provider.get_tracer("lockstep", __version__))

    def counts() -> SpanCounts:
        done = (tracing.traced, tracing.open, tracing.expired, tracing.left_out)
        return SpanCounts(*done, sender.sent, sender.lost)

    try:
        _follow(config, tracing, is_over, lambda: report(counts()))
        tracing.close()
    finally:
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()
    return counts()


def _follow(
    config: Config,
    tracing: TransactionSpans,
    is_over: Callable[[], bool],
    report: Callable[[], None],
) -> None:
    frontiers = names.frontier_topic(config.prefix)
    messages = names.messages_topic(config.prefix)
    followers = names.followers_topic(config.prefix)
    # A frontier shows what is published, and reports what of it is applied: in this order.
    order = {messages: 0, frontiers: 1, followers: 2}

    def wanted(present: dict[str, int]) -> set[Partition]:
        if frontiers not in present:
            raise ConfigError(
                f"there is no topic {frontiers}", hint="`cdc setup` creates it; then `cdc run`"
            )
        return {(topic, 0) for topic in order if topic in present}

    with closing(tail.follow(config, wanted, exactly=True)) as batches:
        for batch in batches:
            for each in sorted(batch, key=lambda message: order[str(message.topic())]):
                value, topic = each.value() or b"", str(each.topic())
                if topic == messages:
                    _note_message(tracing, value)
                elif topic == frontiers:
                    frontier = records.decode(FrontierRecord, value, topic)
                    tracing.frontier(frontier, int(each.timestamp()[1]) * 1_000)
                elif value:  # a request has none
                    tracing.report(records.decode(FollowerRecord, value, topic))
            tracing.expire()
            report()
            if is_over():
                return


def _note_message(tracing: TransactionSpans, value: bytes) -> None:
    event = orjson.loads(value)
    message = event["message"]
    content = message.get("content")  # a large one is a dead letter's
    if message["prefix"] == PREFIX and message["transactional"] and content:
        tracing.message(base64.b64decode(content), event["source"])
