"""The end of a process whose threads are still at work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import atexit, sys, threading
from cdc.cli import stopping
atexit.register(print, "taken apart")
if sys.argv[1] == "1":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("done", end="")
stopping.leave(3)
"""


@pytest.mark.parametrize(("running", "printed"), [("1", "done"), ("0", "donetaken apart\n")])
def test_nothing_is_taken_apart_under_a_thread_that_runs(running: str, printed: str) -> None:
    program = [sys.executable, "-c", _PROGRAM, running]
    ended = subprocess.run(program, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, printed, "")


def test_output_that_nobody_reads_does_not_change_the_exit_code() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()" + _PROGRAM, "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.close()
    process.stdin.close()
    assert process.wait() == 3
