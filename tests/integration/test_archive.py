"""The archive of a real log: every record once, with its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.jobs.archiving import running
from lockstep.jobs.archiving.upkeep import Upkeep
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline

TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text)",
    "CREATE TABLE clicks (id int, name text)",
    "ALTER TABLE clicks REPLICA IDENTITY FULL",
)
WRITES = (
    "INSERT INTO users SELECT g, 'n' || g FROM generate_series(1, 300) g",
    "UPDATE users SET name = name || 'u' WHERE id % 3 = 0",
    "UPDATE users SET id = id + 1000 WHERE id % 50 = 0",
    "DELETE FROM users WHERE id % 7 = 0",
    "INSERT INTO clicks SELECT g, 'c' FROM generate_series(1, 90) g",
    "INSERT INTO users VALUES (5000, repeat('y', 200000))",
    "TRUNCATE clicks",
)


def test_every_record_of_every_topic_is_archived_once_with_its_bytes(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """Tombstones, messages, dead letters, table versions and frontiers too."""
    made = pipeline(
        *TABLES,
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    archived = Archived(made)
    for write in WRITES:
        made.database.execute(write)
        archived.reach()
        position = archived.position()
        assert archived.stored() == archived.logged(position)
    assert position.newest is not None
    number = position.newest.number
    archive = running.opened(made.config)
    position = archive.open()
    assert Upkeep(archive, made.config.archive).join(position) >= number
    assert archive.open() == position
    assert archived.stored() == archived.logged(position)
    made.database.execute("INSERT INTO users VALUES (-1, 'after')")
    archived.reach()
    assert archived.stored() == archived.logged(archived.position())
