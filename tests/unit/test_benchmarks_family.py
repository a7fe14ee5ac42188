"""A program's children count for it, also after they have ended."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from benchmarks.family import Family
from benchmarks.programs import Program

if TYPE_CHECKING:
    from pathlib import Path

# A child that works and holds 60 MB until it is asked to end.
_CHILD = "b = bytearray(60 << 20); sum(range(2_000_000)); print('ready', flush=True); input()"
_PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {_CHILD!r}], stdin=subprocess.PIPE)
while True:
    time.sleep(0.05)
    try:
        open(sys.argv[1])
    except FileNotFoundError:
        continue
    child.communicate(b"\\n")
    print("ended", flush=True)
    sys.argv[1] = "/nowhere"
"""


def _wait(program: Program, word: str) -> None:
    deadline = time.monotonic() + 60
    while word not in program.output():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_children_count_also_when_they_have_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path / "end")]
    with Program("the subject", command, tmp_path / "log") as program:
        _wait(program, "ready")
        family = Family(program.pid)
        family.look()
        peaks = family.peaks_mb
        assert peaks["python"] > 60 > peaks["main"]
        used = family.cpu_seconds
        (tmp_path / "end").touch()
        _wait(program, "ended")
        family.look()
        assert family.cpu_seconds >= used > 0
        assert family.peaks_mb["python"] == peaks["python"]
