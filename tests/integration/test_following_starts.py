"""Followers while Spark starts: small cuts at once, large ones by Spark, and one hand-over."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from cdc.errors import ConfigError, Exit
from lockstep.jobs.apply import following as module
from lockstep.jobs.apply import stores
from lockstep.jobs.apply.following import Following
from lockstep.jobs.apply.running import Run
from lockstep.jobs.spark.starting import SparkStart
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import Followed, alongside, reach

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v int)"


class Starting(SparkStart):
    """A Spark that starts when the test says so."""

    def __init__(self) -> None:
        self.session: Future[SparkSession] = Future()
        self.wanted = threading.Event()

    def want(self, follower: str) -> None:
        assert follower == "cache"
        self.wanted.set()


@pytest.fixture
def line(pipeline: NewPipeline, redis_url: str) -> PipelineUnderTest:
    made = pipeline(_TABLE, followers={"cache": {"redis": {"url": redis_url}}})
    made.start().wait_ready()
    return made


def run_of(line: PipelineUnderTest, spark: SparkStart) -> Run:
    config = line.config
    sink = stores.sink(config, "cache", config.followers["cache"])
    following = Following(spark, config, line.config_file, "cache", sink)
    return Run(config, "cache", "redis", following)


def count(client: redis.Redis, line: PipelineUnderTest) -> int:
    return sum(1 for _ in client.scan_iter(f"{line.config.prefix}:public.t:*", count=1_000))


def test_small_cuts_are_applied_before_spark_has_started_and_after(
    line: PipelineUnderTest, spark: SparkSession, redis_client: redis.Redis
) -> None:
    """Nothing is missing or twice where the query takes over, under load."""
    followed, starting = Followed(line, spark), Starting()
    run = run_of(line, starting)
    over = threading.Event()

    def write() -> None:
        with line.database.connect() as connection:
            number = 0
            while not over.is_set():
                number += 1
                connection.execute("INSERT INTO t VALUES (%s, 0)", [number])

    writer = threading.Thread(target=write)
    with alongside({"cache": run}):
        line.database.execute("INSERT INTO t SELECT -g, g FROM generate_series(1, 100) g")
        reach(followed.lsn(), [run])
        assert count(redis_client, line) == 100
        wait_until(starting.wanted.is_set, "Spark is not wanted although nothing is left to do")
        writer.start()
        try:
            starting.session.set_result(spark)
            wait_until(lambda: spark.streams.active, "no query")
            before = run.progress.batches
            wait_until(lambda: run.progress.batches > before + 20, "the query applies nothing")
        finally:
            over.set()
            writer.join()
        reach(followed.lsn(), [run])
        (rows,) = line.query("SELECT count(*) FROM t")
        assert count(redis_client, line) == rows
        assert run.applied is not None
        assert run.progress.events == run.applied.seq, "each event once"
    assert run.error is None
    assert not spark.streams.active


def test_a_large_cut_waits_for_spark(
    line: PipelineUnderTest,
    spark: SparkSession,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SMALL_EVENTS", 50)
    followed, starting = Followed(line, spark), Starting()
    run = run_of(line, starting)
    with alongside({"cache": run}):
        line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")
        lsn = followed.lsn()
        wait_until(starting.wanted.is_set, "Spark is not wanted")
        assert run.applied is not None
        assert run.applied.lsn < lsn
        assert count(redis_client, line) == 0, "nothing of it is written"
        starting.session.set_result(spark)
        reach(lsn, [run])
    assert count(redis_client, line) == 500


def test_a_spark_that_cannot_start_halts_its_followers(line: PipelineUnderTest) -> None:
    starting = Starting()
    starting.session.set_exception(ConfigError("no Java", hint="install it"))
    run = run_of(line, starting)
    assert run.run() == Exit.CONFIG
    assert (run.state, run.error and run.error.what) == ("halted", "no Java")


def test_a_stop_does_not_wait_for_spark(line: PipelineUnderTest) -> None:
    run = run_of(line, Starting())
    with alongside({"cache": run}):
        wait_until(lambda: run.state == "following", "it does not follow")
    assert (run.state, run.exit) == ("stopped", Exit.OK)


def test_what_can_be_reached_without_spark_needs_none(
    line: PipelineUnderTest, spark: SparkSession, tmp_path: Path, redis_client: redis.Redis
) -> None:
    line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")
    lsn = Followed(line, spark).lsn()
    config, scratch = line.config, tmp_path / "scratch"
    scratch.mkdir()
    sink = stores.sink(config, "cache", config.followers["cache"])
    following = Following(
        Starting(), config, line.config_file, "cache", sink, until=lsn, folder=scratch
    )
    assert Run(config, "cache", "redis", following).run() == Exit.OK
    assert count(redis_client, line) == 500
    assert not list(scratch.iterdir()), "temporary files"
