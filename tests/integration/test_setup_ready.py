"""`cdc setup` creates nothing before everything can be created; it refuses what `cdc run` would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc.config import Config
from cdc.errors import (
    CDCError,
    ConfigError,
    Exit,
    GapError,
    PermissionDeniedError,
    SlotBusyError,
)
from cdc.log import topics
from cdc.operate import parameters
from cdc.operate.commands import tables as control
from cdc.operate.commands.setup import set_up, survey, tear_down
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Finding, Level, Severity
from cdc.operate.status import read_status
from cdc.playground.servers.stack import LocalStack
from cdc.publication.objects import alter_slot
from cdc.source.abilities import read_abilities
from cdc.source.connection import connect
from cdc.source.server import read_server
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"


@pytest.fixture
def role(bare: PipelineUnderTest) -> Iterator[str]:
    """A role that may stream and create a publication, and owns nothing."""
    name = f"r_{bare.database.name}"
    bare.database.execute(
        f"CREATE ROLE {name} LOGIN REPLICATION",
        f"GRANT CREATE ON DATABASE {bare.database.name} TO {name}",
        "INSERT INTO users VALUES (1, 'Ada')",
    )
    yield name
    bare.database.execute(f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


def as_role(line: PipelineUnderTest, role: str, **changed: object) -> Config:
    dsn = make_conninfo(line.database.dsn, user=role)
    line.config_file = line.write("lockstep.yaml", source__dsn=dsn, **changed)
    return line.config


def errors(config: Config) -> dict[str, Finding]:
    return {e.check: e for e in examine(config) if e.severity is Severity.ERROR}


def leftovers(config: Config, line: PipelineUnderTest) -> list[str]:
    """Return what exists of the pipeline."""
    found = sorted(topics.existing(topics.admin(config), config.prefix))
    with line.database.connect() as connection:
        query = "SELECT pubname FROM pg_publication WHERE pubname = %s"
        found += [name for (name,) in connection.execute(query, [config.publication])]
        query = "SELECT slot_name FROM pg_replication_slots WHERE slot_name = %s"
        found += [name for (name,) in connection.execute(query, [config.slot])]
    return found


def test_doctor_and_setup_agree_that_a_publication_takes_the_tables_owner(
    bare: PipelineUnderTest, role: str
) -> None:
    config = as_role(bare, role, snapshot={"mode": "initial"})
    found = errors(config)
    assert "public.users" in found["owner"].what
    assert "may not be read: public.users" in found["snapshot"].what
    with pytest.raises(PermissionDeniedError) as caught:
        list(set_up(config))
    # One list: each error of the doctor is a reason for the refusal, with the same fix.
    for each in found.values():
        assert each.what in caught.value.what
        assert each.fix in caught.value.what
    assert not leftovers(config, bare)
    for each in found.values():
        bare.database.execute(each.fix.partition("--")[0])
    assert not errors(config)
    list(set_up(config))
    assert not errors(config)


@pytest.mark.long("another owner of the tables")
def test_a_group_that_owns_the_tables_is_granted(bare: PipelineUnderTest, role: str) -> None:
    owner = f"o_{bare.database.name}"
    bare.database.execute(f"CREATE ROLE {owner}", f"ALTER TABLE users OWNER TO {owner}")
    try:
        config = as_role(bare, role)
        found = errors(config)
        assert found["owner"].fix == f'GRANT "{owner}" TO "{role}";'
        bare.database.execute(found["owner"].fix)
        assert not errors(config)
        list(set_up(config))
    finally:
        bare.database.execute(f"DROP OWNED BY {owner} CASCADE", f"DROP ROLE {owner}")


def test_abilities_are_tried_and_leave_nothing(bare: PipelineUnderTest, role: str) -> None:
    config = as_role(bare, role)
    with connect(config) as connection:
        server = read_server(connection)
        able = read_abilities(connection, config, server)
        assert (able.slot, able.stream) == (None, None)
        bare.database.execute(f"ALTER ROLE {role} NOREPLICATION")
        able = read_abilities(connection, config, server)
    assert able.slot is not None
    assert isinstance(able.stream, PermissionDeniedError)
    assert able.settable == frozenset()
    assert not leftovers(config, bare)
    assert errors(config)["replication"].fix == f'ALTER ROLE "{role}" REPLICATION;'


@pytest.mark.pg(">= 15")
def test_alter_system_is_proposed_to_whom_it_is_granted(bare: PipelineUnderTest, role: str) -> None:
    config = as_role(bare, role)

    def fix() -> str:
        with connect(config) as connection:
            server = read_server(connection)
            able = read_abilities(connection, config, server)
        return parameters.change(able, "max_slot_wal_keep_size", "'50GB'")

    assert fix().startswith("as a superuser: ALTER SYSTEM")
    bare.database.execute(f"GRANT ALTER SYSTEM ON PARAMETER max_slot_wal_keep_size TO {role}")
    try:
        assert fix().startswith("ALTER SYSTEM SET max_slot_wal_keep_size")
    finally:
        bare.database.execute(
            f"REVOKE ALTER SYSTEM ON PARAMETER max_slot_wal_keep_size FROM {role}"
        )


def test_a_setup_that_fails_late_leaves_nothing(
    bare: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.config_file = bare.write("lockstep.yaml")

    def refused(*_: object, **__: object) -> None:
        raise ConfigError("no record today", hint="none")

    with monkeypatch.context() as patched:
        patched.setattr("cdc.log.resume.write_fenced", refused)
        with pytest.raises(ConfigError, match="no record today"):
            list(set_up(bare.config))
    # Empty topics may stay if the brokers are slow: the next setup uses them.
    prefix = f"{bare.config.prefix}."
    assert not [each for each in leftovers(bare.config, bare) if not each.startswith(prefix)]
    list(set_up(bare.config))


def test_a_setup_that_is_refused_by_the_log_creates_nothing(bare: PipelineUnderTest) -> None:
    bare.config_file = bare.write("lockstep.yaml", log__replication_factor=7)
    with pytest.raises(ConfigError, match="replication_factor is 7"):
        list(set_up(bare.config))
    assert not leftovers(bare.config, bare)


# --- what the daemon refuses ---


def recreate_slot(line: PipelineUnderTest) -> None:
    name = line.config.slot
    line.database.execute(
        f"SELECT pg_drop_replication_slot('{name}')",
        "INSERT INTO users VALUES (7, 7)",
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')",
    )


def recreate_publication(line: PipelineUnderTest) -> None:
    name = line.config.publication
    line.database.execute(f"DROP PUBLICATION {name}", f"CREATE PUBLICATION {name} FOR TABLE users")


def put_back(line: PipelineUnderTest) -> None:
    name = line.config.publication
    line.database.execute(
        f"ALTER PUBLICATION {name} DROP TABLE users", f"ALTER PUBLICATION {name} ADD TABLE users"
    )


@pytest.mark.long("the other gaps", sample=["put_back"])
@pytest.mark.parametrize("happened", [recreate_slot, recreate_publication, put_back])
def test_setup_status_and_doctor_name_the_gap_that_stops_the_daemon(
    pipeline: NewPipeline, happened: Callable[[PipelineUnderTest], None]
) -> None:
    line = pipeline(USERS)
    happened(line)
    with pytest.raises(GapError) as caught:
        list(set_up(line.config))
    line.refused(Exit.CONFIG, caught.value.what)
    problems = read_status(line.config).verdict.of(Level.FAILED)
    assert [each.what for each in problems] == [caught.value.what]
    assert all(each.remedy != "cdc run" and each.exit_code == Exit.CONFIG for each in problems)
    assert errors(line.config)["continuity"].what == caught.value.what


# --- what the daemon waits for ---


def test_a_topic_that_too_few_brokers_can_hold_is_waited_for(pipeline: NewPipeline) -> None:
    """As while a cluster is restarted: the daemon needs no person when its brokers are back."""
    line = pipeline(USERS, source={"tables": ["public.*"], "new_tables": "publish"})
    file = line.write("two.yaml", log__replication_factor=2)
    daemon = line.start(config_file=file).wait_ready()
    line.database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1)"
    )
    wait_until(lambda: "start the brokers that are down" in daemon.log, "it does not say so")
    assert daemon.process.poll() is None
    assert daemon.term() == Exit.OK
    line.start().wait_ready()
    wait_until(lambda: any(each.seq >= 1 for each in line.frontiers()), "the row does not arrive")


# --- tables added later ---


def later(line: PipelineUnderTest, role: str) -> Config:
    """Set up a pipeline of `role`, and create another role's table with rows."""
    line.database.execute(f"ALTER TABLE users OWNER TO {role}")
    config = as_role(line, role)
    list(set_up(config))
    line.database.execute(
        "CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (1), (2)"
    )
    return config


def test_adding_a_table_that_may_not_be_read_is_refused(bare: PipelineUnderTest, role: str) -> None:
    config = later(bare, role)
    with pytest.raises(PermissionDeniedError, match="may not read"):
        control.add(config, ["public.later"])


def test_adding_another_roles_table_shows_how_to_get_its_rows(
    bare: PipelineUnderTest, role: str
) -> None:
    config = later(bare, role)
    bare.database.execute(f"GRANT SELECT ON later TO {role}")
    with pytest.raises(PermissionDeniedError) as caught:
        control.add(config, ["public.later"])
    hint = caught.value.hint
    assert "`cdc snapshot public.later`" in hint
    assert "`cdc setup`" not in hint
    statement = hint.partition("run: ")[2].partition(";")[0]
    bare.database.execute(statement)
    # The next setup reports that rows are missing.
    output = " ".join(step.what for step in set_up(config))
    assert "new in the publication: public.later" in output
    assert "`cdc snapshot public.later`" in output
    with pytest.raises(ConfigError, match="captured already"):
        control.add(config, ["public.later"])


@pytest.mark.long("a server of its own")
def test_a_wal_level_below_logical_is_no_privilege_that_is_missing(
    bare: PipelineUnderTest, tmp_path: Path
) -> None:
    """Postgres refuses a slot for it, too; the setting says why, and what changes it."""
    stack = LocalStack(tmp_path / "home")
    try:
        dsn = stack.up(["postgres"], settings={"postgres": {"wal_level": "replica"}}).postgres_dsn
        assert dsn is not None
        config = as_server(bare, dsn)
        found = errors(config)
        assert "ALTER SYSTEM SET wal_level" in found["wal_level"].fix
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE users (id int PRIMARY KEY)")
            connection.execute("ALTER SYSTEM SET wal_level = 'logical'")
            connection.execute("SELECT pg_reload_conf()")
        wait_until(
            lambda: "waits for a restart" in errors(config)["wal_level"].what, "it is not noticed"
        )
        with pytest.raises(CDCError, match="wal_level"):
            list(set_up(config))
        assert not leftovers(config, bare)
    finally:
        stack.down()


def as_server(line: PipelineUnderTest, dsn: str) -> Config:
    line.config_file = line.write("other.yaml", source__dsn=dsn)
    return line.config


@pytest.mark.long("another owner")
def test_the_owner_of_a_publication_is_named_who_may_change_it(
    bare: PipelineUnderTest, role: str
) -> None:
    """The tables' owner would not help."""
    bare.database.execute(f"GRANT SELECT ON users TO {role}")
    config = as_role(bare, role)
    name = f'"{config.publication}"'
    bare.database.execute(f"CREATE PUBLICATION {name} FOR TABLE users")
    found = errors(config)["owner"]
    assert "ALTER PUBLICATION" in found.fix
    assert "GRANT" not in found.fix
    for statement in found.fix.partition("--")[0].split(";"):
        bare.database.execute(statement)
    assert not errors(config)
    bare.database.execute(f"DROP PUBLICATION {name}")


def test_a_teardown_that_is_refused_drops_nothing(bare: PipelineUnderTest, role: str) -> None:
    own = bare.config
    list(set_up(own))
    owned = leftovers(own, bare)
    config = as_role(bare, role)
    with pytest.raises(PermissionDeniedError, match="publication") as refused:
        list(tear_down(config, survey(config), with_topics=True))
    assert "DROP PUBLICATION" in refused.value.hint
    assert leftovers(config, bare) == owned
    list(tear_down(own, survey(own), with_topics=True))
    assert not leftovers(own, bare)


def test_a_slot_that_a_daemon_streams_from_is_not_altered_and_not_waited_for(
    pipeline: NewPipeline,
) -> None:
    """Postgres itself waits without limit."""
    line = pipeline(USERS)
    line.start().wait_ready()
    with pytest.raises(SlotBusyError, match="streams from it"):
        alter_slot(line.config, line.config.slot, failover=True)
