"""`cdc setup` and `cdc doctor` apply the selection to the publication, or report why not."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from cdc.errors import ConfigError, GapError
from cdc.operate.commands.acknowledge_publication import acknowledge, survey
from cdc.operate.commands.setup import set_up
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Finding, Severity
from cdc.source.connection import connect
from cdc.source.publications import read_pinned
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.servers import PostgresServer
from tests.integration.test_masks import everything

USERS = (
    "CREATE TABLE users (tenant int, id int, region text NOT NULL, password text, email text,"
    " PRIMARY KEY (tenant, id))"
)
UPDATE = "UPDATE users SET email = 'x'"


def again(line: PipelineUnderTest, **changed: object) -> list[str]:
    """Change the configuration, run `cdc setup`, and return its output."""
    line.config_file = line.write("lockstep.yaml", **changed)
    return [step.what for step in set_up(line.config)]


def errors(line: PipelineUnderTest, **changed: object) -> list[Finding]:
    """Return the doctor's errors about a configuration."""
    line.config_file = line.write("lockstep.yaml", **changed)
    return [each for each in examine(line.config) if each.severity is Severity.ERROR]


def published(line: PipelineUnderTest) -> dict[str, tuple[list[str], str | None]]:
    """Return each published table's columns and row filter, as Postgres has them."""
    query = (
        "SELECT tablename, attnames::text[], rowfilter FROM pg_publication_tables"
        " WHERE pubname = %s ORDER BY 1"
    )
    with line.database.connect() as connection:
        rows = connection.execute(query, [line.config.publication]).fetchall()
    return {table: (columns, where) for table, columns, where in rows}


def pinned(line: PipelineUnderTest) -> dict[str, int]:
    """Return the memberships that the daemon would compare with its resume record."""
    with connect(line.config) as connection:
        return read_pinned(connection, line.config.publication).tables


def rule(**settings: object) -> dict[str, Any]:
    return {"public.users": settings}


@pytest.mark.pg(">= 15")
def test_columns_and_rows_are_left_out_by_the_publication(pipeline: NewPipeline) -> None:
    line = pipeline(
        USERS,
        "CREATE TABLE wide (id int PRIMARY KEY, a int, b int)",
        "CREATE TABLE audit_log (id int PRIMARY KEY)",
        source={"exclude": ["public.audit_*"]},
        tables={
            "public.users": {"exclude": ["pass*"], "where": "tenant > 0"},
            "public.wide": {"columns": ["id", "b"]},
        },
    )
    assert published(line) == {
        "users": (["tenant", "id", "region", "email"], "(tenant > 0)"),
        "wide": (["id", "b"], None),
    }
    assert not [each for each in examine(line.config) if each.severity is Severity.ERROR]
    line.database.execute("INSERT INTO users VALUES (1, 1, 'eu')", UPDATE, "DELETE FROM users")


@pytest.mark.pg(">= 15")
def test_a_changed_selection_changes_the_publication_without_a_gap(pipeline: NewPipeline) -> None:
    """Each change makes a new membership in the catalog; the first one is what the log pins."""
    line = pipeline(USERS, "CREATE TABLE orders (id int PRIMARY KEY)")
    before = pinned(line)
    raw = line.query("SELECT oid::int8 FROM pg_publication_rel WHERE prrelid = 'users'::regclass")
    assert "changed public.users in the publication" in " ".join(
        again(line, tables=rule(exclude=["password"]))
    )
    assert published(line)["users"][0] == ["tenant", "id", "region", "email"]
    assert raw != line.query(
        "SELECT oid::int8 FROM pg_publication_rel WHERE prrelid = 'users'::regclass"
    )
    assert pinned(line) == before
    again(line, tables=rule(where="tenant > 0"))
    assert published(line)["users"] == (
        ["tenant", "id", "region", "password", "email"],
        "(tenant > 0)",
    )
    assert pinned(line) == before
    output = again(line, tables=rule(where="tenant > 0"))
    assert not [each for each in output if "changed" in each]
    again(line, tables={})
    assert published(line)["users"][1] is None
    assert pinned(line) == before


def test_tables_that_inherit_are_published_only_where_they_are_captured(
    pipeline: NewPipeline,
) -> None:
    """Postgres would add them to the publication with their parent, without its settings."""
    mask = {"public.users": {"mask": {"email": "null"}}}
    heir = "CREATE TABLE heir (more int, PRIMARY KEY (id)) INHERITS (users)"
    table = "CREATE TABLE users (id int PRIMARY KEY, email text)"
    line = pipeline(table, heir, tables=mask, source={"tables": ["public.users"]})
    assert set(published(line)) == {"users"}
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO heir VALUES (1, 'secret@x.org', 1)", "INSERT INTO users VALUES (2, 'secret')"
    )
    wait_until(lambda: line.resume()[1].seq >= 1, "the row does not arrive")
    assert b"secret" not in everything(line)
    again(line, source__tables=["public.users", "public.heir"], tables=mask)
    assert set(published(line)) == {"users", "heir"}
    assert line.daemon.term() == 0
    again(line, source__tables=["public.*"], source__exclude=["public.users"], tables={})
    assert set(published(line)) == {"heir"}


@pytest.mark.pg(">= 15")
def test_a_change_by_hand_is_no_change_of_ours(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, tables=rule(where="tenant > 0"))
    before = pinned(line)
    name = line.config.publication
    line.database.execute(
        f"ALTER PUBLICATION {name} DROP TABLE users",
        f"ALTER PUBLICATION {name} ADD TABLE users",
    )
    assert pinned(line) != before
    found = [each for each in examine(line.config) if each.check == "publication_differs"]
    assert "public.users" in found[0].what


@pytest.mark.pg(">= 15")
def test_what_was_left_out_by_hand_is_not_shown(pipeline: NewPipeline) -> None:
    """The configuration does not mention the table, so the column was never asked for."""
    line = pipeline("CREATE TABLE orders (id int PRIMARY KEY)")
    line.database.execute(USERS)
    name = line.config.publication
    line.database.execute(f"ALTER PUBLICATION {name} ADD TABLE users (tenant, id, region, email)")
    assert "set by hand on public.users are left as they are" in " ".join(again(line))
    assert "password" not in published(line)["users"][0]
    checks = {each.check: each for each in examine(line.config)}
    assert "public.users" in checks["publication_filters"].what
    again(line, tables=rule(exclude=["email"]))
    assert published(line)["users"][0] == ["tenant", "id", "region", "password"]
    again(line, tables={})
    assert len(published(line)["users"][0]) == 5


@pytest.mark.pg(">= 15")
def test_the_publications_own_comment_is_kept(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    name = line.config.publication
    line.database.execute(f"COMMENT ON PUBLICATION {name} IS 'ask Ada\nlockstep: {{broken'")
    before = pinned(line)
    again(line, tables=rule(where="tenant > 0"))
    comment = line.query(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s", name
    )[0]
    assert comment.startswith("ask Ada\nlockstep: {")
    assert comment.count("lockstep: ") == 1
    assert pinned(line) == before


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"exclude": ["region"]}, "i", "region is left out, but belongs to the replica identity"),
    ({"columns": ["id", "email"]}, "d", "tenant is left out, but belongs to the replica identity"),
    (
        {"where": "region = 'eu'"},
        "d",
        'names a column outside the replica identity (column "region"',
    ),
    ({"where": "tenant >"}, "d", "can't read the row filter"),
    ({"where": "nosuch > 1"}, "d", "can't read the row filter"),
    ({"key": ["region", "id"]}, "d", "the key has region, which Postgres does not send"),
    ({"key": ["nosuch"]}, "f", "the key names nosuch: no such column"),
    ({"mask": {"id": None}}, "d", "id is in the key, and its mask null would make rows alike"),
    ({"mask": {"region": {"truncate": 1}}}, "i", "its mask truncate would make rows alike"),
    ({"mask": {"emial": None}}, "d", "names emial, which public.users does not have"),
    ({"exclude": ["Email"]}, "d", "names Email, which public.users does not have"),
]


@pytest.mark.pg(">= 15")
def test_what_would_fail_later_is_refused_before(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, "CREATE UNIQUE INDEX by_region ON users (region, id)")
    before = published(line)
    for settings, identity, says in REFUSED:
        form = {"d": "DEFAULT", "f": "FULL", "i": "USING INDEX by_region"}[identity]
        line.database.execute(f"ALTER TABLE users REPLICA IDENTITY {form}")
        found = errors(line, tables=rule(**settings))
        assert any(says in each.what for each in found), (settings, found)
        assert all(each.fix for each in found), settings
        with pytest.raises(ConfigError) as caught:
            again(line, tables=rule(**settings))
        assert says in caught.value.what
        assert published(line) == before, settings


@pytest.mark.pg(">= 15")
def test_what_only_postgres_can_refuse_leaves_the_publication_as_it_was(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(USERS)
    before = published(line)
    with pytest.raises(ConfigError, match="invalid publication WHERE expression"):
        again(line, tables=rule(where="tenant > random()"))
    assert published(line) == before


def test_a_section_that_names_no_table_is_an_error_unless_it_is_a_precaution(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(USERS)
    found = errors(line, tables={"public.user": {"mask": {"email": None}}})
    assert 'tables."public.user" matches no captured table' in found[0].what
    assert not errors(line, tables={"*.*_secret": {"mask": {"email": None}}})
    assert not errors(line, tables={"*.*": {"exclude": ["secret_*"]}})


@pytest.mark.pg("< 15")
def test_before_15_there_are_no_filters_and_excluded_columns_are_null(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(USERS, tables=rule(exclude=["password"]))
    output = " ".join(again(line, tables=rule(exclude=["password"])))
    assert "public.users: Postgres sends password nevertheless; it is null in every event" in output
    assert "a row filter takes Postgres 15" in errors(line, tables=rule(where="tenant > 0"))[0].what


@pytest.mark.pg(">= 15")
def test_under_full_a_column_is_not_left_out_by_postgres(pipeline: NewPipeline) -> None:
    """A column list and REPLICA IDENTITY FULL together make every UPDATE fail."""
    line = pipeline(
        USERS, "ALTER TABLE users REPLICA IDENTITY FULL", tables=rule(exclude=["password"])
    )
    assert "password" in published(line)["users"][0]
    line.database.execute("INSERT INTO users VALUES (1, 1, 'eu')", UPDATE, "DELETE FROM users")
    notes = [each.what for each in examine(line.config) if each.check == "excluded_columns"]
    assert "password is sent nevertheless" in notes[0]


def test_a_table_is_removed_by_exclude_and_the_log_continues(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, "CREATE TABLE orders (id int PRIMARY KEY)")
    output = " ".join(again(line, source__exclude=["public.orders"]))
    assert "removed public.orders from the publication" in output
    assert set(pinned(line)) == {"public.users"}
    assert line.resume()[0].publication.tables == pinned(line)
    # Added again, it is a new member: setup reports that its changes in between are in no stream.
    assert "added public.orders" in " ".join(again(line, source__exclude=[]))


def test_a_table_is_not_taken_out_under_a_running_daemon(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, "CREATE TABLE orders (id int PRIMARY KEY)")
    line.start().wait_ready()
    with pytest.raises(ConfigError, match="a daemon is running"):
        again(line, source__exclude=["public.orders"])


# --- new tables ---


def test_a_new_table_is_named_by_the_doctor_and_added_by_setup(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    line.database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    found = [each for each in examine(line.config) if each.check == "publication_tables"]
    assert "lacks public.later" in found[0].what
    assert "added public.later" in " ".join(again(line))
    assert set(pinned(line)) == {"public.users", "public.later"}


@pytest.mark.pg(">= 15")
def test_a_complete_schema_includes_later_tables(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, source={"new_tables": "publish"})
    line.database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    assert set(published(line)) == {"users", "later"}
    # Settings that a published schema can't have turn it into a list, without any loss.
    before = pinned(line)
    output = " ".join(again(line, tables=rule(exclude=["password"])))
    assert "tables one by one" in output
    assert "captured only after the next `cdc setup`" in output
    assert published(line)["users"][0] == ["tenant", "id", "region", "email"]
    assert pinned(line) == before
    again(line, source__exclude=["public.later"])
    assert set(published(line)) == {"users"}


@pytest.mark.pg(">= 15")
def test_a_list_becomes_a_complete_schema_without_a_gap(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    before = pinned(line)
    assert "publishes complete schemas: public" in " ".join(
        again(line, source__new_tables="publish")
    )
    line.database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    assert pinned(line) == before | {"public.later": 0}
    assert "one by one" in " ".join(again(line))
    assert pinned(line) == before | {"public.later": 0}


@pytest.mark.pg(">= 15")
def test_without_a_superuser_a_schema_is_a_list(
    pipeline: NewPipeline, postgres_server: PostgresServer
) -> None:
    line = pipeline(USERS)
    role = f"owner_{line.database.name}"
    line.database.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION", f"ALTER TABLE users OWNER TO {role}"
    )
    try:
        line.database.execute(
            f"ALTER PUBLICATION {line.config.publication} OWNER TO {role}",
        )
    except psycopg.Error:
        line.database.execute(f"GRANT CREATE ON DATABASE {line.database.name} TO {role}")
        line.database.execute(f"ALTER PUBLICATION {line.config.publication} OWNER TO {role}")
    try:
        dsn = psycopg.conninfo.make_conninfo(line.database.dsn, user=role)
        # A change of owner writes the publication's row, as a change of its options does.
        acknowledge(line.config, survey(line.config), read=False)
        output = " ".join(again(line, source__dsn=dsn, source__new_tables="publish"))
        assert f"{role} is no superuser" in output
        found = [each for each in examine(line.config) if each.check == "new_tables"]
        assert "is no superuser" in found[0].what
        before = pinned(line)
        again(line, source__dsn=dsn, tables=rule(where="tenant > 0"))
        assert pinned(line) == before
    finally:
        line.database.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


# --- what patterns pass over, names that clash ---


def test_what_writes_no_changes_is_named_and_left_out(pipeline: NewPipeline) -> None:
    line = pipeline(
        USERS,
        "CREATE VIEW seen AS SELECT 1",
        "CREATE MATERIALIZED VIEW stored AS SELECT 1",
        "CREATE UNLOGGED TABLE fleeting (id int PRIMARY KEY)",
        "CREATE FOREIGN DATA WRAPPER none",
        "CREATE SERVER elsewhere FOREIGN DATA WRAPPER none",
        "CREATE FOREIGN TABLE far (id int) SERVER elsewhere",
    )
    assert set(pinned(line)) == {"public.users"}
    found = {each.check: each.what for each in examine(line.config)}
    assert "public.far (a foreign table)" in found["ignored"]
    assert "public.seen (a view)" in found["ignored"]
    assert "public.stored (a materialized view)" in found["ignored"]
    assert "public.fleeting" in found["unlogged"]


def test_two_tables_of_one_topic_are_found_beforehand(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    line.database.execute(
        "CREATE SCHEMA a",
        "CREATE SCHEMA a_b",
        "CREATE TABLE a.b_c (id int PRIMARY KEY)",
        "CREATE TABLE a_b.c (id int PRIMARY KEY)",
    )
    found = errors(line, source__tables=["public.*", "a.*", "a_b.*"])
    clash = [each for each in found if each.check == "topic_name"]
    assert "a.b_c, a_b.c" in clash[0].what


def test_a_dropped_publication_is_not_created_again(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    line.database.execute(f"DROP PUBLICATION {line.config.publication}")
    with pytest.raises(GapError, match="is missing"):
        again(line)


@pytest.mark.pg("< 16")
def test_origin_none_takes_16(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    assert "source.origin: none takes Postgres 16" in errors(line, source__origin="none")[0].what


@pytest.mark.pg(">= 16")
def test_origin_none_is_reported(pipeline: NewPipeline) -> None:
    line = pipeline(USERS)
    assert not errors(line, source__origin="none")
    assert "origin" in {each.check for each in examine(line.config)}
