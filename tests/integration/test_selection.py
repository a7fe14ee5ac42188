"""Tables, columns and rows that are captured or not, through a running daemon."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.log.records import is_schema_key
from cdc.operate.commands.setup import set_up
from cdc.operate.doctor.run import examine
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import data_records, records_of

USERS = "CREATE TABLE users (id int PRIMARY KEY, region text, email text)"


def events(line: PipelineUnderTest, count: int) -> list[dict[str, Any]]:
    """Return this many events, by seq."""

    def found() -> list[dict[str, Any]]:
        return [record.event for record in data_records(line) if record.value is not None]

    wait_until(lambda: len(found()) >= count, f"the log lacks events: {len(found())} of {count}")
    return sorted(found(), key=lambda event: event["source"]["seq"])


def versions(line: PipelineUnderTest) -> list[dict[str, Any]]:
    topic = f"{line.config.prefix}.cdc.schema"
    found = records_of(line, lambda name: name == topic)
    return [record.event for record in found if is_schema_key(record.key or b"")]


def again(line: PipelineUnderTest, **changed: object) -> None:
    """Change the configuration and run `cdc setup`, without stopping a daemon."""
    line.config_file = line.write("lockstep.yaml", **changed)
    for _ in set_up(line.config):
        pass


@pytest.mark.pg(">= 15")
def test_only_the_rows_of_the_filter_are_captured(pipeline: NewPipeline) -> None:
    """A row that starts to pass the filter is created, one that no longer does is deleted."""
    line = pipeline(
        USERS,
        "ALTER TABLE users REPLICA IDENTITY FULL",
        tables={"public.users": {"where": "region LIKE 'e%'"}},
    )
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO users VALUES (1, 'eu', 'a'), (2, 'us', 'b')",
        "UPDATE users SET email = 'x'",
        "UPDATE users SET region = CASE id WHEN 1 THEN 'us' ELSE 'eu' END",
        "DELETE FROM users",
    )
    found = [(e["op"], (e["after"] or e["before"])["id"]) for e in events(line, 5)]
    assert found == [("c", 1), ("u", 1), ("d", 1), ("c", 2), ("d", 2)]


@pytest.mark.pg(">= 15")
def test_setup_changes_columns_and_rows_alongside_the_daemon_without_a_gap(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(USERS)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 'eu', 'a')")
    assert set(events(line, 1)[0]["after"]) == {"id", "region", "email"}
    again(line, tables={"public.users": {"exclude": ["email"]}})
    line.database.execute("INSERT INTO users VALUES (2, 'eu', 'b')")
    assert set(events(line, 2)[1]["after"]) == {"id", "region"}
    # A hidden column is shown only if the configuration says so.
    again(line, tables={"public.users": {"where": "id > 3", "mask": {"email": "keep"}}})
    line.database.execute("INSERT INTO users VALUES (3, 'eu', 'c'), (4, 'eu', 'd')")
    assert events(line, 3)[2]["after"]["id"] == 4
    # A commit reaches one topic after another.
    wait_until(lambda: len(versions(line)) >= 3, "the log lacks versions")
    reported = versions(line)
    assert [version["where"] for version in reported] == [None, None, "(id > 3)"]
    assert [len(version["columns"]) for version in reported] == [3, 2, 3]
    assert [e["source"]["schema_id"] for e in events(line, 3)] == [1, 2, 3]
    # The next start accepts this too, though each change made a new membership.
    assert line.daemon.term() == 0
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (5, 'eu', 'e')")
    assert events(line, 4)[3]["after"]["id"] == 5


@pytest.mark.pg(">= 15")
def test_setup_changes_the_publication_while_nobody_reads_without_a_gap(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(USERS)
    line.database.execute("INSERT INTO users VALUES (1, 'eu', 'a')")
    again(line, tables={"public.users": {"where": "id > 1"}})
    again(line, tables={"public.users": {"columns": ["id", "region"]}})
    line.database.execute("INSERT INTO users VALUES (2, 'eu', 'b')")
    line.start().wait_ready()
    first, second = events(line, 2)
    # Written before, it is sent in full; the current configuration hides the column all the same.
    assert first["after"] == {"id": 1, "region": "eu", "email": None}
    assert second["after"] == {"id": 2, "region": "eu"}


def test_a_table_added_alongside_the_daemon_is_captured_from_then_on(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    line.start().wait_ready()
    line.database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    again(line)
    line.database.execute("INSERT INTO later VALUES (1)", "INSERT INTO users VALUES (1)")
    assert [e["source"]["table"] for e in events(line, 2)] == ["later", "users"]


@pytest.mark.pg(">= 15")
def test_a_table_of_a_published_schema_is_captured_from_its_first_row(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(USERS, source={"new_tables": "publish"})
    line.start().wait_ready()
    line.database.execute(
        "CREATE TABLE later (id int PRIMARY KEY)",
        "INSERT INTO later VALUES (1)",
        "INSERT INTO users VALUES (1)",
    )
    assert [e["source"]["table"] for e in events(line, 2)] == ["later", "users"]
    # When this becomes a list of tables again, none has left the publication.
    again(line, source__new_tables="setup")
    line.database.execute("INSERT INTO later VALUES (2)")
    assert events(line, 3)[2]["after"] == {"id": 2}
    assert line.daemon.process.poll() is None


def test_excluded_tables_of_a_schema_are_in_no_topic(pipeline: NewPipeline) -> None:
    line = pipeline(
        USERS,
        "CREATE TABLE audit_users (id int PRIMARY KEY)",
        source={"exclude": ["public.audit_*"]},
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO audit_users VALUES (1)", "INSERT INTO users VALUES (1)")
    assert [e["source"]["table"] for e in events(line, 1)] == ["users"]
    assert not records_of(line, lambda topic: f"{line.config.prefix}.public.audit" in topic)


def test_the_log_goes_on_without_a_table_that_was_taken_out(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, "CREATE TABLE orders (id int PRIMARY KEY)")
    line.database.execute("INSERT INTO orders VALUES (1)")
    again(line, source__exclude=["public.orders"])
    line.database.execute("INSERT INTO orders VALUES (2)", "INSERT INTO users VALUES (1)")
    line.start().wait_ready()
    found = [(e["source"]["table"], e["after"]["id"]) for e in events(line, 2)]
    assert found == [("orders", 1), ("users", 1)]


@pytest.mark.pg("< 18")
def test_generated_columns_are_in_no_event_and_the_doctor_says_so(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE g (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)"
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO g VALUES (1)")
    assert events(line, 1)[0]["after"] == {"id": 1}
    found = [each.what for each in examine(line.config) if each.check == "generated"]
    assert "in no event: public.g.twice; Postgres sends them from 18 on" in found[0]


@pytest.mark.pg(">= 18")
def test_stored_generated_columns_are_captured_on_18(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE g (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED,"
        " thrice int GENERATED ALWAYS AS (id * 3) VIRTUAL)"
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO g VALUES (1)")
    assert events(line, 1)[0]["after"] == {"id": 1, "twice": 2}
    again(line, source__generated_columns="none")
    line.database.execute("INSERT INTO g VALUES (2)")
    assert events(line, 2)[1]["after"] == {"id": 2}
    again(
        line, source__generated_columns="stored", tables={"public.g": {"columns": ["id", "twice"]}}
    )
    line.database.execute("INSERT INTO g VALUES (3)")
    assert events(line, 3)[2]["after"] == {"id": 3, "twice": 6}
    found = [each.what for each in examine(line.config) if each.check == "generated"]
    assert found == []


@pytest.mark.pg(">= 18")
def test_a_virtual_column_is_reported_by_the_doctor(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE g (id int PRIMARY KEY, v int GENERATED ALWAYS AS (id * 3) VIRTUAL)"
    )
    found = [each.what for each in examine(line.config) if each.check == "generated"]
    assert found == ["in no event, since no row holds them: public.g.v"]


@pytest.mark.pg(">= 16")
@pytest.mark.parametrize(("origin", "captured"), [("any", [1, 2]), ("none", [2])])
def test_what_came_by_replication_is_captured_or_not(
    pipeline: NewPipeline, origin: str, captured: list[int]
) -> None:
    line = pipeline(USERS, source={"origin": origin})
    line.start().wait_ready()
    name = f"elsewhere_{line.database.name}"
    with line.database.connect() as connection:
        connection.execute("SELECT pg_replication_origin_create(%s)", [name])
        connection.execute("SELECT pg_replication_origin_session_setup(%s)", [name])
        connection.execute("INSERT INTO users VALUES (1)")
        connection.execute("SELECT pg_replication_origin_session_reset()")
        connection.execute("INSERT INTO users VALUES (2)")
        connection.execute("SELECT pg_replication_origin_drop(%s)", [name])
    assert [event["after"]["id"] for event in events(line, len(captured))] == captured
