"""The path on the oldest and the newest major of Postgres; other tests run on one in between."""

from __future__ import annotations

import signal

import pytest

from tests.fixtures.daemon import wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.standby import NewPair
from tests.fixtures.witness import Witness


@pytest.mark.commit("the end-to-end path on each major")
@pytest.mark.parametrize("major", [14, 18])
def test_killed_and_run_again_the_log_equals_the_database(major: int, new_pair: NewPair) -> None:
    _, line = new_pair(major, *TABLES, standby=False)
    witness = Witness(line)
    daemon = line.start("after_commit:5")
    with Load(line.database.dsn, seed=major) as load:
        assert daemon.wait_exit() == -signal.SIGKILL
        daemon = line.start().wait_ready()
        seen = load.commits
        wait_until(lambda: load.commits > seen + 100, "no load")
    assert witness.check().events > 100
    assert daemon.term() == 0
