"""Postgres shuts down in each mode, ends our connections, locks us out: it costs time only.

Fast shutdowns are in test_servers_away, kills of the postmaster also in the campaign.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest

from cdc.errors import LocalStackError
from cdc.playground.servers.stack import LocalStack
from tests.fixtures.converge import converge
from tests.fixtures.daemon import Daemon, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.standby import NewPair, majors
from tests.fixtures.witness import Witness
from tests.integration.test_slot_gaps import write_rules

_BATCH = {"max_events": 300, "max_wait_ms": 50}
_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"
_CONFIG, _PERMISSION = 78, 77
# One round of a daemon that is refused: it retries every ten seconds.
_SLOW_SECONDS = 120.0


def moves(daemon: Daemon, seconds: float = 90.0) -> None:
    seen = daemon.metric("lockstep_events_total")
    wait_until(
        lambda: daemon.metric("lockstep_events_total") >= seen + 30, "nothing moves", seconds
    )


def publish(line: PipelineUnderTest, key: int) -> None:
    """Write a row and wait until it is in the log."""
    seq = line.resume()[1].seq
    line.database.execute(f"INSERT INTO users VALUES ({key}, 1)")
    wait_until(lambda: line.resume()[1].seq == seq + 1, "the row does not arrive")


def a_backend(stack: LocalStack) -> int:
    """Return the pid of some client's backend."""
    server = psutil.Process(stack["postgres"].pid)
    found = []
    for each in server.children(recursive=True):
        with suppress(psutil.Error):  # workers of the server's own come and go
            found += [each.pid] if "idle" in " ".join(each.cmdline()) else []
    assert found
    return found[0]


@pytest.mark.long("the other ways of going down", sample=["immediate", "backend crash"])
@pytest.mark.slow
@pytest.mark.parametrize("how", ["smart", "immediate", "killed", "backend crash"])
def test_however_postgres_goes_down_nothing_is_lost(
    how: str, killable_stack: LocalStack, killable_pipeline: NewPipeline
) -> None:
    """Here a smart shutdown waits for the load, until a fast one follows."""
    line = killable_pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=21):
        moves(daemon)
        postgres = killable_stack["postgres"]
        if how == "backend crash":
            idle = psycopg.connect(line.database.dsn)
            os.kill(a_backend(killable_stack), signal.SIGKILL)
            idle.close()
        elif how == "killed":
            postgres.kill()
            killable_stack.start("postgres")
        else:
            process = postgres.state.process
            process.signal({"smart": signal.SIGTERM, "immediate": signal.SIGQUIT}[how])
            if how == "smart":
                time.sleep(1.0)  # it admits no new client, and waits for the connected ones
                process.signal(signal.SIGINT)
            assert process.wait(90), "the daemon holds the shutdown up"
            killable_stack.start("postgres")
        wait_until(lambda: daemon.metric("lockstep_reconnects_total") >= 1, "it does not notice")
        moves(daemon)
    witness.check()
    assert daemon.term() == 0


@pytest.mark.long("half a minute; tests/cases/test_slot.py ends every connection")
def test_connections_that_an_operator_ends_are_reopened(pipeline: NewPipeline) -> None:
    """All of the daemon's, several times, in the middle of its work."""
    line = pipeline(*TABLES, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=22):
        for times in range(1, 4):
            moves(daemon)
            line.query(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE application_name LIKE 'lockstep%%' AND datname = current_database()"
            )
            wait_until(
                lambda: daemon.metric("lockstep_reconnects_total") >= times,  # noqa: B023 - at once
                "it does not notice",
            )
        moves(daemon)
    witness.check()


@pytest.mark.slow
def test_a_daemon_paused_beyond_the_walsenders_patience_goes_on(pipeline: NewPipeline) -> None:
    """The walsender has timed out, and WAL was written meanwhile."""
    line = pipeline(*TABLES, batch=_BATCH)
    line.database.execute(f"ALTER DATABASE {line.database.name} SET wal_sender_timeout = '2s'")
    witness = Witness(line)
    daemon = line.start().wait_ready()
    with Load(line.database.dsn, seed=23):
        moves(daemon)
        daemon.freeze()
        wait_until(lambda: line.slot("active_pid") is None, "the walsender waits for ever")
        daemon.thaw()
        moves(daemon)
    witness.check()
    assert daemon.metric("lockstep_reconnects_total") >= 1


@pytest.mark.slow
@pytest.mark.majors
@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("wal_level", "replica", "wal_level"),
        ("max_replication_slots", "0", "max_replication_slots"),
    ],
)
def test_a_server_that_would_lose_the_slot_does_not_start_and_is_waited_for(
    setting: str, value: str, words: str, major: int, new_pair: NewPair
) -> None:
    """Postgres refuses a configuration without room for its slots; once restored, all goes on."""
    pair, line = new_pair(major, _USERS, standby=False)
    daemon = line.start().wait_ready()
    publish(line, 1)
    postgres = pair.primary["postgres"]
    settings = dict(postgres.state.settings)
    postgres.stop()
    with pytest.raises(LocalStackError, match=words):
        postgres.start(settings=settings | {setting: value})
    daemon.wait_state("reconnecting")
    postgres.start(settings=settings)
    daemon.wait_ready()
    publish(line, 2)
    converge(line.config)


# --- locked out, and admitted again ---


@pytest.fixture
def role(pipeline: NewPipeline, tmp_path: Path) -> Role:
    """A role that is not a superuser, whose rights a test revokes."""
    return Role(pipeline(_USERS), tmp_path)


class Role:
    """The pipeline's daemon, connected as this role; `line` connects as the superuser."""

    def __init__(self, line: PipelineUnderTest, folder: Path) -> None:
        self.line = line
        self.name = f"cdc_{line.database.name}"
        self.password_file = folder / "password"
        self.password_file.write_text("old-pw\n", "utf-8")
        line.database.execute(
            f"CREATE ROLE {self.name} LOGIN REPLICATION PASSWORD 'old-pw'",
            f"GRANT SELECT ON users TO {self.name}",
        )

    def start(self) -> Daemon:
        dsn = psycopg.conninfo.make_conninfo(self.line.database.dsn, user=self.name)
        file = self.line.write(
            "role.yaml", source__dsn=dsn, source__password_file=str(self.password_file)
        )
        return self.line.start(config_file=file)

    def end_walsender(self) -> None:
        wait_until(lambda: self.line.slot("active_pid"), "nobody streams")
        pid = self.line.slot("active_pid")
        self.line.query("SELECT pg_terminate_backend(%s)", pid)
        wait_until(lambda: self.line.slot("active_pid") != pid, "its walsender goes on")

    def drop(self) -> None:
        self.line.daemon.kill()
        self.line.database.execute(f"DROP OWNED BY {self.name}", f"DROP ROLE {self.name}")


@pytest.mark.long("half a minute; other refusals are in the first tier")
@pytest.mark.slow
def test_a_role_that_lost_replication_is_reported_and_retried_seldom(role: Role) -> None:
    """It worked before, so the right may be granted again: alert, retry seldom, go on."""
    line = role.line
    try:
        daemon = role.start().wait_ready()
        publish(line, 1)
        line.database.execute(f"ALTER ROLE {role.name} NOREPLICATION")
        role.end_walsender()
        wait_until(lambda: "REPLICATION" in daemon.log, "it does not say so")
        assert daemon.state == "reconnecting"
        assert daemon.health()["status"] == 503
        refusals = [e for e in daemon.events if e["event"] == "starting over"]
        assert refusals[-1]["level"] == "error"
        assert refusals[-1]["fields"]["in_seconds"] >= 10
        line.database.execute(
            f"ALTER ROLE {role.name} REPLICATION", "INSERT INTO users VALUES (2, 1)"
        )
        daemon.wait_state("streaming", _SLOW_SECONDS)
        wait_until(lambda: line.resume()[1].seq == 2, "the row does not arrive")
        converge(line.config)
    finally:
        role.drop()


def test_connections_that_ran_out_are_waited_for(role: Role) -> None:
    """SQLSTATE 53300, here by a role's limit; max_wal_senders and max_connections give the same."""
    line = role.line
    try:
        line.database.execute(f"ALTER ROLE {role.name} CONNECTION LIMIT 0")
        daemon = role.start()
        daemon.wait_state("reconnecting")
        wait_until(lambda: "no connection free" in daemon.log, "it does not say so")
        line.database.execute(f"ALTER ROLE {role.name} CONNECTION LIMIT -1")
        daemon.wait_ready()
        publish(line, 1)
    finally:
        role.drop()


@pytest.mark.long("half a minute; other refusals are in the first tier")
@pytest.mark.slow
def test_a_password_that_is_rotated_is_taken_up_when_its_file_is(role: Role) -> None:
    """First in the database, then in the file: in between the server refuses us."""
    line = role.line
    with line.database.connect() as connection:
        row = connection.execute("SELECT pg_read_file(f), f FROM current_setting('hba_file') f")
        rules, file = row.fetchone() or ("", "")
        try:
            ours = f"host all {role.name} 127.0.0.1/32 scram-sha-256"
            write_rules(connection, file, f"{ours}\n{rules}")
            daemon = role.start().wait_ready()
            line.database.execute(f"ALTER ROLE {role.name} PASSWORD 'new-pw'")
            role.end_walsender()
            wait_until(lambda: "password authentication failed" in daemon.log, "it gets in")
            assert daemon.state == "reconnecting"
            role.password_file.write_text("new-pw\n", "utf-8")
            daemon.wait_state("streaming", _SLOW_SECONDS)
            publish(line, 1)
            assert "-pw" not in daemon.log
        finally:
            write_rules(connection, file, rules)
            role.drop()
