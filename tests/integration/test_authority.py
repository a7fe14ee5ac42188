"""A role without grants can't affect a pipeline by writing messages into the WAL."""

from __future__ import annotations

import json
import re
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from cdc.cli.main import cdc
from cdc.errors import ConfigError, Exit
from cdc.log import names, reader
from cdc.log.follower_reports import CANARY
from cdc.operate.commands import migrations, snapshots
from cdc.operate.doctor import authority as authority_checks
from cdc.operate.doctor.verdict import examine
from cdc.operate.findings import Finding, Severity
from cdc.snapshot.incremental import commands, watermarks
from cdc.snapshot.incremental import topic as live_topic
from cdc.snapshot.incremental.records import TableName
from cdc.source import authority
from cdc.source.authority import Scope
from cdc.source.commands import send_command
from cdc.source.connection import connect
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import data_records
from tests.integration.test_canary import canaries
from tests.integration.test_incremental_snapshot import begin, say, wait_state
from tests.integration.test_migrations import statements

_TABLE = "CREATE TABLE users (id int PRIMARY KEY, name text)"
_ROOT = Path(__file__).parents[2]
_ROWS = "INSERT INTO users SELECT i, 'u' || i FROM generate_series(1, 200) i"
_USERS = [{"schema": "public", "table": "users"}]


@contextmanager
def guest(line: PipelineUnderTest) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection of a role that may log in and has no grants."""
    role = f"guest_{line.database.name}"
    line.database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with psycopg.connect(make_conninfo(line.database.dsn, user=role), autocommit=True) as sql:
            yield sql
    finally:
        line.database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def emit(
    sql: psycopg.Connection[Any], prefix: str, content: bytes, *, transactional: bool = True
) -> None:
    sql.execute(
        "SELECT pg_logical_emit_message(%s, %s, %s::bytea)", (transactional, prefix, content)
    )


def running(pipeline: NewPipeline, **sections: dict[str, object]) -> PipelineUnderTest:
    line = pipeline(_TABLE, **sections)
    line.start().wait_ready()
    line.database.execute(_ROWS)
    converge(line.config)
    return line


def refused(line: PipelineUnderTest) -> int:
    """Return how many messages look forged; an earlier session's watermarks do not."""
    return sum(each["count"] for each in line.daemon.health().get("refused_messages", ()))


def events(line: PipelineUnderTest) -> list[dict[str, Any]]:
    return [each.event for each in data_records(line) if each.value]


def still_streams(line: PipelineUnderTest) -> None:
    """Check that the log equals the table, no row was read again, and the daemon streams."""
    converge(line.config)
    assert {event["op"] for event in events(line)} == {"c"}
    assert live_topic.read(line.config) == []
    wait_until(lambda: line.daemon.health()["status"] == 200, "it does not stream")


def test_a_command_of_a_role_without_grants_empties_nothing(pipeline: NewPipeline) -> None:
    line = running(pipeline)
    content = json.dumps({"do": "start", "tables": _USERS, "anew": True, "where": "false"})
    with guest(line) as sql:
        emit(sql, commands.COMMAND, content.encode())
        signal = {"data-collections": ["public.users"]}
        answer = {"id": "s", "type": "execute-snapshot", "data": signal}
        emit(sql, commands.SIGNAL, json.dumps(answer).encode())
    wait_until(lambda: refused(line) >= 2, "nothing was refused")
    still_streams(line)
    assert "messages in the stream are not obeyed" in line.daemon.log
    assert line.daemon.term() == 0


@pytest.mark.long("half a minute; a command of such a role is in the first tier")
def test_a_condition_of_a_role_without_grants_runs_nothing(pipeline: NewPipeline) -> None:
    line = running(pipeline)
    with guest(line) as sql:
        where = (
            "true)) TO STDOUT (FORMAT binary); COMMIT; CREATE TABLE taken AS SELECT * FROM users;"
            f" GRANT SELECT ON users TO {sql.info.user}; --"
        )
        content = json.dumps({"do": "start", "tables": _USERS, "where": where})
        emit(sql, commands.COMMAND, content.encode())
        wait_until(lambda: refused(line) >= 1, "nothing was refused")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sql.execute("SELECT FROM users")
    assert line.query("SELECT to_regclass('public.taken')") == (None,)
    still_streams(line)
    assert "CREATE TABLE" not in line.daemon.log, "what a stranger writes is in no log"


def test_a_forged_canary_reaches_nobody(pipeline: NewPipeline) -> None:
    line = running(pipeline, source={"canary_seconds": 0.2})
    tomorrow = str(time.time_ns() // 1_000 + 86_400 * 1_000_000)
    with guest(line) as sql:
        for content in (tomorrow.encode(), b"garbage", b"\xff\xfe", b""):
            for transactional in (False, True):
                emit(sql, CANARY, content, transactional=transactional)
        emit(sql, "cdc.other", b"", transactional=False)
        # Outside a transaction none of ours is written, so nobody waits for it either.
        for prefix in ("lockstep.snapshot", "lockstep.window", "lockstep.ddl", "lockstep.any"):
            emit(sql, prefix, b"forged", transactional=False)
        emit(sql, "mine", b"as before", transactional=False)
    topic = names.messages_topic(line.config.prefix)

    def messages() -> list[dict[str, Any]]:
        found = reader.read_if_there(line.config, topic)
        return [json.loads(each.value() or b"") for each in found]

    # The last message of the stranger's is in the log, so all that came before it were judged.
    wait_until(lambda: any(m["message"]["prefix"] == "mine" for m in messages()), "it is not there")
    before = len(canaries(line))
    wait_until(lambda: len(canaries(line)) > before + 2, "no canary of the daemon's comes")
    found = messages()
    assert {each["message"]["prefix"] for each in found} == {CANARY, "mine"}
    now_us = time.time_ns() // 1_000
    sent = [
        int(b64decode(each["message"]["content"]))
        for each in found
        if each["message"]["prefix"] == CANARY
    ]
    assert all(now_us - 600_000_000 < each <= now_us for each in sent)
    wait_until(lambda: refused(line) == 13, f"{refused(line)} are refused")
    assert line.daemon.metric("lockstep_refused_messages_total") == 13
    line.settings["http"] = {"listen": f"127.0.0.1:{line.daemon.port}"}
    line.config_file = line.write("lockstep.yaml")

    def status() -> Result:
        return CliRunner().invoke(cdc, ["status", "-c", str(line.config_file)])

    wait_until(lambda: status().exit_code == 0, "a stranger does not change the verdict")
    output = status().output
    assert "messages not obeyed: " in output
    assert "1 (command: not transactional)" in output
    assert "forged" not in output, "no text of a message is shown"
    (reported,) = [each for each in examine(line.config) if each.check == "refused_messages"]
    assert reported.severity is Severity.NOTE
    still_streams(line)


def test_a_forged_record_of_the_ddl_audit_is_not_believed(pipeline: NewPipeline) -> None:
    """With the audit off and on, and with every attempt of a stranger to get it signed."""
    line = running(pipeline)
    reported = {
        "event": "ddl_command_end", "tag": "DROP TABLE", "objects": [], "object_count": 1,
        "statement": "DROP TABLE users", "statement_characters": 16, "withheld": False,
        "role": "postgres", "session_role": "postgres",
    }  # fmt: skip
    with guest(line) as sql:
        emit(sql, "lockstep.ddl", json.dumps(reported).encode())
        wait_until(lambda: refused(line) >= 1, "nothing was refused")
        list(migrations.up(line.config, ["ddl_audit", "signal_table"]))
        key = line.query("SELECT name FROM lockstep.ddl_key")[0]
        head = f"1 {key} 1 1 0123 {'0' * 64}\n".encode()
        emit(sql, "lockstep.ddl", head + json.dumps(reported).encode())
        line.database.execute(f"GRANT USAGE ON SCHEMA lockstep, public TO {sql.info.user}")
        line.database.execute(f"GRANT CREATE ON SCHEMA public TO {sql.info.user}")
        for statement in (
            "SELECT * FROM lockstep.ddl_key",
            "SELECT * FROM lockstep.signal_key",
            "INSERT INTO lockstep.signal VALUES ('x', 'stop-snapshot', NULL)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                sql.execute(statement.encode())
        sql.execute("CREATE TABLE public.own (id text, type text, data jsonb)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sql.execute(
                "CREATE TRIGGER t AFTER INSERT ON public.own"
                " FOR EACH ROW EXECUTE FUNCTION lockstep.tell_signal()"
            )
    line.database.execute("ALTER TABLE users ADD COLUMN more int")
    wait_until(
        lambda: any("ADD COLUMN more" in (each["statement"] or "") for each in statements(line)),
        "the audit's own is missing",
    )
    assert not any(each["tag"] == "DROP TABLE" for each in statements(line))
    line.daemon.term()


def captured(line: PipelineUnderTest, prefix: str) -> bytes:
    """Return the newest message of that prefix, as a role sees it that may read the WAL."""
    slot = f"seen_{line.database.name}"
    with line.database.connect() as connection:
        found = connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', %s, 'messages', 'true')",
            (slot, line.config.publication),
        ).fetchall()
    wanted = prefix.encode() + b"\0"
    contents = [row[0].partition(wanted)[2][4:] for row in found if wanted in row[0][:60]]
    return bytes(contents[-1])


def watch_wal(line: PipelineUnderTest) -> None:
    line.database.execute(
        f"SELECT pg_create_logical_replication_slot('seen_{line.database.name}', 'pgoutput')"
    )


def test_a_captured_command_is_obeyed_once_and_a_changed_one_never(pipeline: NewPipeline) -> None:
    """Refused are a replay, also by the next daemon, and another body, prefix, pipeline or time."""
    line = running(pipeline)
    watch_wal(line)
    number = begin(line, "public.users", keys=[["1"]])
    assert wait_state(line, number).rows == 1
    say(line, do="stop", id=None)
    stop = captured(line, commands.COMMAND)
    count, turned = len(events(line)), 0
    with guest(line) as sql:
        emit(sql, commands.COMMAND, stop)
        wait_until(lambda: refused(line) >= 1, "it was obeyed again")
        changed = json.loads(stop)
        changed["body"] = "e30="
        emit(sql, commands.COMMAND, json.dumps(changed).encode())
        emit(sql, commands.SIGNAL, stop)
        emit(sql, CANARY, stop, transactional=False)
        wait_until(lambda: refused(line) >= 4, "one was obeyed")
        line.daemon.term()
        line.start().wait_ready()
        paused = begin(line, "public.users")
        emit(sql, commands.COMMAND, stop)
        wait_until(lambda: refused(line) >= 1, "the next daemon has forgotten it")
        assert wait_state(line, paused).state == "done"
        turned = len(events(line))
        secret = authority.secret_of(line.config)
        assert secret is not None
        system = line.query("SELECT system_identifier::text FROM pg_control_system()")[0]
        body = json.dumps({"do": "start", "tables": _USERS}).encode()
        now_us = time.time_ns() // 1_000
        for scope, at_us in (
            (Scope("another", system), now_us),
            (Scope(line.config.pipeline, "1"), now_us),
            (Scope(line.config.pipeline, system), now_us - 3_600_000_000),
        ):
            content = authority.sign(secret, authority.COMMAND_PURPOSE, scope, at_us, body)
            emit(sql, commands.COMMAND, content)
        wait_until(lambda: refused(line) >= 4, "one was obeyed")
    line.database.execute(f"SELECT pg_drop_replication_slot('seen_{line.database.name}')")
    assert turned >= count + 200
    converge(line.config)
    assert len(events(line)) == turned
    assert line.daemon.health()["status"] == 200


@pytest.mark.long("half a minute; forged commands are in the first tier")
def test_marks_that_a_stranger_copies_change_no_snapshot(pipeline: NewPipeline) -> None:
    """A low watermark sent again would make older rows overwrite newer changes."""
    line = running(pipeline)
    watch_wal(line)
    assert wait_state(line, begin(line, "public.users")).rows >= 0
    mark = json.loads(captured(line, watermarks.PREFIX))
    assert not mark[4], "the last one is a high one"
    with guest(line) as sql:
        for low in (True, False):
            forged = [*mark[:2], mark[2] + 1, mark[3], low, mark[5]]
            emit(sql, watermarks.PREFIX, json.dumps(forged).encode())
        emit(sql, watermarks.PREFIX, json.dumps(mark).encode())
    wait_until(lambda: refused(line) >= 2, "forged marks were taken")
    line.database.execute(f"SELECT pg_drop_replication_slot('seen_{line.database.name}')")
    converge(line.config)
    assert line.daemon.health()["status"] == 200


def test_bytes_of_any_kind_end_no_daemon(pipeline: NewPipeline) -> None:
    """Under each of our prefixes, and under one that is longer than any record."""
    line = running(pipeline)
    deep, huge = b"[" * 100_000, b"x" * 3_000_000
    with guest(line) as sql:
        for prefix in ("lockstep.snapshot", "lockstep.signal", "lockstep.ddl", "lockstep.window",
                       "lockstep.", "lockstep.any", "cdc.canary", "cdc.", "any"):  # fmt: skip
            for content in (b"", b"{}", b'{"id":', deep, huge, b"\xff\xfe\x00", b"1 2 3\n"):
                for transactional in (True, False):
                    emit(sql, prefix, content, transactional=transactional)
        for transactional in (True, False):
            emit(sql, "p" * 2_000_000, b"content", transactional=transactional)
    line.database.execute("INSERT INTO users VALUES (0, 'last')")
    wait_until(
        lambda: any(each["after"]["name"] == "last" for each in events(line)), "it stopped over it"
    )
    still_streams(line)
    assert line.daemon.term() == 0


@pytest.mark.long("the other encoding", sample=["LATIN1"])
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_prefix_that_is_not_utf8_ends_no_daemon(pipeline: NewPipeline, encoding: str) -> None:
    line = pipeline(_TABLE)
    name = f"{line.database.name}_{encoding.lower()}"
    line.database.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
    )
    dsn = make_conninfo(line.database.dsn, dbname=name)
    line.settings["pipeline"] = f"{line.settings['pipeline']}_{encoding.lower()}"
    line.settings["source"] = {**line.settings["source"], "dsn": dsn}
    # By default the server refuses to send any text of such a database that is not UTF-8.
    line.settings["values"] = {"invalid.text.handling.mode": "base64"}
    line.config_file = line.write("lockstep.yaml")
    try:
        with psycopg.connect(dsn, autocommit=True, client_encoding="sql_ascii") as connection:
            connection.execute(_TABLE.encode())
            line.set_up()
            line.start().wait_ready()
            for transactional in (b"true", b"false"):
                connection.execute(
                    b"SELECT pg_logical_emit_message(%b, E'caf\\351 ', 'x')" % transactional
                )
            connection.execute("INSERT INTO users VALUES (1, 'last')")
            wait_until(lambda: len(events(line)) == 1, "it stopped over it")
        assert line.daemon.health()["status"] == 200
        line.daemon.term()
        line.database.execute(f"SELECT pg_drop_replication_slot('{line.config.slot}')")
    finally:
        line.close()
        line.database.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_with_the_rights_of_the_docs_no_guest_writes_a_text_that_can_not_be_sent(
    pipeline: NewPipeline,
) -> None:
    """In a database of WIN1252, whose 0x81 has no form in UTF-8: one such text halts the daemon."""
    line = pipeline(_TABLE)
    name = f"{line.database.name}_win1252"
    line.database.execute(
        f"CREATE DATABASE {name} ENCODING 'WIN1252' LOCALE 'C' TEMPLATE template0"
    )
    dsn = make_conninfo(line.database.dsn, dbname=name)
    line.settings["pipeline"] = f"{line.settings['pipeline']}_win1252"
    line.settings["source"] = {**line.settings["source"], "dsn": dsn}
    line.config_file = line.write("lockstep.yaml")
    emit = b"SELECT pg_logical_emit_message(true, chr(129), 'x')"
    guest = f"guest_{line.database.name}"
    (revoke,) = re.findall(
        r"DO \$\$.*?\$\$;", (_ROOT / "docs/SECURITY.md").read_text("utf-8"), re.DOTALL
    )
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_TABLE.encode())
            connection.execute(f"CREATE ROLE {guest}".encode())
            with connect(line.config) as ours:
                assert "halts" in _reported(ours, line)["emit_message"].what
            connection.execute(revoke.replace("'lockstep'", f"'{connection.info.user}'").encode())
            with connect(line.config) as ours:
                assert "emit_message" not in _reported(ours, line)
            line.set_up()
            line.start().wait_ready()
            connection.execute(f"SET ROLE {guest}".encode())
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(emit)
            connection.execute(b"RESET ROLE")
            connection.execute("INSERT INTO users VALUES (1, %s)", ("café",))
            wait_until(lambda: len(events(line)) == 1, "it stopped over it")
            assert events(line)[0]["after"]["name"] == "café"
            connection.execute(emit)
            wait_until(lambda: line.daemon.process.poll() is not None, "it reads what nobody sends")
        assert line.daemon.process.poll() == Exit.CONFIG
        assert "SECURITY.md" in line.daemon.log
        line.database.execute(f"SELECT pg_drop_replication_slot('{line.config.slot}')")
    finally:
        line.close()
        line.database.execute(f"DROP DATABASE {name} WITH (FORCE)", f"DROP ROLE IF EXISTS {guest}")


def _reported(connection: psycopg.Connection[Any], line: PipelineUnderTest) -> dict[str, Finding]:
    return {each.check: each for each in authority_checks.examine(connection, line.config)}


def test_without_a_secret_commands_are_refused_on_both_sides(pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE, _ROWS)
    signing = line.config
    line.settings["control"] = {}
    line.config_file = line.write("lockstep.yaml")
    line.start().wait_ready()
    with pytest.raises(ConfigError, match=r"control\.secret is not set"):
        snapshots.start(line.config, ["public.users"])
    ran = CliRunner().invoke(
        cdc, ["snapshot", "public.users", "-c", str(line.config_file)], catch_exceptions=True
    )
    assert ran.exit_code != 0
    with line.database.connect() as connection:
        body = commands.encode(commands.Command(do="start", tables=(TableName("public", "users"),)))
        send_command(connection, signing, commands.COMMAND, body)
    wait_until(lambda: refused(line) >= 1, "it was obeyed")
    assert live_topic.read(line.config) == []
    assert "no control.secret" in line.daemon.log
    assert line.daemon.term() == 0


@pytest.mark.long("as the condition of a role without grants")
def test_who_may_command_can_not_run_sql(pipeline: NewPipeline) -> None:
    """By command, signal row and command line: a condition compares columns, or is refused."""
    line = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text, email text)",
        "INSERT INTO users SELECT i, 'u' || i, 'e' || i FROM generate_series(1, 50) i",
        tables={"public.users": {"mask": {"email": "null"}}},
        migrations={"signal_table": True},
    )
    line.start().wait_ready()
    taken = "true)) TO STDOUT (FORMAT binary); COMMIT; CREATE TABLE taken (); --"
    for where, why in (
        (taken, "can't be read"),
        ("pg_sleep(600) IS NULL", "can't be read"),
        ("email = 'e1'", "masked"),
        ("secret = 1", "does not have"),
    ):
        found = wait_state(line, begin(line, "public.users", where=where), "failed")
        assert why in (found.why or "")
    wrong: list[list[list[str]]] = [[["1", "2"]], [[]]]
    for keys in wrong:
        found = wait_state(line, begin(line, "public.users", keys=keys), "failed")
        assert "a key of" in (found.why or "")
    condition = [{"data-collection": "public.users", "filter": taken}]
    data = json.dumps(
        {"data-collections": ["public.users"], "additional-conditions": condition}
    ).replace("'", "''")
    line.database.execute(f"INSERT INTO lockstep.signal VALUES ('s', 'execute-snapshot', '{data}')")
    assert "can't be read" in (wait_state(line, "s", "failed").why or "")
    with pytest.raises(ConfigError, match="--where can't be read"):
        snapshots.start(line.config, ["public.users"], where=taken)
    assert line.query("SELECT to_regclass('public.taken')") == (None,)
    number = begin(line, "public.users", where="name LIKE 'u1%' AND id <> 1")
    assert wait_state(line, number).rows == 10
    assert line.daemon.term() == 0


def test_the_doctor_reports_who_may_do_what(pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE, migrations={"signal_table": True, "ddl_audit": True})
    with guest(line) as sql:
        role = sql.info.user
        line.database.execute(
            f"GRANT INSERT ON lockstep.signal TO {role}",
            f"GRANT SELECT ON lockstep.ddl_key TO {role}",
            f"ALTER ROLE {role} REPLICATION",
        )
        with connect(line.config) as connection:
            reported = _reported(connection, line)
    assert all(
        role in reported[check].what
        for check in ("replication_roles", "trigger_keys", "signal_writers")
    )
    assert reported["control_secret"].severity is Severity.OK
    assert "harmless" in reported["emit_message"].what
