"""A process is identified by its pid and its start: never another that has the pid by chance."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from cdc.playground.servers.process import ProcessId, spawn

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_this_process_is_alive() -> None:
    mine = ProcessId.of(os.getpid())
    assert mine is not None
    assert mine.alive


def test_a_pid_with_another_start_is_a_stranger(tmp_path: Path) -> None:
    ours = spawn(SLEEP, tmp_path / "log", tmp_path)
    stranger = ProcessId(ours.pid, "boot:1")
    assert not stranger.alive
    stranger.signal(signal.SIGKILL)
    assert ours.alive
    ours.signal(signal.SIGKILL)
    assert ours.wait(60)


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    assert ProcessId.of(child.pid) is None
    child.wait()


def test_descendants_are_found_and_output_is_logged(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; print('up', flush=True);"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    parent = spawn([sys.executable, "-c", code], tmp_path / "log", tmp_path)
    deadline_polls = 500
    while not (family := parent.descendants()) and deadline_polls:
        deadline_polls -= 1
        assert not parent.wait(0.01)
    assert len(family) == 1
    for each in (parent, *family):
        each.signal(signal.SIGKILL)
        assert each.wait(60)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "up\n"


def test_a_program_that_ends_at_once_is_not_alive(tmp_path: Path) -> None:
    assert spawn([sys.executable, "-c", ""], tmp_path / "log", tmp_path).wait(60)


def test_a_spawned_process_has_a_session_of_its_own(tmp_path: Path) -> None:
    """Ctrl-C in the terminal must reach the command, not the servers."""
    child = spawn(SLEEP, tmp_path / "log", tmp_path)
    assert os.getsid(child.pid) == child.pid
    child.signal(signal.SIGKILL)
    assert child.wait(60)
