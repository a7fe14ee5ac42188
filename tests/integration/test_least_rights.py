"""The roles of docs/SECURITY.md, created by its own SQL: each can do its work, and no more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from sqlalchemy import make_url

from cdc.errors import PermissionDeniedError
from cdc.operate.commands import migrations
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from cdc.operate.status import read_status
from cdc.snapshot.incremental import topic as live_topic
from lockstep.conformance.store import USERS, apply, change, row
from lockstep.sinks.contract import Changes
from lockstep.sinks.sql.sink import SqlSettings, SqlSink
from tests.fixtures.converge import converge
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.servers import Database
from tests.fixtures.store_postgres import url_of
from tests.integration.test_migrations import statements

_DOCUMENT = Path(__file__).parents[2] / "docs" / "SECURITY.md"
_ROLES = ("lockstep_reader", "lockstep_owner", "lockstep", "app")
_AUDITED = {"signal_table": True, "ddl_audit": True}


def documented(suffix: str, database: str, block: int = 1) -> list[str]:
    """Return the statements of "The least that each role needs", with this test's own roles."""
    text = _DOCUMENT.read_text("utf-8").split("## The least that each role needs")[1]
    text = (
        text.split("```sql\n")[block]
        .split("```")[0]
        .replace("DATABASE shop", f"DATABASE {database}")
    )
    made = re.sub(
        r"\b(ROLE|TO|AUTHORIZATION) (lockstep_\w+|lockstep|app)\b", rf"\1 \2_{suffix}", text
    )
    statements = (line.split("--")[0].strip() for line in made.splitlines())
    return [each for each in statements if each]


@pytest.fixture
def line(bare: PipelineUnderTest) -> Iterator[PipelineUnderTest]:
    """A pipeline that a superuser has set up, and the document's roles."""
    suffix = bare.database.name
    bare.database.execute("CREATE TABLE orders (id int PRIMARY KEY, user_id int)")
    bare.config_file = bare.write("lockstep.yaml", migrations=_AUDITED)
    for _ in migrations.up(bare.config, list(_AUDITED)):
        pass
    bare.set_up()
    # The application's role exists before ours.
    bare.database.execute(
        f"CREATE ROLE app_{suffix} LOGIN", *documented(suffix, bare.database.name)
    )
    try:
        yield bare
    finally:
        for daemon in bare.daemons:
            daemon.kill()
        for role in _ROLES:
            bare.database.execute(f"DROP OWNED BY {role}_{suffix}", f"DROP ROLE {role}_{suffix}")


def as_role(line: PipelineUnderTest, role: str) -> str:
    return make_conninfo(line.database.dsn, user=f"{role}_{line.database.name}")


def test_each_role_does_its_work_with_what_the_document_gives_it(line: PipelineUnderTest) -> None:
    rows = "INSERT INTO users SELECT i, 'u' || i FROM generate_series(1, 300) i"
    line.config_file = line.write(
        "least.yaml",
        source={"dsn": as_role(line, "lockstep")},
        snapshot={"mode": "never", "dsn": as_role(line, "lockstep_reader")},
        migrations=_AUDITED,
    )
    line.start().wait_ready()
    line.database.execute(rows, "ALTER TABLE orders ADD paid bool")
    converge(line.config)
    wait_until(lambda: statements(line), "the audit's record does not arrive")
    wanted = json.dumps({"data-collections": ["public.users"]})
    with psycopg.connect(as_role(line, "app"), autocommit=True) as sql:
        sql.execute("INSERT INTO lockstep.signal VALUES ('s1', 'execute-snapshot', %s)", (wanted,))
        for refused in (
            "SELECT * FROM users",
            "SELECT * FROM lockstep.signal_key",
            "SELECT * FROM lockstep.ddl_key",
            "DELETE FROM lockstep.signal",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                sql.execute(refused)
    wait_until(
        lambda: any(each.state == "done" for each in live_topic.read(line.config)),
        "the signal's snapshot is not done",
    )
    converge(line.config)
    assert line.frontiers()[-1].seq >= 600, "the rows were not read again"
    wait_until(lambda: read_status(line.config).verdict.exit_code == 0, "it is not well")
    wrong = [each for each in examine(line.config) if each.severity is Severity.ERROR]
    assert wrong == []


def test_who_reads_rows_does_nothing_else(line: PipelineUnderTest) -> None:
    with psycopg.connect(as_role(line, "lockstep_reader"), autocommit=True) as sql:
        sql.execute("SELECT * FROM users")
        for refused in (
            "INSERT INTO users VALUES (1, 'x')",
            "SELECT * FROM lockstep.signal_key",
            "INSERT INTO lockstep.signal VALUES ('x', 'stop-snapshot', NULL)",
            "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                sql.execute(refused.encode())
    with psycopg.connect(as_role(line, "lockstep"), autocommit=True) as sql:
        for refused in (
            "INSERT INTO users VALUES (1, 'x')",
            "DELETE FROM lockstep.signal_key",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                sql.execute(refused.encode())


def test_a_sql_followers_role_writes_its_schema_and_reads_nothing_else(database: Database) -> None:
    suffix = database.name
    copy, app = f"lockstep_copy_{suffix}", f"app_{suffix}"
    database.execute("CREATE TABLE theirs (id int)", f"CREATE ROLE {app} LOGIN")
    database.execute(*documented(suffix, database.name, block=2))
    url = make_url(url_of(database)).set(username=copy).render_as_string(hide_password=False)
    sink = SqlSink(SqlSettings(url, "copy", "shop"))
    try:
        sink.open()
        assert apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)])) == 1
        added = USERS.columns[0]._replace(name="age", nullable=True)
        longer = USERS._replace(schema_id=3, columns=(*USERS.columns, added))
        new = change(longer, 2, row(longer, 2, 2), 2)._replace(schema_id=3)
        assert apply(sink, 2, Changes((USERS, longer), [new])) == 1
        with psycopg.connect(make_conninfo(database.dsn, user=app), autocommit=True) as sql:
            assert sql.execute("SELECT count(*) FROM shop.users").fetchone() == (2,)
            assert sql.execute("SELECT seq FROM shop.lockstep_frontiers").fetchone() == (2,)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                sql.execute("DELETE FROM shop.users")
        with psycopg.connect(make_conninfo(database.dsn, user=copy), autocommit=True) as sql:
            for refused in ("SELECT * FROM theirs", "CREATE SCHEMA another"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    sql.execute(refused.encode())
        database.execute(f"ALTER SCHEMA shop OWNER TO {app}")
        with pytest.raises(PermissionDeniedError, match="42501"):
            apply(sink, 3, Changes((USERS,), [change(USERS, 3, row(USERS, 3, 3), 3)]))
    finally:
        sink.close()
        for role in (copy, app):
            database.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")
