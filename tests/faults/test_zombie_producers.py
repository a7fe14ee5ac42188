"""A daemon stopped between its producers' steps, replaced, and woken: no event is visible twice.

It stops itself at a failpoint instead of dying: at `in_turn` one batch has been committed and the
next is fully acknowledged, so two writers of the zombie go on after the successor has fenced them.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Witness, records_of

_SMALL = {"max_events": 200, "max_wait_ms": 50}
# A standby polls twice a second; the rest is the start itself, on a busy machine.
_TAKEOVER_SECONDS = 120.0
# The broker must notice that a transaction is of a fenced writer.
_ZOMBIE_SECONDS = 120.0
_STOPS = """
import os, signal, threading
from types import SimpleNamespace
from cdc import failpoints

def stop(*_):
    # This thread: sent to the process, another takes note of it, and this one goes on meanwhile.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

failpoints.os = SimpleNamespace(getpid=os.getpid, kill=stop)
"""


@pytest.fixture
def failpoints_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make daemons stop at their failpoint instead of dying there."""
    (tmp_path / "sitecustomize.py").write_text(_STOPS, "ascii")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{root}")


@pytest.mark.long("the other lanes", sample=["after_flush:9-on"])
@pytest.mark.parametrize("direct", ["off", "on"])
@pytest.mark.parametrize("failpoint", ["after_flush:9", "in_turn:4"])
def test_a_zombie_with_two_batches_in_flight_commits_neither(
    failpoint: str, direct: str, pipeline: NewPipeline, failpoints_stop: None
) -> None:
    """The successor writes nothing directly, and fences a zombie that does."""
    line = pipeline(*TABLES, batch=_SMALL, log={"direct": direct})
    # The zombie has the slot until it is ended below, however long its successor's start takes.
    line.database.execute(f"ALTER DATABASE {line.database.name} SET wal_sender_timeout = '10min'")
    witness = Witness(line)
    zombie = line.start(failpoint)
    process = psutil.Process(zombie.process.pid)
    with Load(line.database.dsn, seed=6):
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it never came there")
        heir = line.start(config_file=line.write("heir.yaml", log__direct="off"))
        heir.wait_state("standby")
        pid = line.slot("active_pid")
        assert line.query("SELECT pg_terminate_backend(%s, 120000)", pid)[0]
        heir.wait_state("streaming", _TAKEOVER_SECONDS)
        zombie.thaw()
        wait_until(
            lambda: zombie.process.poll() is not None or zombie.state == "standby",
            "the zombie does not notice",
            _ZOMBIE_SECONDS,
        )
        seen = heir.metric("lockstep_events_total")
        wait_until(lambda: heir.metric("lockstep_events_total") > seen + 30, "nothing moves")
        assert heir.state == "streaming"
        assert heir.metric("lockstep_reconnects_total") == 0
    assert witness.check().events > 30
    assert f":{heir.process.pid}:" in line.resume()[1].owner
    prefix = line.config.prefix
    visible, written = (
        len(records_of(line, lambda topic: topic.startswith(prefix), isolation=isolation))
        for isolation in ("read_committed", "read_uncommitted")
    )
    assert written > visible, "nothing of the zombie's was in flight"
