"""A store that refuses everything is seen at once, named, and with the time since when."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from cdc.operate import followers
from cdc.operate.findings import Level
from cdc.operate.status import read_status
from lockstep.jobs.apply import stores
from lockstep.jobs.apply.following import Following
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.spark.starting import SparkStart
from lockstep.sinks.opensearch import bulk
from tests.fixtures.busy_opensearch import BusyOpenSearch
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import alongside

_TABLE = "CREATE TABLE t (id int PRIMARY KEY)"


class NoSpark(SparkStart):
    """Small cuts need none."""

    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("Spark is started"), set())

    def want(self, follower: str) -> None:
        """Start none."""


@pytest.fixture
def line(pipeline: NewPipeline, busy_opensearch: BusyOpenSearch) -> PipelineUnderTest:
    search = {"opensearch": {"url": busy_opensearch.url}}
    made = pipeline(_TABLE, followers={"search": search}, source={"canary_seconds": 0})
    made.start().wait_ready()
    return made


def run_of(line: PipelineUnderTest, name: str = "search") -> FollowerRun:
    """Return a follower's run in this process, without Spark."""
    config = line.config
    store = config.followers[name]
    sink = stores.sink(config, name, store)
    return FollowerRun(config, name, stores.kind(store), Following(NoSpark(), config, name, sink))


def says(line: PipelineUnderTest, level: Level, words: str) -> bool:
    found = read_status(line.config).verdict
    return found.level is level and re.search(words, found.sentence) is not None


def test_a_store_that_answers_429_is_named_with_how_late_it_is_and_since_when(
    line: PipelineUnderTest,
    busy_opensearch: BusyOpenSearch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,  # noqa: ANN401
) -> None:
    """By `cdc status`, the daemon and the console alike; it is over when the store accepts."""
    monkeypatch.setattr(bulk, "PATIENCE_SECONDS", 1.0)
    shown = ConsoleUnderTest(
        line.write("console.yaml", http__listen=f"127.0.0.1:{line.daemon.port}"),
        tmp_path / "console.log",
    )
    try:
        with alongside({"search": run_of(line)}):
            line.database.execute("INSERT INTO t VALUES (1)")
            well = r"^every store lags the log by at most \d+ s$"
            wait_until(lambda: says(line, Level.OK, well), "it is not well to begin with")
            measured = r"^every store lags by at most \d+ s$"
            wait_until(
                lambda: re.search(measured, shown.verdict().get("sentence", "")),
                "the console differs",
            )
            busy_opensearch.item_chance = 1.0
            refused_at = time.time()
            line.database.execute("INSERT INTO t VALUES (2)")
            words = (
                r"^degraded: search is waiting and lags by \d+ s: OpenSearch refuses 1 items"
                r" of .*: 429 .*, since (\d\d:\d\d) UTC$"
            )
            wait_until(lambda: says(line, Level.DEGRADED, words), "it is not named")
            found = re.search(words, read_status(line.config).verdict.sentence)
            minutes = {time.strftime("%H:%M", time.gmtime(at)) for at in (refused_at, time.time())}
            assert found is None or found[1] in minutes
            wait_until(
                lambda: re.search(words, line.daemon.health()["verdict"]["sentence"]),
                "the daemon says something else",
            )
            wait_until(
                lambda: re.search(words, shown.verdict().get("sentence", "")), "the console differs"
            )
            busy_opensearch.item_chance = 0.0
            wait_until(lambda: says(line, Level.OK, well), "it is not over")
    finally:
        shown.close()


def test_a_store_whose_sink_only_tries_again_is_not_green_until_the_sink_gives_up(
    line: PipelineUnderTest, busy_opensearch: BusyOpenSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job reports that it follows, and no error: only its frontier shows that nothing moves."""
    monkeypatch.setattr(bulk, "PATIENCE_SECONDS", 600.0)
    monkeypatch.setattr(followers, "STILL_SECONDS", 6.0)
    run = run_of(line)
    with alongside({"search": run}):
        line.database.execute("INSERT INTO t VALUES (1)")
        wait_until(lambda: says(line, Level.OK, "^every store"), "it is not well to begin with")
        busy_opensearch.item_chance = 1.0
        line.database.execute("INSERT INTO t VALUES (2)")
        still = (
            r"^degraded: search has applied nothing for \d+ s, and the log has more for it, since "
        )
        wait_until(lambda: says(line, Level.DEGRADED, still), "it is green")
        assert run.error is None
        busy_opensearch.item_chance = 0.0
        wait_until(lambda: says(line, Level.OK, "^every store"), "it is not over")
