"""Spans of transactions are made from what the log has, in whatever order it arrives."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from cdc.config import Config
from cdc.events import LSN
from cdc.log.records import FrontierRecord
from cdc.operate.tracing import MOST_OPEN, MOST_SECONDS, TransactionSpans, parent_of
from tests.fixtures.reported import reported

_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_PARENT = f"00-{_TRACE}-00f067aa0ba902b7-01".encode()
_FOLLOWERS = {name: {"redis": {"url": "redis://localhost"}} for name in ("cache", "search")}


class Under:
    """The tracing under test, with a clock and a chance of its own."""

    def __init__(self, sample: float = 0.0, followers: Any = _FOLLOWERS) -> None:  # noqa: ANN401
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.now = 0.0
        made = msgspec.convert(
            {
                "pipeline": "shop",
                "source": {"dsn": "postgresql://localhost/shop"},
                "log": {"bootstrap_servers": "localhost:9092"},
                "followers": followers,
                "tracing": {"sample": sample},
            },
            Config,
            strict=False,
        )
        self.prefix, self.pipeline = made.prefix, made.pipeline
        self.tracing = TransactionSpans(
            made, provider.get_tracer("test"), lambda: self.now, random.Random(1).random
        )

    def message(self, seq: int, content: bytes = _PARENT, at_us: int = 1_000_000) -> None:
        source = {"seq": seq, "ts_us": at_us, "commit_lsn": str(LSN(seq * 16))}
        self.tracing.message(content, source)

    def frontier(self, seq: int, at_us: int = 1_500_000, table: str = "public.t") -> None:
        record = FrontierRecord(
            pipeline=self.pipeline,
            epoch=1,
            lsn=LSN(seq * 16),
            seq=seq,
            committed_at_us=1_000_000,
            partitions=((f"{self.prefix}.{table}", 0, seq, 1),),
        )
        self.tracing.frontier(record, at_us)

    def report(self, follower: str, seq: int, at_us: int = 2_000_000) -> None:
        record = reported(
            pipeline=self.pipeline, follower=follower, seq=seq, lsn=LSN(seq * 16), moved_at_us=at_us
        )
        self.tracing.report(record)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        found = self.exporter.get_finished_spans()
        assert len({each.name for each in found}) == len(found)
        return {each.name: each for each in found}


def lasted(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time // 1_000, span.end_time // 1_000


def test_a_transaction_is_traced_into_each_store_within_its_applications_trace() -> None:
    under = Under()
    under.message(5)
    under.frontier(7)
    under.report("cache", 7, 2_000_000)
    assert "replicate" not in under.spans
    under.report("search", 9, 3_000_000)
    spans = under.spans
    assert {name: lasted(each) for name, each in spans.items()} == {
        "replicate": (1_000_000, 3_000_000),
        "publish": (1_000_000, 1_500_000),
        "apply cache": (1_500_000, 2_000_000),
        "apply search": (1_500_000, 3_000_000),
    }
    root = spans["replicate"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert {f"{each.context.trace_id:032x}" for each in spans.values() if each.context} == {_TRACE}
    assert root.attributes is not None
    assert root.attributes["lockstep.lsn"] == "0/50"
    assert under.tracing.open == 0


@given(st.permutations(["message", "frontier", "cache", "search"]))
def test_the_spans_are_the_same_in_any_order_of_arrival(order: list[str]) -> None:
    under = Under()
    steps = {
        "message": lambda: under.message(5),
        "frontier": lambda: under.frontier(7),
        "cache": lambda: under.report("cache", 7),
        "search": lambda: under.report("search", 7),
    }
    for each in order:
        steps[each]()
    assert sorted(under.spans) == ["apply cache", "apply search", "publish", "replicate"]
    assert under.tracing.open == 0


def test_a_report_of_less_is_no_span() -> None:
    under = Under()
    under.message(5)
    under.frontier(7)
    under.report("cache", 4)
    under.report("elsewhere", 9)
    assert sorted(under.spans) == ["publish"]


def test_a_sample_of_the_frontiers_with_rows_is_traced() -> None:
    under = Under(sample=0.25)
    for seq in range(1, 1_001):
        under.frontier(seq)
    assert 200 < under.tracing.traced < 300
    under = Under(sample=1.0)
    under.frontier(1, table="cdc.messages")
    assert under.tracing.traced == 0
    under.frontier(2)
    under.frontier(3)
    assert under.tracing.traced == 2


def test_without_followers_a_trace_ends_with_the_log() -> None:
    under = Under(sample=1.0, followers={})
    under.frontier(1)
    assert sorted(under.spans) == ["publish", "replicate"]


def test_clocks_that_differ_make_no_negative_span() -> None:
    under = Under()
    under.message(5, at_us=5_000_000)
    under.frontier(5, at_us=4_000_000)
    under.report("cache", 5, 1_000_000)
    under.report("search", 5, 1_000_000)
    for span in under.spans.values():
        start, end = lasted(span)
        assert start <= end


def test_a_trace_that_waits_too_long_ends_as_an_error_that_names_the_store() -> None:
    under = Under()
    under.message(5)
    under.frontier(5)
    under.report("cache", 5)
    under.now = MOST_SECONDS - 1
    under.tracing.expire()
    assert under.tracing.open == 1
    under.now = MOST_SECONDS
    under.tracing.expire()
    root = under.spans["replicate"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "not in search after 600 s"
    assert (under.tracing.open, under.tracing.expired) == (0, 1)


def test_who_asks_for_many_traces_gets_a_limited_number() -> None:
    under = Under()
    for seq in range(1, MOST_OPEN + 11):
        under.message(seq)
    assert (under.tracing.open, under.tracing.left_out) == (MOST_OPEN, 10)


def test_traces_that_are_open_at_the_end_are_sent_as_incomplete() -> None:
    under = Under()
    under.message(5)
    under.frontier(5)
    under.tracing.close()
    attributes = under.spans["replicate"].attributes
    assert attributes is not None
    assert attributes["lockstep.incomplete"] is True


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        _PARENT[:-2] + b"00",  # its sender does not record it
        _PARENT + b"\n",
        _PARENT.upper(),
        b"01" + _PARENT[2:],
        b"00-" + b"0" * 32 + _PARENT[35:],
        _PARENT[:36] + b"0" * 16 + b"-01",
        b"\xff" * 55,
    ],
)
def test_a_message_that_is_no_sampled_traceparent_is_not_traced(content: bytes) -> None:
    under = Under()
    under.message(5, content)
    assert under.tracing.open == 0


@given(st.binary(max_size=80))
def test_no_content_of_a_message_is_an_error(content: bytes) -> None:
    parent_of(content)


def test_the_flags_of_a_recorded_trace_are_odd() -> None:
    for first, last in itertools.product("0123456789abcdef", repeat=2):
        content = _PARENT[:-2] + f"{first}{last}".encode()
        assert (parent_of(content) is not None) == (int(last, 16) % 2 == 1)
