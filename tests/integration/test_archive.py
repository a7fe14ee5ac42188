"""The archive of a real log: every record once, with its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from cdc.cli.main import run as cdc
from cdc.errors import Exit, GapError
from cdc.log import names, reader, topics
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from cdc.operate.followers import ARCHIVE, NEW_ARCHIVE
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.archiving import describing, proving, running, upkeep, versions
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest

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
    assert ArchiveUpkeep(archive, made.config.archive).join(position) > 1
    assert archive.open() == position
    assert archived.stored() == archived.logged(position)
    made.database.execute("INSERT INTO users VALUES (-1, 'after')")
    archived.reach()
    assert archived.stored() == archived.logged(archived.position())


def test_after_retention_was_too_short_only_a_new_log_has_an_archive_again(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    """As the doctor and the job's error advise; the old archive is proved as before."""
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
    )
    made.start().wait_ready()
    archived = Archived(made)
    for number in range(3):
        made.database.execute(f"INSERT INTO users VALUES ({number}, 'n')")
        archived.log_reach() if number else archived.reach()
    assert made.daemon.term() == 0
    frontiers = names.frontier_topic(made.config.prefix), 0
    end = reader.end_offsets(made.config, [frontiers])[frontiers]
    # The last record and its transaction's marker stay.
    topics.delete_records(topics.admin(made.config), {frontiers: end - 2})
    [lost] = [each for each in examine(made.config) if each.check == "archive"]
    assert (lost.severity, lost.fix) == (Severity.ERROR, NEW_ARCHIVE)

    def run() -> FollowerRun:
        work = running.Archiving(made.config, None, archived.frontier())
        found = FollowerRun(made.config, ARCHIVE, "delta", work, remedy=running.with_remedy)
        found.run()
        return found

    old, other = made.config, {"archive__path": str(tmp_path / "other")}
    for path in (made.config_file, made.write("other.yaml", **other)):
        made.config_file = path
        halted = run()
        assert isinstance(halted.error, GapError), "neither the old archive nor one of this log"
        assert NEW_ARCHIVE in halted.error.hint
    given = ("--topics", "--yes", "-c", str(made.config_file))
    assert cdc(["teardown", *given]) == Exit.OK
    made.config_file = made.write("new.yaml", snapshot__mode="initial", **other)
    assert cdc(["setup", "-c", str(made.config_file)]) == Exit.OK
    made.start().wait_ready()
    made.database.execute("INSERT INTO users VALUES (7, 'n')")
    until = archived.log_reach()
    assert run().error is None
    proof = proving.prove(made.config, running.opened(made.config))
    assert (proof.findings, proof.lsn) == ((), str(until))
    assert [each.op for each in versions.history(made.config, "public.users", "2")] == ["read"]
    assert proving.prove(old, running.opened(old)).findings == ()


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
    _expect_described(made, archived)
    made.database.execute(
        "INSERT INTO users VALUES (7, 'again')",
        "UPDATE users SET name = 'c' WHERE id = 7",
    )
    archived.log_reach()
    assert made.daemon.term() == 0
    topic = names.data_topic(made.config.prefix, "public", "users")
    count = made.resume()[0].partitions[topic]
    ends = reader.end_offsets(made.config, [(topic, number) for number in range(count)])
    topics.delete_records(topics.admin(made.config), ends)
    with pytest.raises(GapError, match="has deleted events after it"):
        versions.history(made.config, "public.users", "7")


def _expect_described(made: PipelineUnderTest, archived: Archived) -> None:
    described = describing.describe(made.config)
    assert (described["lag_events"], described["seq"]) == (0, archived.position().applied.seq)
    assert described["records"] == len(archived.stored()) + described["cuts"]
