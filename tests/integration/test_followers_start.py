"""What a job reports and does while Spark starts: slow workers, signals, progress."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lockstep
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.followed import LONG
from tests.integration.test_following import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
# Longer than Spark waits for a streaming source's worker, in seconds.
_SLOW_SECONDS = 12
_HOOK = """\
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "pyspark":
            sys.meta_path.remove(self)
            time.sleep({seconds})
sys.meta_path.insert(0, Slow())
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.long("waits for a timeout")
@pytest.mark.slow
def test_a_source_starts_however_long_its_imports_take(
    spark: SparkSession, pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark gets its answer before pyspark is imported, which takes long on a busy machine."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(_HOOK.format(seconds=_SLOW_SECONDS), "utf-8")
    script = executable(
        tmp_path / "python",
        f'#!/bin/sh\ncase "$*" in *streaming_source_runner*) PYTHONPATH={hook}:$PYTHONPATH;'
        f' export PYTHONPATH;; esac\nexec {spark.sparkContext.pythonExec} "$@"\n',
    )
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(script))
    made = pipeline(*TABLES[:1])
    made.start().wait_ready()
    made.database.execute("INSERT INTO users SELECT g, 'n' FROM generate_series(1, 10) g")
    wait_until(lambda: made.resume()[1].seq >= 10, "not in the log")
    rows: list[int] = []
    changes = lockstep.follow_changes(
        lockstep.register(spark), str(made.config_file), ["public.users"], start="beginning"
    )
    query = (
        changes.writeStream.foreachBatch(lambda frame, _: rows.append(frame.count()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        wait_until(lambda: sum(rows) >= 10 or not query.isActive, "nothing arrives", LONG)
        assert query.exception() is None
    finally:
        query.stop()


@pytest.mark.long("the other signal", sample=["15"])
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_at_once_while_spark_starts(
    pipeline: NewPipeline, tmp_path: Path, number: signal.Signals
) -> None:
    """However long Spark takes to start: here Java never answers."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    began = tmp_path / "began"
    executable(
        java,
        "#!/bin/sh\n"
        'case "$*" in *-version*) echo \'openjdk version "17.0.1"\' >&2; exit 0;; esac\n'
        f"touch {began}\nexec cat > /dev/null\n",
    )
    made = pipeline(*TABLES[:1], followers={"mirror": {"delta": {"path": str(tmp_path / "l")}}})
    made.start().wait_ready()
    path = f"{java.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "JAVA_HOME": str(tmp_path)}
    job = subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / "follow.py"), "--config", str(made.config_file)],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        wait_until(lambda: began.exists() or job.poll() is not None, "no Java", LONG)
        job.send_signal(number)
        _, output = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert "opening the stores of mirror" in output


@pytest.mark.slow
def test_ctrl_c_ends_a_job_that_follows(pipeline: NewPipeline, tmp_path: Path) -> None:
    """Spark installs its own handler for SIGINT, which raises in any code that runs."""
    made = pipeline(*TABLES[:1], followers={"mirror": {"delta": {"path": str(tmp_path / "l")}}})
    made.start().wait_ready()
    job = subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / "follow.py"), "--config", str(made.config_file)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert job.stderr is not None
    try:
        output: list[str] = []
        while not output or "opening the stores" not in output[-1]:
            output.append(job.stderr.readline())
            assert output[-1], "it ended by itself"
        job.send_signal(signal.SIGINT)
        _, rest = job.communicate(timeout=LONG)
    finally:
        job.kill()
    assert job.returncode == 0, rest
    assert "bug" not in rest


@pytest.mark.long("half a minute; test_followers_status has what is reported")
@pytest.mark.slow
def test_a_job_prints_how_far_each_follower_is(pipeline: NewPipeline, tmp_path: Path) -> None:
    made = pipeline(*TABLES[:1], followers={"mirror": {"delta": {"path": str(tmp_path / "l")}}})
    made.start().wait_ready()
    made.database.execute("INSERT INTO users SELECT g, 'n' FROM generate_series(1, 10) g")
    wait_until(lambda: made.resume()[1].seq >= 10, "not in the log")
    given = ("follow", "--once", "--json", "-c", str(made.config_file))
    done = subprocess.run(
        [sys.executable, "-m", "cdc.cli.main", *given],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["what"].startswith("opening the stores of mirror")
    assert (lines[-1]["follower"], lines[-1]["state"]) == ("mirror", "stopped")
    assert lines[-1]["seq"] >= 10
    assert lines[-1]["lsn"]
