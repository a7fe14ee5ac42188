"""A standby of a follower: it takes over from a copy that ended, and gives way to another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from cdc.log.follower_reports import read
from lockstep.jobs.apply import stores
from lockstep.jobs.apply.following import Following
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.apply.standby import MARK
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import LONG, Followed, alongside, reach, starting

ROOT = Path(__file__).parents[2]
# Longer than reports may be late on a busy machine.
_SILENT_SECONDS = 20.0
_TABLE = "CREATE TABLE t (id int PRIMARY KEY)"


def standby_of(line: PipelineUnderTest, spark: SparkSession) -> FollowerRun:
    config = line.config
    sink = stores.sink(config, "cache", config.followers["cache"])
    following = Following(starting(spark, "cache"), config, "cache", sink)
    return FollowerRun(config, "cache", "redis", following, standby_seconds=_SILENT_SECONDS)


@pytest.mark.slow
def test_a_standby_takes_over_and_gives_way(
    spark: SparkSession, pipeline: NewPipeline, redis_url: str, redis_client: redis.Redis
) -> None:
    """From a killed process and from one that was stopped; between them to a copy that returns."""
    line = pipeline(_TABLE, followers={"cache": {"redis": {"url": redis_url}}})
    line.start().wait_ready()
    followed, standby = Followed(line, spark), standby_of(line, spark)

    def owner() -> str:
        found = read(line.config).get("cache")
        return found.owner if found else ""

    command = [sys.executable, str(ROOT / "jobs" / "follow.py"), "--config", str(line.config_file)]
    active = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait_until(owner, "nothing follows", LONG)
        first = owner()
        with alongside({"cache": standby}):
            line.database.execute("INSERT INTO t SELECT generate_series(1, 10)")
            last = f"{line.config.prefix}:public.t:10"
            wait_until(lambda: redis_client.exists(last), "no row", LONG)
            assert (standby.state, standby.applied) == ("standby", None)
            assert owner() == first, "a standby reports nothing"
            os.killpg(active.pid, signal.SIGKILL)
            line.database.execute("INSERT INTO t SELECT generate_series(11, 20)")
            reach(followed.lsn(), [standby])
            wait_until(lambda: owner().endswith(MARK), "the standby does not report", LONG)
            with followed.following("cache") as runs:
                wait_until(lambda: standby.state == "standby", "it does not give way", LONG)
                line.database.execute("INSERT INTO t SELECT generate_series(21, 30)")
                followed.reach(runs["cache"])
            line.database.execute("INSERT INTO t SELECT generate_series(31, 40)")
            reach(followed.lsn(), [standby])
        assert read(line.config)["cache"].state == "stopped"
    finally:
        active.kill()
        active.wait()
    assert sum(1 for _ in redis_client.scan_iter(f"{line.config.prefix}:public.t:*")) == 40
    assert standby.error is None
