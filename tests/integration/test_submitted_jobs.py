"""Jobs that spark-submit has started end with its JVM, which is what people kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cdc.runtime import spark as files
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.spark import need_java
from tests.fixtures.spark_cluster import HOME, START_SECONDS

_END_SECONDS = START_SECONDS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_a_follower_ends_with_the_jvm_that_has_started_it(
    pipeline: NewPipeline, tmp_path: Path, number: signal.Signals
) -> None:
    need_java()
    lake = tmp_path / "lake"
    made = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY)", followers={"lake": {"delta": {"path": str(lake)}}}
    )
    made.start().wait_ready()
    made.database.execute("INSERT INTO t VALUES (1)")
    command = [str(HOME / "bin" / "spark-submit"), "--master", "local[1]"]
    command += [str(files.job("follow")), "--config", str(made.config_file)]
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(HOME)}
    with (tmp_path / "submit.log").open("wb") as out:
        submitted = subprocess.Popen(
            command, stdout=out, stderr=out, env={**env, "PYSPARK_PYTHON": sys.executable}
        )
    try:
        wait_until((lake / "public.t").exists, "it follows", START_SECONDS)
        children = psutil.Process(submitted.pid).children()
        [follower] = [each for each in children if each.name().startswith("python")]
        submitted.send_signal(number)
        submitted.wait(_END_SECONDS)
        follower.wait(_END_SECONDS)
    finally:
        for each in psutil.Process(submitted.pid).children() if submitted.poll() is None else ():
            each.kill()
        submitted.kill()
        submitted.wait()
        print((tmp_path / "submit.log").read_text()[-6_000:])  # noqa: T201 - of a failed test
    assert not follower.is_running()
