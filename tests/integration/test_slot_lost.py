"""A lost slot is refused with the reason; a slot that will be lost is warned about before."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from cdc.cli.main import main
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.standby import NewPair, Pair, majors

_USERS = "CREATE TABLE users (id int PRIMARY KEY, n int)"
_CONFIG = 78
_ONE_MB = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "64MB"}
_FILLER = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000))"

pytestmark = [pytest.mark.slow, pytest.mark.majors]


def stopped(line: PipelineUnderTest) -> PipelineUnderTest:
    """Publish a row, and stop the daemon."""
    daemon = line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 1)")
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")
    assert daemon.term() == 0
    return line


Status = Callable[[PipelineUnderTest], tuple[int, dict[str, Any]]]


@pytest.fixture
def status(capfd: pytest.CaptureFixture[str]) -> Status:
    """Run `cdc status --json`; return its exit code and its output."""

    def ask(line: PipelineUnderTest) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["status", "--json", "-c", str(line.config_file)])
        code = ended.value.code
        return code if isinstance(code, int) else 0, json.loads(capfd.readouterr().out)

    return ask


@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_a_slot_that_kept_too_much_is_warned_of_before_and_refused_after(
    major: int, new_pair: NewPair, status: Status
) -> None:
    _, line = new_pair(major, _USERS, standby=False, settings=_ONE_MB)
    stopped(line)
    line.database.execute(_FILLER)
    code, reported = status(line)
    assert code == 1  # no daemon reads from it
    assert any("is lost after" in each for each in reported["warnings"])
    for _ in range(3):
        line.database.execute(*[_FILLER] * 20, "CHECKPOINT")
    assert line.slot("wal_status") == "lost"
    line.refused(_CONFIG, "was invalidated", "cdc teardown --topics")
    code, reported = status(line)
    assert (code, reported["ok"]) == (_CONFIG, False)


@pytest.mark.parametrize("major", majors(18))
def test_a_slot_that_nobody_read_for_too_long_is_warned_of_before_and_refused_after(
    major: int, new_pair: NewPair, status: Status
) -> None:
    pair, line = new_pair(major, _USERS, standby=False)
    stopped(line)
    pair.set(idle_replication_slot_timeout="600s")
    warnings = status(line)[1]["warnings"]
    assert any(re.search(r"is invalidated in (9|10) min", each) for each in warnings)
    pair.set(idle_replication_slot_timeout="1s")

    def timed_out() -> bool:
        line.database.execute("CHECKPOINT")
        return bool(line.slot("invalidation_reason") == "idle_timeout")

    wait_until(timed_out, "it is not invalidated", pause=0.5)
    line.refused(_CONFIG, "no daemon read from it for longer than idle_replication_slot_timeout")


@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_a_renamed_database_is_refused_by_name_and_taken_when_named_back(
    major: int, new_pair: NewPair
) -> None:
    pair, line = new_pair(major, _USERS, standby=False)
    stopped(line)
    rename(pair, "shop", "store")
    line.refused(_CONFIG, 'database "shop" does not exist', "renamed")
    dsn = psycopg.conninfo.make_conninfo(line.database.dsn, dbname="store")
    there = line.write("there.yaml", source__dsn=dsn)
    line.refused(_CONFIG, "from database shop, this is store; it was renamed", config_file=there)
    rename(pair, "store", "shop")
    line.start().wait_ready()


def rename(pair: Pair, old: str, new: str) -> None:
    with psycopg.connect(pair.primary_dsn, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {old} RENAME TO {new}".encode())


@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_a_dump_restored_into_another_cluster_is_refused(major: int, new_pair: NewPair) -> None:
    """As after pg_upgrade: same names, same rows, and a slot and publication recreated there."""
    pair, line = new_pair(major, _USERS, standby=False)
    stopped(line)
    pair.primary.down()
    shutil.rmtree(pair.primary.home.data / f"postgres-{major}")
    pair.primary.start("postgres")
    make_database(pair)
    line.database.execute(
        _USERS,
        f"CREATE PUBLICATION {line.config.publication} FOR TABLE users",
        f"SELECT pg_create_logical_replication_slot('{line.config.slot}', 'pgoutput')",
    )
    line.refused(_CONFIG, line.resume()[0].system_identifier, "another cluster", "pg_upgrade")


def make_database(pair: Pair) -> None:
    with psycopg.connect(pair.primary_dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE shop")
