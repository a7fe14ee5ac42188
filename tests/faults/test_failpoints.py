"""The daemon dies between every two stages, and nothing is lost, duplicated or out of order."""

from __future__ import annotations

import random
import signal

import pytest

from cdc import failpoints
from tests.fixtures.daemon import Daemon, NewPipeline, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Witness

# At which hit it dies: at start-up the first, otherwise one after some work.
_COUNTS = {"after_slot": 1, "after_fence": 1, "before_frontier": 3}
_SMALL = {"max_events": 200, "max_wait_ms": 50}


def _wait_for_death(daemon: Daemon, load: Load) -> None:
    """Write and pause in turn until the daemon dies: a frontier may need a pause."""
    turns = iter(range(10_000))

    def dead() -> bool:
        if next(turns) % 4 < 2:
            load.go_on()
        else:
            load.rest()
        return daemon.process.poll() is not None

    wait_until(dead, "it never came there", pause=0.1)
    load.go_on()
    assert daemon.process.returncode == -signal.SIGKILL, "it ended by itself"


@pytest.mark.long(
    "the simulation dies at every place for each commit",
    sample=[
        *("after_fence-on", "after_sequence-off", "after_produce-on", "after_flush-off"),
        *("after_commit-on", "after_confirm-off", "before_frontier-on"),
    ],
)
@pytest.mark.parametrize("direct", ["off", "on"])
@pytest.mark.parametrize("name", failpoints.NAMES)
def test_killed_there_it_loses_nothing(name: str, direct: str, pipeline: NewPipeline) -> None:
    line = pipeline(*TABLES, batch=_SMALL, log={"direct": direct})
    witness = Witness(line)
    daemon = line.start(f"{name}:{_COUNTS.get(name, 5)}")
    with Load(line.database.dsn, seed=failpoints.NAMES.index(name)) as load:
        wait_until(lambda: load.commits > 20, "no load")
        _wait_for_death(daemon, load)
        seen = load.commits
        daemon = line.start().wait_ready()
        wait_until(lambda: load.commits > seen + 30, "no load")
    assert witness.check().events > 100
    assert daemon.term() == 0


@pytest.mark.long("a minute; the campaign kills while it recovers")
def test_crash_after_crash_at_every_place_loses_nothing(pipeline: NewPipeline) -> None:
    """Every failpoint, in random order, at its first hit: it dies while recovering from a crash."""
    line = pipeline(*TABLES, batch=_SMALL)
    witness = Witness(line)
    names = list(failpoints.NAMES)
    random.Random(4).shuffle(names)
    with Load(line.database.dsn, seed=4, steps_per_second=300) as load:
        for name in names:
            _wait_for_death(line.start(f"{name}:1"), load)
    line.start().wait_ready()
    witness.check()
