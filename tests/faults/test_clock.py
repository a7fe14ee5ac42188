"""The wall clock jumps by an hour, forward and back: order, timeouts and lag are not affected.

The daemon's Python gets a clock with an offset from a file. librdkafka keeps its own clock, and
sets record timestamps by it; we read those only for the age of frontier records.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_kafka_cluster import moves
from tests.fixtures.daemon import Daemon, NewPipeline
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Witness

_HOUR = 3_600
_JUMPING = """
import os, time
_time, _time_ns = time.time, time.time_ns
def _offset():
    try:
        with open(os.environ["JUMP_FILE"]) as file:
            return int(file.read() or 0)
    except OSError:
        return 0
time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + _offset() * 1_000_000_000
"""


@pytest.mark.long("the other direction", sample=["back"])
@pytest.mark.parametrize("first", [_HOUR, -_HOUR], ids=["forward", "back"])
def test_a_clock_that_jumps_an_hour_changes_nothing(
    first: int, pipeline: NewPipeline, tmp_path: Path
) -> None:
    line = pipeline(*TABLES, batch={"max_events": 300, "max_wait_ms": 50})
    line.never_time_out()
    witness = Witness(line)
    (tmp_path / "sitecustomize.py").write_text(_JUMPING)
    jump = tmp_path / "jump"
    env = {"PYTHONPATH": str(tmp_path), "JUMP_FILE": str(jump)}
    line.daemons.append(Daemon(line.config_file, tmp_path / "jumping.log", **env))
    daemon = line.daemon.wait_ready()
    with Load(line.database.dsn, seed=51):
        moves(daemon)
        before = line.resume()[1].at_us
        jump.write_text(str(first))
        moves(daemon)
        after = line.resume()[1].at_us
        assert abs(after - before - first * 1_000_000) < 600 * 1_000_000, "its clock did not jump"
        jump.write_text(str(-first))
        moves(daemon)
        jump.write_text("0")
        moves(daemon)
        daemon.wait_ready()
        assert daemon.metric("lockstep_lag_seconds") >= 0
    witness.check()
    assert daemon.metric("lockstep_reconnects_total") == 0
    assert daemon.term() == 0
