"""A coordinator that hangs in its hand-over, is replaced, and wakes: it no longer hands over."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from cdc.errors import CDCError, FencedError, Policy
from cdc.log import reader
from cdc.log.publisher import Publisher
from cdc.snapshot.initial import due, handover, session, topic
from tests.faults import snapshot_account
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, wait_until

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.snapshot.initial.host import HostProcess

_ROWS = 3_000
_TABLE = ("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
_INITIAL = {"mode": "initial", "runner": "local"}


class Alone:
    """A host that takes the snapshot and nothing else."""

    stopping = False
    config_file: Path | None = None

    def beat(self) -> None:
        pass

    def snapshotting(self, reason: str, report: object = None) -> None:
        pass


@pytest.mark.long("the other moment", sample=["read_resume"])
@pytest.mark.parametrize("where", ["read_resume", "read_schema_topic"])
def test_a_hand_over_that_hung_does_not_commit_after_its_successors(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It has the daemon's writers open when it hangs, before and after its last check."""
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL)",
        f"INSERT INTO t SELECT i, 1 FROM generate_series(1, {_ROWS}) i",
        snapshot={"mode": "initial", "runner": "local", "max_parallel": 1},
    )
    asleep, wake = threading.Event(), threading.Event()

    class Slow:
        """The log's reader, which hangs in one of the hand-over's calls."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as it is there
            if name == where:
                asleep.set()
                assert wake.wait(600)
            return getattr(reader, name)

    monkeypatch.setattr(handover, "reader", Slow())
    config = line.config

    def take() -> None:
        """Do as a daemon does, up to the hand-over."""
        while True:
            try:
                session.take(config, cast("HostProcess", Alone()))
            except CDCError as error:
                if asleep.is_set() or error.policy is not Policy.BACKOFF:
                    raise
                time.sleep(0.2)
            else:
                return

    with ThreadPoolExecutor(1) as threads:
        zombie = threads.submit(take)
        try:
            wait_until(lambda: asleep.is_set() or zombie.done(), "no hand-over", 120)
            assert asleep.is_set(), zombie.exception()
            # Its export ends, as at a restart of the server, and what it has read is out of date.
            line.query(
                "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots"
                " WHERE temporary AND slot_name LIKE %s",
                f"{config.slot}%",
            )
            # No range is missing, so its successor hands the same generation over, and streams.
            line.start().wait_ready(120)
            line.database.execute("UPDATE t SET n = n + 1", "DELETE FROM t WHERE id % 3 = 0")
            converge(config)
            position = line.resume()[1]
        finally:
            wake.set()
        with pytest.raises(CDCError) as caught:
            zombie.result(120)
    assert caught.value.policy is Policy.BACKOFF, "it may try again, and then finds all done"
    assert line.resume()[1].end_lsn >= position.end_lsn, "it has set the log back"
    line.database.execute("INSERT INTO t VALUES (0, 1)")
    converge(config)
    account = snapshot_account.take(line)
    assert account.findings == []
    assert (account.generations, account.snapshot_rows) == (1, _ROWS)


def test_a_state_written_during_a_hand_over_does_not_revert_it(pipeline: NewPipeline) -> None:
    """Another coordinator wrote its own state before the hand-over's commit markers arrived."""
    line = pipeline(*_TABLE, snapshot=_INITIAL)
    line.start().wait_ready()
    assert line.daemon.term() == 0
    found = topic.read_state(line.config)
    assert found is not None
    stale = replace(found, stage="planning", generation=found.generation + 1, token="other")
    publisher = Publisher(line.config, session.WRITER)
    publisher.open()
    publisher.begin()
    publisher.add(*topic.state_record(line.config, stale))
    publisher.commit()
    assert session.take(line.config, cast("HostProcess", Alone())) == "done"
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (2)")
    converge(line.config)


@pytest.mark.long("the hand-over that hung is in the first tier")
@pytest.mark.parametrize("place", ["begin", "fence"])
def test_a_coordinator_that_has_not_seen_the_hand_over_yet_starts_over(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The state is still `running` for a moment: the log does not lack its first rows."""
    line = pipeline(*_TABLE, snapshot=_INITIAL)
    line.start("before_handover").wait_exit()
    config, known = line.config, topic.read(line.config)
    assert known.plan is not None
    assert known.state is not None
    if place == "begin":
        handover.write(config, known.plan, known.plan.token)
        monkeypatch.setattr(due, "state", lambda _: known.state)
    else:
        # Between its first read and its fencing, and its own state is after the hand-over's.
        def late(config: Config, tasks: int, fence: Any = session.fence_tasks) -> None:  # noqa: ANN401
            monkeypatch.undo()
            fresh = topic.read(config)
            assert fresh.plan is not None
            handover.write(config, fresh.plan, fresh.plan.token)
            fence(config, tasks)

        monkeypatch.setattr(session, "fence_tasks", late)
    with pytest.raises(FencedError, match="handed the initial snapshot over"):
        session.take(config, cast("HostProcess", Alone()))
    monkeypatch.undo()
    assert session.take(config, cast("HostProcess", Alone())) == "done"
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (2)")
    converge(line.config)
