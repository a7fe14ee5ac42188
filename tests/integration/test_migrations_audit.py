"""What the DDL audit writes to the WAL; and it never makes a statement fail: on every major."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson
import pytest
from psycopg.conninfo import make_conninfo

from cdc.operate.commands import migrations
from tests.fixtures.daemon import PipelineUnderTest
from tests.fixtures.servers import Database

pytestmark = pytest.mark.majors

_MESSAGE: Final = re.compile(
    r"message: transactional: 1 prefix: ([\w.]+), sz: \d+ content:(.*)", re.DOTALL
)


class Wal:
    """The logical messages of a database, as another reader of its WAL sees them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._slot = f"wal_{database.name}"
        self._ask("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')::text")

    def _ask(self, query: str) -> list[tuple[Any, ...]]:
        with self.database.connect() as connection:
            return connection.execute(query.encode(), [self._slot]).fetchall()

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages since the last call."""
        rows = self._ask("SELECT data FROM pg_logical_slot_get_changes(%s, NULL, NULL)")
        found = [_MESSAGE.fullmatch(row[0]) for row in rows]
        return [
            {"prefix": one[1], **orjson.loads(one[2].partition("\n")[2])}
            for one in found
            if one and one[2]
        ]


def reported(wal: Wal, *statements: str) -> list[tuple[str, str, list[str]]]:
    """Run the statements; return event, tag and identities of each message."""
    notices: list[str] = []
    with wal.database.connect() as connection:
        connection.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
        for statement in statements:
            connection.execute(statement.encode())
    assert not [notice for notice in notices if "lockstep" in notice]
    return [
        (each["event"], each["tag"], [one["identity"] for one in each["objects"]])
        for each in wal.messages()
    ]


END, DROP = "ddl_command_end", "sql_drop"


@pytest.fixture
def audited(bare: PipelineUnderTest) -> Wal:
    list(migrations.up(bare.config, ["ddl_audit"]))
    return Wal(bare.database)


def test_each_kind_of_statement_is_recorded_and_none_fails(audited: Wal) -> None:
    assert reported(
        audited,
        "CREATE TABLE a (id int PRIMARY KEY, b text)",
        "ALTER TABLE a ADD COLUMN c int, DROP COLUMN b",
        "CREATE TEMP TABLE dropped (id serial PRIMARY KEY)",
        "DROP TABLE dropped",
        "CREATE TABLE asked AS SELECT 1 AS one",
        "GRANT SELECT ON a TO PUBLIC",
        "COMMENT ON TABLE a IS 'x'",
    ) == [
        (END, "CREATE TABLE", ["public.a", "public.a_pkey"]),
        (DROP, "ALTER TABLE", ["public.a.b"]),
        (END, "ALTER TABLE", ["public.a"]),
        (END, "CREATE TABLE AS", ["public.asked"]),
        (END, "GRANT", [None]),
        (END, "COMMENT", ["public.a"]),
    ]


def test_what_may_not_run_in_a_transaction_block_runs_as_before(audited: Wal) -> None:
    """Concurrent builds commit in between; some of them fail in a transaction that has written."""
    reported(
        audited,
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE p (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9)",
    )
    seen = reported(
        audited,
        "CREATE INDEX CONCURRENTLY a_again ON a (id)",
        "REINDEX INDEX CONCURRENTLY a_again",
        "REINDEX TABLE CONCURRENTLY a",
        "DROP INDEX CONCURRENTLY a_again",
        "ALTER TABLE p DETACH PARTITION p1 CONCURRENTLY",
        "VACUUM FULL a",
        "CLUSTER a USING a_pkey",
    )
    assert (END, "CREATE INDEX", ["public.a_again"]) in seen
    assert (DROP, "DROP INDEX", ["public.a_again"]) in seen
    with audited.database.connect() as connection:
        assert connection.execute("SELECT count(*) FROM p").fetchone() == (0,)


def test_a_statement_is_recorded_as_part_of_its_transaction(audited: Wal) -> None:
    """It is rolled back with it, or with the savepoint; a function's statement is reported too."""
    seen = reported(
        audited,
        "BEGIN; CREATE TABLE never (id int); ROLLBACK",
        "BEGIN; CREATE TABLE a (id int); SAVEPOINT s; CREATE TABLE b (id int);"
        " ROLLBACK TO s; CREATE TABLE c (id int); COMMIT",
        "CREATE SCHEMA s CREATE TABLE t (id int) CREATE VIEW v AS SELECT id FROM t",
        "CREATE FUNCTION make() RETURNS void LANGUAGE plpgsql AS"
        " $$ BEGIN EXECUTE 'CREATE TABLE made (id int)'; END $$",
        "SELECT make()",
        "DROP SCHEMA s CASCADE",
    )
    assert seen == [
        (END, "CREATE TABLE", ["public.a"]),
        (END, "CREATE TABLE", ["public.c"]),
        (END, "CREATE SCHEMA", ["s", "s.t", "s.v"]),
        (END, "CREATE FUNCTION", ["public.make()"]),
        (END, "CREATE TABLE", ["public.made"]),
        (DROP, "DROP SCHEMA", ["s", "s.t", "s.v", '"_RETURN" on s.v']),
    ]


def test_a_statement_keeps_within_its_limits_and_keeps_secrets(audited: Wal) -> None:
    """The text is the client's, with its roles; of many objects 200 are listed, all are counted."""
    long, many = "x" * 200_000, 300
    with audited.database.connect() as connection:
        connection.execute(f"CREATE TABLE t (id int DEFAULT length('{long}'))".encode())
        connection.execute("CREATE ROLE auditor")
        try:
            connection.execute("GRANT CREATE ON SCHEMA public TO auditor")
            connection.execute("SET ROLE auditor")
            connection.execute('CREATE TABLE "Ünïcode \x07" (id int)')
            connection.execute("RESET ROLE")
        finally:
            connection.execute("DROP OWNED BY auditor CASCADE")
            connection.execute("DROP ROLE auditor")
        connection.execute("CREATE FOREIGN DATA WRAPPER w OPTIONS (secret 'hidden')")
        connection.execute("COMMENT ON TABLE t IS 'the PassWord is hidden'")
        parts = " ".join(f"CREATE TABLE t{number} (id int)" for number in range(many))
        connection.execute(f"CREATE SCHEMA s {parts}".encode())
    table, granted, named, *_, wrapper, comment, schema = audited.messages()
    assert (len(table["statement"]), table["statement_characters"]) == (50_000, 200_042)
    assert granted["tag"] == "GRANT"
    assert named["statement"] == 'CREATE TABLE "Ünïcode \x07" (id int)'
    assert (named["role"], named["session_role"]) == ("auditor", "postgres")
    for hidden in (wrapper, comment):
        assert hidden["withheld"]
        assert hidden["statement"] is None
    assert (len(schema["objects"]), schema["object_count"]) == (200, many + 1)


def test_nobody_can_make_the_audit_run_their_own_or_fail(audited: Wal) -> None:
    """Functions of the same names in the path, a role that may not emit, and a broken function."""
    database = audited.database
    database.execute(
        "CREATE SCHEMA trap",
        *(
            f"CREATE FUNCTION trap.{name}({kinds}) RETURNS {back} LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'trapped'; END $$"
            for name, kinds, back in (
                ("current_query", "", "text"),
                ("getdatabaseencoding", "", "name"),
                ("convert_to", "text, text", "bytea"),
                ("left", "text, int", "text"),
                ("pg_logical_emit_message", "boolean, text, bytea", "pg_lsn"),
            )
        ),
    )
    audited.messages()
    path = "SET search_path = trap, public, pg_catalog"
    assert reported(audited, path, "CREATE TABLE public.a (id int)") == [
        (END, "CREATE TABLE", ["public.a"])
    ]
    output: list[str] = []
    with database.connect() as connection:
        connection.add_notice_handler(lambda notice: output.append(str(notice.message_primary)))
        connection.execute(
            "REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC"
            if connection.info.server_version < 170_000
            else "REVOKE EXECUTE ON FUNCTION"
            " pg_logical_emit_message(boolean, text, bytea, boolean) FROM PUBLIC"
        )
        connection.execute("CREATE ROLE mute")
        try:
            connection.execute("GRANT CREATE ON SCHEMA public TO mute")
            connection.execute("SET ROLE mute")
            connection.execute("CREATE TABLE public.unheard (id int)")
            connection.execute("RESET ROLE")
            connection.execute("DROP SCHEMA lockstep CASCADE")
            connection.execute("CREATE TABLE public.alone (id int)")
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP OWNED BY mute CASCADE")
            connection.execute("DROP ROLE mute")
    # The audit writes as its owner, and was dropped with its schema.
    assert [each for each in output if "lockstep" in each] == []


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_what_is_recorded_is_utf8_whatever_the_databases_encoding(
    bare: PipelineUnderTest, encoding: str
) -> None:
    name = f"{bare.database.name}_{encoding.lower()}"
    bare.database.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
    )
    try:
        other = Database(make_conninfo(bare.database.dsn, dbname=name), name)
        bare.settings["source"] = {**bare.settings["source"], "dsn": other.dsn}
        bare.write("lockstep.yaml")
        list(migrations.up(bare.config, ["signal_table", "ddl_audit"]))
        slot = f"wal_{name}"
        with other.connect(client_encoding="utf8") as connection:
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
            connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
            connection.execute("CREATE TABLE münze (id int)")
            connection.execute("INSERT INTO lockstep.signal VALUES ('ü', 'stop-snapshot', '[1]')")
            rows = connection.execute(
                "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
                " 'proto_version', '1', 'publication_names', 'p', 'messages', 'true')",
                [slot],
            ).fetchall()
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        output = b"".join(row[0] for row in rows if row[0][:1] == b"M")
        assert '"statement" : "CREATE TABLE münze (id int)"'.encode() in output
        assert '"id" : "ü", "type" : "stop-snapshot", "data" : [1]'.encode() in output
    finally:
        bare.database.execute(f"DROP DATABASE {name} WITH (FORCE)")
