"""Large cuts are archived by executors, with the same rows and the same proof as small ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.jobs.archiving import proving, running
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
def test_executors_archive_large_cuts_as_this_process_does(
    spark: SparkSession, pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction of several Kafka transactions too: its chunks are in one frontier."""
    monkeypatch.setattr(running, "LARGE_EVENTS", 100)
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
