"""`cdc trace` on real servers: a transaction's spans, as a receiver of OTLP gets them."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.events import LSN
from cdc.log import view_requests
from lockstep.conformance.memory import MemorySink
from tests.fixtures.commands import environment
from tests.fixtures.daemon import START_SECONDS, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import reach
from tests.fixtures.span_receiver import SpanReceiver, attributes, receiving
from tests.integration.test_following import running
from tests.integration.test_wait import FakeFollower

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Start = Callable[[PipelineUnderTest], "Tracer"]

_TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
_FOLLOWERS = {"cache": {"redis": {"url": "redis://localhost"}}}


@pytest.fixture
def receiver() -> Iterator[SpanReceiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[PipelineUnderTest], Tracer]]:
    """Start a `cdc trace` that ends with the test."""
    with ExitStack() as stack:

        def started(line: PipelineUnderTest) -> Tracer:
            tracer = Tracer(line, tmp_path / "trace.log")
            stack.callback(tracer.kill)
            tracer.wait()
            return tracer

        yield started


class Tracer:
    """One `cdc trace`."""

    def __init__(self, line: PipelineUnderTest, log: Path) -> None:
        kept = environment()
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cdc.cli.main", "trace", "-c", str(line.config_file)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=kept | {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-token=secret"},
            )

    def wait(self) -> None:
        wait_until(lambda: "0 traced" in self.log, "it does not start")

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8")

    def close(self) -> str:
        """Stop it; return what it printed."""
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(START_SECONDS) == 0, self.log
        return self.log

    def kill(self) -> None:
        """End it, if it runs."""
        self._process.kill()
        self._process.wait()


def traced(line: PipelineUnderTest, content: str | None = None, rows: int = 1) -> str:
    """Commit rows with a traceparent, one of our own if not given; return its trace's id."""
    trace_id = secrets.token_hex(16)
    with line.database.connect() as connection, connection.transaction():
        connection.execute(
            "SELECT pg_logical_emit_message(true, 'traceparent', %s)",
            (content or f"00-{trace_id}-{secrets.token_hex(8)}-01",),
        )
        connection.execute(
            "INSERT INTO t SELECT (SELECT coalesce(max(id), 0) FROM t) + g"
            " FROM generate_series(1, %s) g",
            (rows,),
        )
    return trace_id


def written(line: PipelineUnderTest) -> LSN:
    with line.database.connect() as connection:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None
    return LSN.parse(row[0])


def published(line: PipelineUnderTest) -> None:
    """Wait until the log has a frontier with everything that was committed."""
    lsn = written(line)
    line.database.execute("SELECT pg_logical_emit_message(true, 'x', 'x')")
    wait_until(lambda: line.frontiers()[-1].lsn >= lsn, "no frontier has it")


def test_a_commit_is_traced_into_a_follower_within_the_applications_trace(
    spark: SparkSession, pipeline: NewPipeline, receiver: SpanReceiver, start: Start
) -> None:
    tracing = {"endpoint": receiver.url, "sample": 0}
    line = pipeline(_TABLE, followers=_FOLLOWERS, tracing=tracing)
    line.start().wait_ready()
    tracer = start(line)
    with running(spark, line, cache=MemorySink(line.config.prefix)) as runs:
        first, second = traced(line), traced(line, rows=500)
        line.database.execute("INSERT INTO t VALUES (-1)")  # not traced
        reach(written(line), runs.values())
        names = {"replicate", "publish", "apply cache"}
        wait_until(
            lambda: all(receiver.of(each).keys() == names for each in (first, second)),
            f"spans are missing: {tracer.log}",
        )
    printed = tracer.close()
    assert "2 traced; 0 open; 6 spans sent" in printed
    assert len(receiver.spans) == 6
    assert receiver.headers[0]["x-token"] == "secret"
    for trace in (first, second):
        spans = receiver.of(trace)
        root = spans["replicate"]
        assert root.parent_span_id
        publish, apply = spans["publish"], spans["apply cache"]
        assert {publish.parent_span_id, apply.parent_span_id} == {root.span_id}
        assert root.start_time_unix_nano == publish.start_time_unix_nano
        assert publish.end_time_unix_nano == apply.start_time_unix_nano
        assert apply.end_time_unix_nano == root.end_time_unix_nano
        assert 0 < root.end_time_unix_nano - root.start_time_unix_nano < 60e9
        assert LSN.parse(attributes(root)["lockstep.lsn"]) <= LSN.parse(
            attributes(apply)["lockstep.applied.lsn"]
        )


def test_others_are_traced_by_their_share_and_what_no_follower_has_stays_open(
    pipeline: NewPipeline, receiver: SpanReceiver, start: Start
) -> None:
    tracing = {"endpoint": receiver.url, "sample": 1}
    line = pipeline(_TABLE, followers=_FOLLOWERS, tracing=tracing)
    line.start().wait_ready()
    tracer = start(line)
    line.database.execute("INSERT INTO t VALUES (1)")
    wait_until(lambda: receiver.spans, "nothing is traced")
    assert {each.name for each in receiver.spans} == {"publish"}
    # Each in a frontier of its own: of those of one frontier, the share traces one.
    for content in ("garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        traced(line, content)
        published(line)
    follower = FakeFollower(line.config)
    follower.reports.send(view_requests.key(line.config, "cache", drop="v"), None)  # no report
    follower.report(lsn=written(line), seq=1_000)
    wait_until(
        lambda: sum(each.name == "replicate" for each in receiver.spans) >= 3, "none has ended"
    )
    line.database.execute("INSERT INTO t VALUES (-1)")
    printed = tracer.close()
    assert "ended without" not in printed
    assert len({each.trace_id for each in receiver.spans}) >= 3


def test_a_receiver_that_refuses_spans_holds_nothing_up(
    pipeline: NewPipeline, receiver: SpanReceiver, start: Start
) -> None:
    receiver.refuses = True
    tracing = {"endpoint": receiver.url, "sample": 1}
    line = pipeline(_TABLE, tracing=tracing)
    line.start().wait_ready()
    tracer = start(line)
    line.database.execute("INSERT INTO t VALUES (1)")
    wait_until(lambda: receiver.headers, "nothing is sent")
    printed = tracer.close()
    assert "2 spans lost: the receiver does not take them" in printed
    assert "Traceback" not in printed


def test_without_a_receiver_it_says_what_to_configure(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = pipeline(_TABLE)
    assert run(["trace", "-c", str(line.config_file)]) == Exit.CONFIG
    assert "tracing: {endpoint:" in capsys.readouterr().err
