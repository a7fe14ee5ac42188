"""Java that is killed while Spark starts: the job ends for another process to continue."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.spark import need_java

_PROGRAM = """
import sys, threading, time
import psutil
from lockstep.jobs.spark.session import SparkEndedError, session

def drivers():
    for process in psutil.Process().children(recursive=True):
        try:
            if "org.apache.spark.deploy.SparkSubmit" in process.cmdline():
                yield process
        except psutil.NoSuchProcess:
            continue

def kill(seconds):
    while (found := next(drivers(), None)) is None:
        time.sleep(0.01)
    time.sleep(seconds)
    found.kill()

threading.Thread(target=kill, args=(float(sys.argv[1]),), daemon=True).start()
try:
    session("killed", delta=False)
except SparkEndedError as error:
    print(error.what, error.exit_code.value)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.6], ids=["at once", "while it starts"])
def test_java_that_is_killed_while_it_starts_is_no_bug(seconds: float) -> None:
    """Before it listens, and while the session is made."""
    need_java()
    argv = [sys.executable, "-c", _PROGRAM, str(seconds)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "Spark's JVM has ended 75\n", ended.stderr
