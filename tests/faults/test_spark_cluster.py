"""Our jobs on a cluster: a standalone master and worker. An executor is killed meanwhile.

Followers are submitted by the lines of docs/FOLLOWERS.md, which tests those too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import orjson
import pytest
import redis
from psycopg import conninfo

from cdc.runtime import spark as files
from cdc.snapshot.initial import topic
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.read_back import read_to_end
from tests.fixtures.spark import need_java
from tests.fixtures.spark_cluster import HOME, START_SECONDS, Cluster, standalone

SECRET: Final = "correct-horse-battery"
ROWS: Final = 30_000
ADDED: Final = 160_000  # in one transaction: more than the driver handles by itself
ROOT: Final = Path(__file__).parents[2]
COPY_SECONDS: Final = 240.0
FOLLOW_SECONDS: Final = 600.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A worker of two cores, so that the executor that is left can finish."""
    need_java()
    with standalone(tmp_path, 2) as started:
        yield started


def submit(cluster: Cluster, out: IO[bytes], config_file: Path) -> subprocess.Popen[bytes]:
    """Submit the snapshot's job as a user of the cluster would."""
    packed = cluster.folder / "lockstep.zip"
    files.pack(packed)
    command = [str(HOME / "bin" / "spark-submit"), "--master", cluster.master]
    command += ["--py-files", str(packed), str(files.job("snapshot"))]
    command += ["--config", str(config_file), "--json"]
    return subprocess.Popen(command, stdout=out, stderr=out, env=cluster.env)


def documented(cluster: Cluster, config_file: Path) -> str:
    """Return the document's lines that submit a follower to a cluster, here for all followers."""
    lines = (ROOT / "docs" / "FOLLOWERS.md").read_text("utf-8").splitlines()
    at = next(n for n, line in enumerate(lines) if "$ spark-submit --master" in line)
    pack, first, last = lines[at - 1 : at + 2]
    submitted = (first.removesuffix("\\") + last.strip()).removeprefix("$ ")
    assert pack.startswith("$ cdc spark pack ")
    assert "spark://host:7077" in submitted
    chosen = " --followers mirror"
    assert submitted.endswith(f'"$(cdc spark app follow)" --config lockstep.yaml{chosen}')
    own = submitted.removesuffix(chosen).replace("spark://host:7077", cluster.master)
    return (
        f"{pack.removeprefix('$ ')}\nexec {own.replace('lockstep.yaml', config_file.name)} --once"
    )


def follow(cluster: Cluster, config_file: Path, log: Path) -> None:
    """Have all followers catch up on the cluster, by the documented lines."""
    folder = config_file.parent
    cdc = f"cdc() {{ '{sys.executable}' -m cdc.cli.main \"$@\"; }}"
    path = f"{HOME / 'bin'}{os.pathsep}{cluster.env['PATH']}"
    with log.open("wb") as out:
        done = subprocess.run(
            ["bash", "-euc", f"{cdc}\n{documented(cluster, config_file)}"],
            cwd=folder,
            env=cluster.env | {"PATH": path},
            stdout=out,
            stderr=out,
            timeout=FOLLOW_SECONDS,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-6_000:]


@pytest.mark.long("two minutes on a Spark cluster")
@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_killed_executor_costs_no_row_and_followers_catch_up_by_the_documented_lines(
    cluster: Cluster,
    pipeline: NewPipeline,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """No row is duplicated either, and no file that Spark writes meanwhile holds a secret."""
    made = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        f"INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(1, {ROWS}) i",
        snapshot={
            "mode": "initial",
            "range_bytes": 256 << 10,
            "max_parallel": 2,
            "rows_per_second": 2_000,  # slow enough for a kill in its middle
        },
        followers={
            "mirror": {"delta": {"path": str(tmp_path / "lake")}},
            "cache": {"redis": {"url": redis_url}},
        },
    )
    config = made.config
    dsn = conninfo.make_conninfo(config.source.dsn, password=SECRET)
    config_file = made.write("secret.yaml", source__dsn=dsn)
    with (tmp_path / "submit.log").open("wb") as out:
        job = submit(cluster, out, config_file)
    try:
        wait_until(
            lambda: topic.read(config).ranges or job.poll() is not None, "a range", START_SECONDS
        )
        victim = cluster.executors()[0]
        victim.kill()
        wait_until(lambda: job.poll() is not None, "the job's end", COPY_SECONDS)
    finally:
        job.kill()
        job.wait()
        output = (tmp_path / "submit.log").read_text()
        print(output[-6_000:])  # noqa: T201 - pytest shows it where the test failed
    assert job.returncode == 0
    assert '"outcome": "taken"' in output
    assert not victim.is_running()
    keys = Counter(message.key() for message in read_to_end(config, made.resume()[0].partitions))
    assert len(keys) == ROWS
    assert set(keys.values()) == {1}
    made.database.execute(
        "UPDATE t SET a = 'y' WHERE id % 100 = 0",
        "DELETE FROM t WHERE id < 9",
        f"INSERT INTO t SELECT i, 'z' FROM generate_series({ROWS + 1}, {ROWS + ADDED}) i",
    )
    made.start().wait_ready()
    converge(config)
    follow(cluster, config_file, tmp_path / "follow.log")
    with made.database.connect() as connection:
        wanted = dict(connection.execute("SELECT id, a FROM t").fetchall())
    names = list(redis_client.scan_iter(f"{config.prefix}:public.t:*", count=10_000))
    cached = [orjson.loads(value) for value in redis_client.mget(names) if value]
    assert {row["id"]: row["a"] for row in cached} == wanted
    (mirrored,) = read_as_of_arrow(str(tmp_path / "lake"), ["public.t"]).tables.values()
    assert dict(zip(*mirrored.select(["id", "a"]).to_pydict().values(), strict=True)) == wanted
    # Executors took part: the driver did not handle large batches alone.
    apps = list(tmp_path.glob("eventlog_v2_app-*/events_*"))
    assert [b"SparkListenerTaskEnd" in app.read_bytes() for app in apps] == [True, True]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != config_file]
    assert {path.name for path in written} >= {"stderr", "Master.log", "submit.log", "follow.log"}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
