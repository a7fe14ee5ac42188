"""What spark-submit gets: jars that fit the installed Spark, and our code in a zip."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cdc.cli.main import run
from cdc.runtime import spark

_FROM_ZIP = """
import sys
sys.path.insert(0, sys.argv[1])
import cdc.runtime.artifacts, jobs.copying.tasks, sinks.delta.types
from lockstep.sinks.redis.scripts import APPLY
assert cdc.__file__.startswith(sys.argv[1]), cdc.__file__
assert APPLY.startswith("local TOKEN_LENGTH")
print(len(cdc.runtime.artifacts.lock_sections()["spark"]))
"""


def test_the_jars_are_of_the_versions_that_python_has(capsys: pytest.CaptureFixture[str]) -> None:
    locked = dict(each.rsplit(":", 1) for each in spark.coordinates())
    delta = {name: each for name, each in locked.items() if name.startswith("io.delta:")}
    assert set(delta.values()) == {version("delta-spark")}
    pyspark = version("pyspark")
    assert f"io.delta:delta-spark_{pyspark.rpartition('.')[0]}_2.13" in delta
    assert locked["org.apache.spark:spark-sql-kafka-0-10_2.13"] == pyspark
    assert run(["spark", "jars", "--packages"]) == 0
    assert capsys.readouterr().out.strip().split(",") == spark.coordinates()


def test_our_code_runs_from_the_zip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "lockstep.zip"
    assert run(["spark", "pack", str(packed)]) == 0
    assert str(spark.job("follow")) in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-c", _FROM_ZIP, str(packed)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{len(spark.coordinates())}\n"), done.stderr
