"""The archive of a real log: every record once, with its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from lockstep.jobs.archiving import describing, running, upkeep, versions
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


@pytest.mark.commit("the path of the archive")
def test_every_record_of_every_topic_is_archived_once_with_its_bytes(
    pipeline: NewPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tombstones, messages, dead letters, table versions and frontiers too."""
    monkeypatch.setattr(upkeep, "FEWEST", 2)
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
    archive = running.opened(made.config)
    position = archive.open()
    assert Upkeep(archive, made.config.archive).join(position) > 1
    assert archive.open() == position
    assert archived.stored() == archived.logged(position)
    made.database.execute("INSERT INTO users VALUES (-1, 'after')")
    archived.reach()
    assert archived.stored() == archived.logged(archived.position())


def test_a_row_has_every_version_with_its_author_from_archive_and_topics(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text, body text)",
        "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
        log={"kafka": {"message.max.bytes": 60_000}},
        source={"canary_seconds": 0},  # events are counted
    )
    made.start().wait_ready()
    archived, long = Archived(made), "z" * 3_000
    with made.database.connect() as connection, connection.transaction():
        connection.execute(f"INSERT INTO users VALUES (7, 'a', '{long}'), (8, 'x', '')".encode())
        connection.execute(
            'SELECT pg_logical_emit_message(true, \'audit\', \'{"by": "ada", "why": "new"}\')'
        )
    made.database.execute("UPDATE users SET name = 'b' WHERE id = 7")
    archived.reach()
    made.database.execute(
        "UPDATE users SET body = repeat('w', 200000) WHERE id = 7",
        "DELETE FROM users WHERE id = 7",
        "TRUNCATE users",
    )
    archived.log_reach()
    found = versions.history(made.config, "public.users", "7")
    assert [each.op for each in found] == ["insert", "update", "update", "delete"]
    assert [each.held_by for each in found] == ["archive", "archive", "topic", "topic"]
    assert found[0].author == {"by": "ada", "why": "new"}
    assert [each.author for each in found[1:]] == [None] * 3
    assert found[1].before == {"id": 7, "name": "a", "body": long}
    assert found[1].after == {"id": 7, "name": "b", "body": long}, "a value that was not sent"
    assert found[2].after == {"id": 7, "name": "b", "body": "w" * 200_000}, "of the dead letter"
    assert found[3].before == found[2].after
    assert [each.seq for each in found] == sorted(each.seq for each in found)
    assert [each.op for each in versions.history(made.config, "public.users", "8")] == [
        "insert",
        "truncate",
    ]
    archived.reach()
    assert versions.history(made.config, "public.users", '{"id": 7}') == [
        replace(each, held_by="archive") for each in found
    ]
    described = describing.describe(made.config)
    assert (described["lag_events"], described["seq"]) == (0, archived.position().applied.seq)
    assert described["records"] == len(archived.stored()) + described["cuts"]
