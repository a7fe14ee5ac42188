"""What `cdc setup` may create in the source, and removes again: on every available major."""

from __future__ import annotations

import signal
from typing import Any, Final

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.cli.main import cdc
from cdc.operate.commands import migrations
from cdc.operate.commands.setup import set_up, survey, tear_down
from cdc.operate.commands.steps import Did
from cdc.operate.doctor import migrations as migration_checks
from cdc.source.connection import connect
from tests.fixtures.converge import converge
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.witness import data_records, message_seqs, records_of
from tests.integration.test_incremental_snapshot import found as found_live
from tests.integration.test_incremental_snapshot import wait_state

pytestmark = pytest.mark.majors

_ALL: Final = {"signal_table": True, "heartbeat_table": True, "ddl_audit": True}


def ask(line: PipelineUnderTest, **given: object) -> PipelineUnderTest:
    line.settings["migrations"] = given
    line.write("lockstep.yaml")
    return line


def there(line: PipelineUnderTest) -> set[str]:
    return {each.name for each in migrations.survey(line.config) if each.revision}


def in_database(line: PipelineUnderTest) -> set[str]:
    """Return what exists of it in the catalogs, regardless of any record of it."""
    with line.database.connect() as connection:
        rows = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname = 'lockstep'"
            " UNION ALL SELECT relname FROM pg_class WHERE relkind = 'r'"
            " AND relnamespace = to_regnamespace('lockstep')"
            " UNION ALL SELECT proname FROM pg_proc"
            " WHERE pronamespace = to_regnamespace('lockstep')"
            " UNION ALL SELECT evtname FROM pg_event_trigger"
        ).fetchall()
    return {str(row[0]) for row in rows}


_OWN: Final = {"lockstep", "alembic_version"}
_PARTS: Final = {
    "signal_table": {"signal", "signal_key", "tell_signal"},
    "heartbeat_table": {"heartbeat"},
    "ddl_audit": {"ddl_key", "tell_ddl", "lockstep_ddl", "lockstep_ddl_drop"},
}


def teardown(line: PipelineUnderTest) -> list[str]:
    steps = tear_down(line.config, survey(line.config), with_topics=True)
    return [step.what for step in steps if step.did is Did.DONE]


def test_nothing_is_made_unless_it_is_asked_for(bare: PipelineUnderTest) -> None:
    bare.set_up()
    assert in_database(bare) == set()
    teardown(bare)


def test_each_comes_and_goes_by_itself_and_twice_is_once(bare: PipelineUnderTest) -> None:
    """A user's own Alembic is not touched."""
    bare.database.execute("CREATE TABLE alembic_version (version_num text)")
    ask(bare, signal_table=True).set_up()
    assert in_database(bare) == _OWN | _PARTS["signal_table"]
    ask(bare, **_ALL)
    did = [step for step in set_up(bare.config) if "signal" in step.what or "DDL" in step.what]
    assert [step.did for step in did] == [Did.LEFT, Did.DONE]
    assert all(step.did is not Did.DONE for step in set_up(bare.config))
    assert in_database(bare) == _OWN.union(*_PARTS.values())
    for name in ("heartbeat_table", "signal_table"):
        assert [step.did for step in migrations.down(bare.config, [name])] == [Did.DONE]
        assert [step.did for step in migrations.down(bare.config, [name])] == [Did.LEFT]
    assert in_database(bare) == _OWN | _PARTS["ddl_audit"]
    teardown(bare)
    assert in_database(bare) == set()
    assert bare.query("SELECT count(*) FROM public.alembic_version") == (0,)


def test_what_others_may_use_stays_after_a_teardown(bare: PipelineUnderTest) -> None:
    """Because of another pipeline's slot, or of what a user keeps in the schema."""
    ask(bare, **_ALL).set_up()
    other = f"other_{bare.config.pipeline}"
    bare.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')::text", other)
    teardown(bare)
    assert there(bare) == set(_ALL)
    bare.query("SELECT pg_drop_replication_slot(%s)::text", other)
    bare.database.execute("CREATE TABLE lockstep.mine (id int)")
    steps = migrations.down(bare.config, list(_ALL))
    assert [step.did for step in steps] == [Did.DONE] * 3
    assert in_database(bare) == {"lockstep", "mine"}


def as_role(line: PipelineUnderTest, **given: object) -> PipelineUnderTest:
    """Give the pipeline a role that may replicate and own its table, and nothing else."""
    role = f"poor_{line.database.name}"
    line.database.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'p'",
        f"ALTER TABLE users OWNER TO {role}",
        f"GRANT CREATE ON DATABASE {line.database.name} TO {role}",
    )
    dsn = make_conninfo(line.database.dsn, user=role, password="p")
    line.settings["source"] = {**line.settings["source"], "dsn": dsn}
    return ask(line, **given)


def test_what_is_not_permitted_is_reported_and_stops_nothing(bare: PipelineUnderTest) -> None:
    """What an administrator ran instead counts as created by us."""
    as_role(bare, **_ALL)
    role = str(conninfo_to_dict(bare.config.source.dsn)["user"])
    try:
        warned = [step.what for step in set_up(bare.config) if step.did is Did.WARN]
        assert len(warned) == 1
        assert "event trigger" in warned[0]
        assert "cdc migrations sql ddl_audit" in warned[0]
        assert there(bare) == {"signal_table", "heartbeat_table"}
        list(migrations.down(bare.config, ["signal_table", "heartbeat_table"]))

        bare.database.execute(f"REVOKE CREATE ON DATABASE {bare.database.name} FROM {role}")
        steps = [*migrations.up(bare.config, list(_ALL))]
        assert [step.did for step in steps] == [Did.WARN] * 3
        assert in_database(bare) == set()

        run(bare, "sql")
        assert there(bare) == set(_ALL)
        assert {step.did for step in migrations.up(bare.config, list(_ALL))} == {Did.LEFT}
        with psycopg.connect(bare.config.source.dsn, autocommit=True) as connection:
            connection.execute("INSERT INTO lockstep.heartbeat VALUES ('p', now(), 'me')")
        steps = [*migrations.down(bare.config, ["ddl_audit"])]
        assert [step.did for step in steps] == [Did.WARN]
        run(bare, "sql", "--down", "signal_table")
        assert there(bare) == {"heartbeat_table", "ddl_audit"}
        run(bare, "sql", "--down", "heartbeat_table", "ddl_audit")
        assert there(bare) == set()
    finally:
        for daemon in bare.daemons:
            daemon.kill()
        teardown(bare)
        bare.database.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def run(line: PipelineUnderTest, *arguments: str) -> None:
    """Run what `cdc migrations` prints, as an administrator."""
    result = CliRunner().invoke(cdc, ["migrations", *arguments, "-c", str(line.config_file)])
    assert result.exit_code == 0, result.output
    line.database.execute(result.stdout)


def statements(line: PipelineUnderTest) -> list[dict[str, Any]]:
    """Return the DDL records in the schema topic, each once, in order."""
    topic = f"{line.config.prefix}.cdc.schema"
    found: dict[bytes, dict[str, Any]] = {}
    for record in records_of(line, lambda name: name == topic):
        assert record.key is not None
        if b"ddl" in record.key:
            again = found.setdefault(record.key, record.event)
            assert again == record.event, "published twice, and not the same"
    return list(found.values())


def test_each_statement_is_in_its_place_among_the_changes(
    bare: PipelineUnderTest,
) -> None:
    """Also if a transaction is larger than a batch, and if the daemon is killed in it."""
    bare.settings["batch"] = {"max_events": 5, "max_wait_ms": 10}
    ask(bare, ddl_audit=True).set_up()
    run_all(
        bare,
        "INSERT INTO users VALUES (1, 'one')",
        "BEGIN; INSERT INTO users VALUES (2, 'two'); ALTER TABLE users ADD COLUMN age int;"
        " INSERT INTO users VALUES (3, 'three', 3); CREATE INDEX by_age ON users (age);"
        " INSERT INTO users VALUES (4, 'four', 4); COMMIT",
        "DROP INDEX by_age",
        "BEGIN; INSERT INTO users SELECT i FROM generate_series(100, 140) i;"
        " COMMENT ON TABLE users IS 'in the middle';"
        " INSERT INTO users SELECT i FROM generate_series(200, 240) i; COMMIT",
    )
    killed = bare.start("after_commit:2")
    assert killed.wait_exit() == -signal.SIGKILL
    bare.start().wait_ready()
    run_all(bare, "COMMENT ON TABLE users IS 'alone'")
    # Only a statement: it is published without waiting for a change.
    wait_until(lambda: len(statements(bare)) == 5, "the statements are not all there")
    seqs = {event["after"]["id"]: event["source"]["seq"] for event in rows(bare)}
    taken = sorted([*seqs.values(), *message_seqs(bare)])
    assert taken == list(range(1, len(taken) + 1)), "they take no seq of their own"
    found = statements(bare)
    assert [(each["tag"], each["seq"], each["ordinal"]) for each in found] == [
        ("ALTER TABLE", seqs[2], 1),
        ("CREATE INDEX", seqs[3], 2),
        ("DROP INDEX", seqs[4], 0),
        ("COMMENT", seqs[140], 41),
        ("COMMENT", seqs[240], 0),
    ]
    assert found[0]["commit_lsn"] == found[1]["commit_lsn"] != found[2]["commit_lsn"]
    times = {event["source"]["commit_lsn"]: event["source"]["ts_us"] for event in rows(bare)}
    for statement in (found[0], found[1], found[3]):
        assert statement["committed_at_us"] == times[statement["commit_lsn"]]
    assert len({statement["committed_at_us"] for statement in found}) == len(found) - 1
    converge(bare.config)
    bare.daemon.term()
    assert bare.start().wait_ready().term() == 0, "its own records are not in its way"


def test_a_message_of_our_prefix_that_is_not_ours_harms_nothing(
    bare: PipelineUnderTest,
) -> None:
    ask(bare, ddl_audit=True).set_up()
    bare.start().wait_ready()
    run_all(
        bare,
        *(
            f"SELECT pg_logical_emit_message({transactional}, 'lockstep.{what}', '{answer}')"
            for transactional in ("true", "false")
            for what in ("ddl", "signal", "snapshot", "unheard", "")
            for answer in ("", "{}", '{"id": 1}', "[", '{"id": "x", "type": "halt", "data": 3}')
        ),
        "INSERT INTO users VALUES (1, 'one')",
    )
    wait_until(lambda: len(rows(bare)) == 1, "the daemon stopped over it")
    assert statements(bare) == []
    assert bare.daemon.health()["status"] == 200
    assert [event["source"]["seq"] for event in rows(bare)] == [1]


@pytest.mark.long("waits for beats")
def test_a_running_daemon_beats(bare: PipelineUnderTest) -> None:
    """Without the table it continues, and reports that."""
    ask(bare, heartbeat_table=True, heartbeat_seconds=5).set_up()
    bare.start().wait_ready()
    beats = "SELECT count(*), max(beat_at) FROM lockstep.heartbeat WHERE pipeline = %s"
    seen: set[object] = set()

    def twice() -> bool:
        count, at = bare.query(beats, bare.config.pipeline)
        seen.add(at)
        return bool(count == 1 and len(seen - {None}) >= 2)

    wait_until(twice, "no second heartbeat")
    list(migrations.down(bare.config, ["heartbeat_table"]))

    def reported() -> bool:
        return any("heartbeat" in each for each in bare.daemon.health().get("warnings", []))

    wait_until(reported, "nothing reports that there is no heartbeat")
    assert bare.daemon.health()["status"] == 200


def test_a_row_of_the_signal_table_has_a_table_read(bare: PipelineUnderTest) -> None:
    """Rows older than the log, by signals in Debezium's format; another signal stops a snapshot."""
    bare.database.execute("INSERT INTO users SELECT i, 'old' FROM generate_series(1, 700) i")
    ask(bare, signal_table=True).set_up()
    bare.start().wait_ready()
    signal = "INSERT INTO lockstep.signal (id, type, data) VALUES ('{}', '{}', '{}')"
    tables = '{"type": "incremental", "data-collections": ["public.users"]}'
    run_all(
        bare,
        signal.format("nobody-knows", "log", '{"message": "for others"}'),
        signal.format("all-of-it", "execute-snapshot", tables),
        "UPDATE users SET name = 'new' WHERE id % 7 = 0",
    )
    assert wait_state(bare, "all-of-it").rows >= 600
    assert {event["op"] for event in rows(bare)} == {"r", "u"}
    converge(bare.config)
    run_all(
        bare,
        signal.format("no-more", "execute-snapshot", tables),
        signal.format("enough", "stop-snapshot", tables),
    )
    wait_until(
        lambda: (found := found_live(bare, "no-more")) is not None and not found.active,
        "it goes on",
    )


def doctor(line: PipelineUnderTest) -> dict[str, str]:
    """Return the doctor's finding about each, by name: its severity, and its fix."""
    with connect(line.config) as connection:
        findings = list(migration_checks.examine(connection, line.config))
    return {
        name: f"{each.severity.value}: {each.fix}"
        for each in findings
        for name in _PARTS
        if f"the {name.replace('_', ' ').replace('ddl', 'DDL')} " in each.what
    }


def test_the_doctor_reports_what_is_missing_disabled_old_or_too_much(
    bare: PipelineUnderTest,
) -> None:
    assert doctor(bare) == {}
    ask(bare, **_ALL)
    assert all(answer.startswith("warning: cdc setup") for answer in doctor(bare).values())
    assert len(doctor(bare)) == len(_ALL)
    bare.set_up()
    assert doctor(bare) == dict.fromkeys(_ALL, "ok: ")
    run_all(
        bare,
        "ALTER EVENT TRIGGER lockstep_ddl DISABLE",
        "DROP TRIGGER tell ON lockstep.signal",
        "DROP TABLE lockstep.heartbeat",
    )
    broken = doctor(bare)
    assert broken == {n: f"warning: cdc migrations down {n}; cdc setup" for n in _ALL}
    for name in broken:
        list(migrations.down(bare.config, [name]))
    bare.set_up()
    assert doctor(bare) == dict.fromkeys(_ALL, "ok: ")
    ask(bare, signal_table=True)
    answer = doctor(bare)
    assert answer["signal_table"] == "ok: "
    assert answer["ddl_audit"].startswith(
        "note: migrations.ddl_audit: true, or: cdc migrations down"
    )
    version = "UPDATE lockstep.alembic_version SET version_num = 'signal_table_{}'"
    where = " WHERE version_num LIKE 'signal%'"
    run_all(bare, version.format(0) + where)
    assert doctor(bare)["signal_table"] == "warning: cdc migrations up signal_table"
    run_all(bare, version.format(9) + where)
    assert doctor(bare)["signal_table"] == "note: update this one"
    run_all(bare, version.format(2) + where)
    teardown(bare)


def run_all(line: PipelineUnderTest, *sql: str) -> None:
    with line.database.connect() as connection:
        for each in sql:
            connection.execute(each.encode())


def rows(line: PipelineUnderTest) -> list[dict[str, Any]]:
    return [record.event for record in data_records(line) if record.value]
