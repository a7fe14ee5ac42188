"""Two-phase commit: a prepared transaction is in the log once it is decided, and as it was decided.

Also where the daemon or Postgres dies between PREPARE and the decision.
"""

from __future__ import annotations

import psycopg
import pytest

from cdc.cli.main import main
from tests.fixtures.converge import converge
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.standby import NewPair, Pair, majors

_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"
_SETTINGS = {"max_prepared_transactions": "10"}
_CONFIG = 78

pytestmark = [pytest.mark.slow, pytest.mark.majors]


def prepare(line: PipelineUnderTest, gid: str, key: int) -> None:
    with psycopg.connect(line.database.dsn) as connection:
        connection.execute("INSERT INTO users VALUES (%s, 1)", [key])
        connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())


def kill_both(pair: Pair, line: PipelineUnderTest) -> None:
    """Kill daemon and Postgres, and start both again."""
    line.daemon.kill()
    pair.primary["postgres"].kill()
    pair.primary.start("postgres")
    line.start().wait_ready()


@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_prepared_it_is_published_once_when_committed_and_never_when_rolled_back(
    major: int, new_pair: NewPair
) -> None:
    pair, line = new_pair(major, _USERS, standby=False, settings=_SETTINGS)
    line.start().wait_ready()
    for gid, key in (("kept", 1), ("dropped", 2), ("kept too", 3)):
        prepare(line, gid, key)
    line.database.execute("INSERT INTO users VALUES (4, 1)")
    wait_until(lambda: line.resume()[1].seq == 1, "what was not prepared does not arrive")
    # The confirmed position is after all three PREPAREs.
    kill_both(pair, line)
    line.database.execute("COMMIT PREPARED 'kept'", "ROLLBACK PREPARED 'dropped'")
    wait_until(lambda: line.resume()[1].seq == 2, "the decided one does not arrive")
    kill_both(pair, line)
    # The daemon is down at the decision.
    line.daemon.kill()
    line.database.execute("COMMIT PREPARED 'kept too'", "INSERT INTO users VALUES (5, 1)")
    daemon = line.start().wait_ready()
    wait_until(lambda: line.resume()[1].seq == 4, "the rest does not arrive")
    assert converge(line.config).events == 4
    assert line.query("SELECT array_agg(id ORDER BY id) FROM users")[0] == [1, 3, 4, 5]
    assert daemon.term() == 0


@pytest.mark.parametrize("major", majors(18))
def test_a_slot_that_decodes_them_early_is_refused_until_it_is_altered(
    major: int, new_pair: NewPair
) -> None:
    _, line = new_pair(major, _USERS, standby=False, settings=_SETTINGS)
    alter(line, "TWO_PHASE true")
    prepare(line, "undecided", 1)
    line.refused(_CONFIG, "decodes prepared transactions before they are decided", "cdc slot alter")
    line.database.execute("ROLLBACK PREPARED 'undecided'")
    assert run("slot", "alter", "--no-two-phase", "-c", str(line.config_file)) == 0
    assert not line.slot("two_phase")
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (2, 1)")
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")
    assert converge(line.config).events == 1


@pytest.mark.parametrize("major", majors(15, 16, 17))
def test_a_slot_that_decodes_them_early_is_not_taken_over(
    major: int, new_pair: NewPair, capfd: pytest.CaptureFixture[str]
) -> None:
    _, line = new_pair(major, _USERS, standby=False, settings=_SETTINGS)
    line.query("SELECT pg_create_logical_replication_slot('early', 'pgoutput', false, true)::text")
    file = line.write("early.yaml", pipeline="early", source__slot="early", log__prefix="early")
    assert run("setup", "--adopt-slot", "-c", str(file)) == _CONFIG
    assert "decodes prepared transactions before they are decided" in capfd.readouterr().err


def run(*arguments: str) -> int:
    """Run a command; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    code = ended.value.code
    return code if isinstance(code, int) else 0


def alter(line: PipelineUnderTest, option: str) -> None:
    dsn = psycopg.conninfo.make_conninfo(line.database.dsn, replication="database")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'ALTER_REPLICATION_SLOT "{line.config.slot}" ({option})'.encode())
