"""Large cuts are archived by executors, with the same rows and the same proof as small ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc.operate.followers import ARCHIVE
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.archiving import cuts, proving, running
from lockstep.jobs.archiving.cuts import Cuts
from lockstep.jobs.archiving.table import ArchiveTable
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from lockstep.jobs.archiving.cuts import CutEnd, StartedCut
    from lockstep.jobs.archiving.layout import ArchivePosition
    from lockstep.jobs.cuts.cutting import Cut
    from lockstep.sinks.delta.actions import Action

CUTS = 5


@pytest.fixture
def backlog(pipeline: NewPipeline, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline whose log is several cuts for executors, and a small one at its end."""
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0, "max_events": 500},
        source={"canary_seconds": 0},
    )
    made.start().wait_ready()
    for number in range(CUTS):
        made.database.execute(
            f"INSERT INTO users SELECT {number} * 1000 + g, 'n' FROM generate_series(1, 500) g"
        )
        Archived(made).log_reach()
    return made


@pytest.mark.slow
def test_executors_archive_large_cuts_as_this_process_does(
    spark: SparkSession, pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction of several Kafka transactions too: its chunks are in one frontier."""
    monkeypatch.setattr(cuts, "LARGE_EVENTS", 100)
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        "CREATE TABLE clicks (id int, name text)",
        "ALTER TABLE clicks REPLICA IDENTITY FULL",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        batch={"max_events": 200},
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    archived = Archived(made, lambda: spark)
    made.database.execute(
        "INSERT INTO users SELECT g, 'n' || g FROM generate_series(1, 20000) g",
        "INSERT INTO users VALUES (-1, repeat('y', 100000))",
        "DELETE FROM users WHERE id % 3 = 0",
        "INSERT INTO clicks SELECT g, 'c' FROM generate_series(1, 500) g",
    )
    archived.reach()
    made.database.execute("UPDATE users SET name = 'small' WHERE id < 20")
    archived.reach()
    assert archived.stored() == archived.logged(archived.position())
    proof = proving.prove(made.config, running.opened(made.config))
    assert not proof.findings
    assert (proof.events, proof.undigested) == (proof.seq, 0)
    assert max(len(each.chunks) for each in made.frontiers()) > 1


def test_executors_start_with_the_next_cut_before_one_is_committed(
    spark: SparkSession, backlog: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "LARGE_EVENTS", 100)
    archived, steps = Archived(backlog, lambda: spark), list[str]()

    def start(self: Cuts, cut: Cut, before: CutEnd) -> StartedCut:
        steps.append(f"started {before.number + 1}")
        return _start(self, cut, before)

    def archive(
        self: Cuts, started: StartedCut, position: ArchivePosition
    ) -> tuple[ArchivePosition, set[str]]:
        found = _archive(self, started, position)
        steps.append(f"archived {started.end.number}")
        return found

    _start, _archive = Cuts.start, Cuts.archive
    monkeypatch.setattr(Cuts, "start", start)
    monkeypatch.setattr(Cuts, "archive", archive)
    archived.reach()
    newest = archived.position().newest
    assert newest is not None
    assert newest.number >= CUTS
    # The second cut is a message alone, which this process writes: nothing is started meanwhile.
    assert steps.index("started 2") < steps.index("archived 1")
    for number in range(3, CUTS + 1):  # one at most is ahead
        assert steps.index(f"archived {number - 2}") < steps.index(f"started {number}")
    assert archived.stored() == archived.logged(archived.position())
    proof = proving.prove(backlog.config, running.opened(backlog.config))
    assert (proof.findings, proof.events) == ((), proof.seq)


def test_a_stopped_archive_ends_what_executors_do_of_the_next_cut(
    spark: SparkSession, backlog: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit names what they have written; a later run archives it again, once."""
    monkeypatch.setattr(cuts, "LARGE_EVENTS", 100)
    archived = Archived(backlog, lambda: spark)
    work = running.Archiving(backlog.config, lambda: spark, archived.frontier())
    run = FollowerRun(backlog.config, ARCHIVE, "delta", work)
    commit = ArchiveTable.commit

    def stopping(
        self: ArchiveTable, actions: Sequence[Action], position: ArchivePosition, operation: str
    ) -> None:
        commit(self, actions, position, operation)
        run.stop()

    with monkeypatch.context() as patched:
        patched.setattr(ArchiveTable, "commit", stopping)
        assert run.run() == 0, run.error
    assert spark.sparkContext.statusTracker().getActiveJobsIds() == []
    position = archived.position()
    assert position.newest is not None
    assert position.newest.number == 1
    assert archived.stored() == archived.logged(position)
    archived.reach()
    assert archived.stored() == archived.logged(archived.position())
    proof = proving.prove(backlog.config, running.opened(backlog.config))
    assert (proof.findings, proof.events) == ((), proof.seq)
