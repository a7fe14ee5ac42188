"""What a stack remembers, and which process may change it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.errors import LocalStackError
from cdc.playground.servers.home import Home, ServerState
from cdc.runtime.file_lock import file_lock


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.make()
    return made


def test_state_is_what_was_remembered(home: Home) -> None:
    state = ServerState(7, "boot:1", [20001, 20002], "17", {"fsync": "off"})
    home.remember("postgres", state)
    assert home.state("postgres") == state
    assert home.remembered_ports() == {20001, 20002}


@pytest.mark.parametrize("left", ["", '{"pid": 1', '{"no": "such field"}', "[]"])
def test_half_a_state_file_is_no_state(home: Home, left: str) -> None:
    (home.run / "kafka.json").write_text(left, encoding="utf-8")
    assert home.state("kafka") == ServerState()


def test_a_second_holder_waits_and_then_gives_up(home: Home) -> None:
    with (
        home.lock(),
        pytest.raises(LocalStackError, match="still held"),
        file_lock(home.path / "lock", 0.1),
    ):
        pass


def test_a_killed_holder_holds_nothing(home: Home) -> None:
    code = (
        "import sys, time; from pathlib import Path; from cdc.playground.servers.home import Home\n"
        "with Home(Path(sys.argv[1])).lock():\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, home.path], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with file_lock(home.path / "lock", 5):
        pass


def test_a_large_log_is_rotated_while_its_writer_continues(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.playground.servers.home.LOG_LIMIT_BYTES", 10)
    log = home.log("kafka")
    with log.open("ab", buffering=0) as writer:
        for number in range(5):
            writer.write(b"line %d, long enough\n" % number)
            home.rotate_log("kafka")
        writer.write(b"last\n")
    assert log.read_bytes() == b"last\n"
    kept = sorted(file.name for file in home.logs.iterdir())
    assert kept == ["kafka.log", "kafka.log.1", "kafka.log.2", "kafka.log.3"]
    assert log.with_name("kafka.log.1").read_bytes() == b"line 4, long enough\n"


def test_a_tail_is_the_last_lines(home: Home) -> None:
    home.log("kafka").write_text("".join(f"{n}\n" for n in range(50_000)), encoding="utf-8")
    assert home.tail("kafka", 2) == "49998\n49999"
    assert home.tail("nothing") == ""


def test_state_is_written_completely_or_not_at_all(home: Home) -> None:
    home.remember("kafka", ServerState(pid=1))
    home.remember("kafka", ServerState(pid=2))
    assert os.listdir(home.run) == ["kafka.json"]  # noqa: PTH208 - names are what is meant
