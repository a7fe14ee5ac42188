"""Followers and Spark: small cuts need none, and large ones are given to it, one by one."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from typing import Any

import pytest
import redis
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession

import lockstep
from cdc.errors import ConfigError, Exit
from cdc.events import LSN
from cdc.log.follower_reports import read
from lockstep.jobs.apply import following as module
from lockstep.jobs.apply import stores
from lockstep.jobs.apply.following import Batches, Following
from lockstep.jobs.apply.large import Large
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.cuts.cutting import Cut
from lockstep.jobs.spark.starting import SparkStart
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import Followed, alongside, reach, small_cuts

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v int)"


class Starting(SparkStart):
    """A Spark that starts when the test says so."""

    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("the test starts it"), set())
        self.wanted = self._wanted

    def _begin(self) -> None:
        """Leave it to the test."""

    def want(self, follower: str) -> None:
        assert follower == "cache"
        self.wanted.set()


@pytest.fixture
def line(pipeline: NewPipeline, redis_url: str) -> PipelineUnderTest:
    followers = {"cache": {"redis": {"url": redis_url}, "max_events": 40}}
    made = pipeline(_TABLE, followers=followers, source={"canary_seconds": 0})  # events are counted
    made.start().wait_ready()
    return made


def run_of(line: PipelineUnderTest, spark: SparkStart, until: LSN | None = None) -> FollowerRun:
    config = line.config
    sink = stores.sink(config, "cache", config.followers["cache"])
    return FollowerRun(
        config, "cache", "redis", Following(spark, config, "cache", sink, until=until)
    )


def count(client: redis.Redis, line: PipelineUnderTest) -> int:
    return sum(1 for _ in client.scan_iter(f"{line.config.prefix}:public.t:*", count=1_000))


def test_large_cuts_go_to_spark_and_small_ones_follow_without_it(
    line: PipelineUnderTest,
    spark: SparkSession,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is missing or twice between them, under load."""
    small_cuts(monkeypatch, 50)
    followed, starting = Followed(line, spark), Starting()
    run = run_of(line, starting)
    by_spark: list[int] = []
    apply = Large.apply

    def counted(self: Large, given: SparkSession, cut: Cut, *rest: Any, **more: Any) -> Any:  # noqa: ANN401 - as it is
        by_spark.append(cut.events)
        return apply(self, given, cut, *rest, **more)

    monkeypatch.setattr(Large, "apply", counted)

    def write() -> None:
        with line.database.connect() as connection:
            for number in range(1, 401):
                connection.execute("INSERT INTO t VALUES (%s, 0)", [number])

    writer = threading.Thread(target=write)
    with alongside({"cache": run}):
        line.database.execute("INSERT INTO t SELECT -g, g FROM generate_series(1, 40) g")
        reach(followed.lsn(), [run])
        assert count(redis_client, line) == 40
        wait_until(starting.wanted.is_set, "Spark is not wanted although nothing is left to do")
        # The message that `lsn` writes is an event too: the large cut has rows alone.
        wait_until(lambda: run.applied and run.applied.seq == 41, "the message is not applied")
        line.database.execute("INSERT INTO t SELECT -g, g FROM generate_series(41, 500) g")
        wait_until(lambda: line.frontiers()[-1].seq == 501, "no frontier has the rows")
        lsn = followed.lsn()
        assert run.applied is not None
        assert run.applied.lsn < lsn, "a large cut waits for Spark"
        assert count(redis_client, line) == 40, "nothing of it is written"
        starting.session.set_result(spark)
        reach(lsn, [run])
        assert len(by_spark) == 1
        assert 460 <= by_spark[0] <= 462, "the rows, and messages of the test"
        writer.start()
        for first in (1_001, 2_001):
            line.database.execute(
                f"INSERT INTO t SELECT -g, g FROM generate_series({first}, {first} + 199) g"
            )
            reach(followed.lsn(), [run])
        writer.join()
        reach(followed.lsn(), [run])
        (rows,) = line.query("SELECT count(*) FROM t")
        assert count(redis_client, line) == rows
        assert run.progress.events == run.applied.seq, "each event once"
    assert run.error is None
    assert len(by_spark) >= 3
    assert len(by_spark) < run.progress.batches
    assert not spark.streams.active


def test_a_jvm_that_ends_stops_the_follower_for_another_process_to_continue(
    line: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer to any call; nothing is written."""
    small_cuts(monkeypatch, 50)
    line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")

    class Ended:
        def newSession(self) -> SparkSession:  # noqa: N802 - Spark's name
            raise Py4JNetworkError("Answer from Java side is empty")

    starting = Starting()
    starting.session.set_result(Ended())  # type: ignore[arg-type]
    run = run_of(line, starting)
    assert run.run() == Exit.TEMPORARY
    assert (run.state, run.error and run.error.what) == ("stopped", "Spark's JVM has ended")
    last = read(line.config)["cache"]
    assert (last.state, last.what) == ("stopped", "Spark's JVM has ended")
    assert last.seq < 500


def test_a_spark_that_cannot_start_halts_followers_that_need_it(
    line: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch, 50)
    line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")
    starting = Starting()
    starting.session.set_exception(ConfigError("no Java", hint="install it"))
    run = run_of(line, starting)
    assert run.run() == Exit.CONFIG
    assert (run.state, run.error and run.error.what) == ("halted", "no Java")


def test_a_stop_does_not_wait_for_spark(
    line: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch, 50)
    line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")
    starting = Starting()
    run = run_of(line, starting)
    with alongside({"cache": run}):
        wait_until(starting.wanted.is_set, "Spark is not wanted")
    assert (run.state, run.exit) == ("stopped", Exit.OK)


def test_what_can_be_reached_without_spark_needs_none(
    line: PipelineUnderTest, spark: SparkSession, redis_client: redis.Redis
) -> None:
    line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")
    lsn = Followed(line, spark).lsn()
    assert run_of(line, Starting(), lsn).run() == Exit.OK
    assert count(redis_client, line) == 500


def test_the_driver_takes_larger_cuts_while_there_is_no_spark_or_few_cores(
    line: PipelineUnderTest,
    spark: SparkSession,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SMALL_EVENTS", 30)
    line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")
    lsn = Followed(line, spark).lsn()
    starting = Starting()
    run = run_of(line, starting, lsn)
    assert run.run() == Exit.OK
    assert count(redis_client, line) == 500
    assert run.applied is not None
    config = line.config
    sink = stores.sink(config, "cache", config.followers["cache"])
    with closing(sink), closing(Batches(starting, config, sink, run, run.applied)) as batches:
        most = []
        for starting.cores in (0, 3, 4):
            most.append(batches.most_events)
    assert most == [30, 30, 40]


def test_an_application_follows_until_an_lsn_and_gets_the_error_of_a_follower_that_halts(
    line: PipelineUnderTest, spark: SparkSession, redis_client: redis.Redis
) -> None:
    line.database.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 500) g")
    lsn = Followed(line, spark).lsn()
    lockstep.follow(line.config_file, ["cache"], until=str(lsn), spark=spark)
    assert count(redis_client, line) == 500
    redis_client.set(f"{line.config.prefix}:cdc:cache", "of another program")
    with pytest.raises(ConfigError):
        lockstep.follow(line.config_file, until=str(lsn), spark=spark)


_NO_PYSPARK = """\
import sys
from lockstep.jobs import follow
from lockstep.jobs.apply import following
from lockstep.jobs.apply import following_documents as documents
from lockstep.sinks.delta import sink as delta
from lockstep.sinks.opensearch import sink as opensearch
from lockstep.sinks.redis import sink as redis
from lockstep.sinks.sql import sink as sql
print(sorted({each.partition(".")[0] for each in sys.modules} & {"pyspark", "py4j", "pandas"}))
"""


def test_no_follower_imports_spark_before_it_needs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_PYSPARK], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
