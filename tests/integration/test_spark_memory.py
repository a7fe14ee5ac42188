"""A driver's JVM that runs out of memory ends, so that the follower is restarted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.spark import need_java

_SCRIPT = """
from py4j.protocol import Py4JError
from lockstep.jobs.spark.session import session

spark = session("memory", short=True, delta=False)
try:
    spark.sparkContext._jvm.java.nio.ByteBuffer.allocate(2_000_000_000)
except (Py4JError, OSError):  # by chance, what py4j meets first
    print("code", spark.sparkContext._gateway.proc.wait(120))
"""
_OUT_OF_MEMORY = 3  # the exit code of ExitOnOutOfMemoryError


@pytest.mark.long("memory of a JVM of its own")
@pytest.mark.slow
def test_it_ends_instead_of_waiting_for_ever() -> None:
    need_java()
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=600, check=False
    )
    assert f"code {_OUT_OF_MEMORY}\n" in ended.stdout, ended.stderr[-2_000:]
