"""A publication that was altered by hand is a gap, even if it was set back; and the way out.

Postgres sends what the publication defines at the time, and keeps no history of it: what it left
out is in no stream, and the log would keep the old rows for ever.
"""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from cdc.cli.main import run
from cdc.errors import GapError
from cdc.log import resume
from cdc.operate.commands.setup import set_up
from cdc.snapshot.incremental import topic
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

_CONFIG = 78
_TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, n int)",
    "CREATE TABLE orders (id int PRIMARY KEY, n int)",
)
_ROWS = "INSERT INTO users SELECT i, 1 FROM generate_series(1, 100) i"
_LOST = ("UPDATE users SET n = 2 WHERE id <= 50", "DELETE FROM users WHERE id > 50")


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    """A pipeline that has published a hundred rows, and still runs."""
    line = pipeline(*_TABLES)
    line.start().wait_ready()
    line.database.execute(_ROWS)
    wait_until(lambda: line.resume()[1].seq == 100, "the rows do not arrive")
    return line


def altered(line: PipelineUnderTest, options: str) -> str:
    return f"ALTER PUBLICATION {line.config.publication} SET ({options})"


def only_inserts(line: PipelineUnderTest) -> str:
    return altered(line, "publish = 'insert'")


def everything(line: PipelineUnderTest) -> str:
    return altered(line, "publish = 'insert, update, delete, truncate'")


def acknowledge(line: PipelineUnderTest, *options: str) -> int:
    return run(["publication", "acknowledge", "-c", str(line.config_file), *options])


def restored(line: PipelineUnderTest) -> None:
    """Acknowledge, and check that the log then equals the database."""
    assert acknowledge(line, "--yes") == 0
    line.start().wait_ready()
    wait_until(lambda: all_read(line), "the tables are not read again")
    converge(line.config)
    assert line.daemon.term() == 0


def all_read(line: PipelineUnderTest) -> bool:
    found = topic.read(line.config)
    return bool(found) and not any(record.active for record in found)


@pytest.mark.long("as while running")
def test_operations_left_out_while_stopped_and_set_back_are_a_gap(line: PipelineUnderTest) -> None:
    """The catalog shows nothing of it except another version of the publication's row."""
    assert line.daemon.term() == 0
    line.database.execute(only_inserts(line), *_LOST, everything(line))
    output = line.refused(_CONFIG, "was altered and set back", str(line.resume()[1].end_lsn))
    assert "cdc publication acknowledge" in output
    with pytest.raises(GapError, match="altered and set back"):
        list(set_up(line.config))
    restored(line)


def test_operations_left_out_while_running_and_set_back_are_a_gap(line: PipelineUnderTest) -> None:
    """Also if no row follows that would make the walsender describe the tables again."""
    line.database.execute(only_inserts(line), *_LOST, everything(line))
    line.ends(line.daemon, _CONFIG, "was altered", "cdc publication acknowledge")
    restored(line)


@pytest.mark.long("another gap of the same comparison")
def test_operations_left_out_for_good_are_a_gap(line: PipelineUnderTest) -> None:
    line.database.execute(only_inserts(line), *_LOST)
    line.ends(line.daemon, _CONFIG, "publishes insert, before insert, update, delete, truncate")
    assert acknowledge(line, "--yes") == _CONFIG  # it would lose the next ones too
    line.database.execute(everything(line))
    restored(line)


def test_no_row_is_published_after_a_change_before_it_was_checked(
    line: PipelineUnderTest,
) -> None:
    """The next row of a table is sent with the table's description, which triggers a check."""
    daemon = line.daemon
    daemon.freeze()
    line.database.execute(only_inserts(line), *_LOST, "INSERT INTO users VALUES (101, 1)")
    daemon.thaw()
    line.ends(daemon, _CONFIG, "was altered")
    assert line.resume()[1].seq == 100


def test_what_is_acknowledged_is_asked_for_once(
    line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acknowledge(line, "--yes") == _CONFIG  # while a daemon runs
    assert line.daemon.term() == 0
    line.database.execute(only_inserts(line), everything(line))
    capsys.readouterr()
    assert acknowledge(line, "--yes", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert {each["table"] for each in reported["snapshots"]} == {"public.users", "public.orders"}
    assert len(reported["acknowledged"]) == 1
    assert acknowledge(line, "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"acknowledged": [], "snapshots": []}


@pytest.mark.long("another gap of the same comparison")
def test_only_another_owner_takes_no_snapshot(
    line: PipelineUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a person can say that nothing else changed: the row's version differs in any case."""
    assert line.daemon.term() == 0
    role = f"owner_{line.database.name}"
    name = line.config.publication
    line.database.execute(f"CREATE ROLE {role} SUPERUSER")
    try:
        line.database.execute(f"ALTER PUBLICATION {name} OWNER TO {role}")
        line.refused(_CONFIG, f"its owner is {role}, before", "--no-snapshot")
        capsys.readouterr()
        assert acknowledge(line, "--yes", "--json", "--no-snapshot") == 0
        assert json.loads(capsys.readouterr().out)["snapshots"] == []
        line.start().wait_ready()
        converge(line.config)
        line.daemon.kill()
    finally:
        line.database.execute(f"ALTER PUBLICATION {name} OWNER TO postgres", f"DROP ROLE {role}")


@pytest.mark.long("another gap of the same comparison")
@pytest.mark.pg(">= 15")
def test_a_table_whose_rows_were_filtered_for_a_while_is_a_gap(line: PipelineUnderTest) -> None:
    name = line.config.publication
    assert line.daemon.term() == 0
    line.database.execute(
        f"ALTER PUBLICATION {name} SET TABLE orders, users WHERE (id > 1000)", *_LOST
    )
    line.refused(
        _CONFIG, "public.users", "every column of the rows of its row filter, before every column"
    )
    line.database.execute(f"ALTER PUBLICATION {name} SET TABLE orders, users")
    restored(line)


@pytest.mark.long("another gap of the same comparison")
@pytest.mark.pg(">= 15")
def test_a_schema_taken_out_and_put_back_is_a_gap(pipeline: NewPipeline) -> None:
    """Its tables have no membership of their own: only the schema's own oid shows it."""
    line = pipeline(
        *_TABLES, source={"tables": ["public.*"], "new_tables": "publish", "exclude": []}
    )
    name = line.config.publication
    line.start().wait_ready()
    line.database.execute(_ROWS)
    wait_until(lambda: line.resume()[1].seq == 100, "the rows do not arrive")
    assert line.daemon.term() == 0
    line.database.execute(
        f"ALTER PUBLICATION {name} DROP TABLES IN SCHEMA public",
        *_LOST,
        f"ALTER PUBLICATION {name} ADD TABLES IN SCHEMA public",
    )
    line.refused(_CONFIG, "schema public left the publication", "public.orders, public.users")
    restored(line)


def test_what_our_own_commands_change_is_no_gap(line: PipelineUnderTest) -> None:
    """Options included: the commands record the version that the new one continues."""
    line.config_file = line.write("lockstep.yaml", source__partitions="leaf")
    assert any("publish_via_partition_root" in step.what for step in set_up(line.config))
    line.database.execute("UPDATE users SET n = 3")
    wait_until(lambda: line.resume()[1].seq == 200, "the updates do not arrive")
    assert line.daemon.term() == 0
    line.start().wait_ready()
    converge(line.config)
    sends = line.resume()[0].publication.options
    assert sends is not None
    assert not sends.via_root
    # Another change by hand is still found, although our record exists.
    line.database.execute(only_inserts(line), everything(line))
    line.ends(line.daemon, _CONFIG, "was altered and set back")


@pytest.mark.long("records of earlier versions")
def test_a_record_from_before_it_was_pinned_is_continued(line: PipelineUnderTest) -> None:
    assert line.daemon.term() == 0
    identity, position = line.resume()
    assert identity.publication.options is not None
    before = replace(identity.publication, options=None, narrowed={})
    older = replace(identity, publication=before)
    resume.write_fenced(line.config, older, position, read=(identity, position))
    line.start().wait_ready()
    line.database.execute("UPDATE users SET n = 3 WHERE id = 1")
    wait_until(lambda: line.resume()[1].seq == 101, "the update does not arrive")
    assert line.resume()[0].publication == identity.publication


def test_a_renamed_table_that_is_taken_out_is_a_gap(line: PipelineUnderTest) -> None:
    """While it streams; neither the table's name nor its membership is there any more."""
    name = line.config.publication
    line.database.execute(
        "ALTER TABLE users RENAME TO people",
        f"ALTER PUBLICATION {name} DROP TABLE people",
        "UPDATE people SET n = 3 WHERE id <= 50",
    )
    line.ends(line.daemon, _CONFIG, "no longer has public.users")
    line.database.execute(f"ALTER PUBLICATION {name} ADD TABLE people")
    output = line.refused(_CONFIG, "public.people left the publication", "came back")
    assert "cdc publication acknowledge" in output


def test_tables_that_exchange_their_names_are_no_gap(line: PipelineUnderTest) -> None:
    """Not even where another change has the publication compared again, or at a start."""
    line.database.execute(
        "BEGIN",
        "ALTER TABLE users RENAME TO elsewhere",
        "ALTER TABLE orders RENAME TO users",
        "ALTER TABLE elsewhere RENAME TO orders",
        "COMMIT",
        "INSERT INTO users VALUES (7, 7)",
        "INSERT INTO orders VALUES (700, 7)",
    )
    wait_until(lambda: line.resume()[1].seq >= 102, "the rows do not arrive")
    assert line.daemon.term() == 0
    line.start().wait_ready()
    assert line.daemon.term() == 0
