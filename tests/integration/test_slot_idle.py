"""An idle pipeline pins no WAL, without a heartbeat table; and it never confirms too much."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from cdc.events import LSN
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.servers import Database, PostgresServer, fresh_database

_TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, n int)",
    "CREATE SCHEMA elsewhere",
    "CREATE TABLE elsewhere.unpublished (id int, filler text)",
    "CREATE UNLOGGED TABLE elsewhere.unlogged (id int, filler text)",
)
# An idle slot advances every ten seconds or so.
_IDLE_SECONDS = 120.0
_FILLER = "SELECT i, repeat('x', 500) FROM generate_series(1, 2000) i"


@pytest.fixture
def neighbour(postgres_server: PostgresServer) -> Iterator[Database]:
    """Another database of the server, busy at the same time."""
    with fresh_database(postgres_server.dsn) as database:
        database.execute("CREATE TABLE busy (id int, filler text)")
        yield database


def _lsn(line: PipelineUnderTest, column: str) -> LSN:
    return LSN.parse(line.slot(column))


@pytest.mark.long("the other source of WAL", sample=["another database"])
@pytest.mark.parametrize("source", ["another database", "unpublished tables"])
def test_wal_that_holds_nothing_for_us_is_let_go(
    source: str, pipeline: NewPipeline, neighbour: Database
) -> None:
    """Both of the slot's positions advance: what is confirmed and, below it, what is kept."""
    line = pipeline(*_TABLES)
    daemon = line.start().wait_ready()
    restart_lsn = _lsn(line, "restart_lsn")

    def write() -> None:
        if source == "another database":
            neighbour.execute(f"INSERT INTO busy {_FILLER}")
        else:
            line.database.execute(
                f"INSERT INTO elsewhere.unpublished {_FILLER}",
                f"INSERT INTO elsewhere.unlogged {_FILLER}",
            )
        line.database.execute("CHECKPOINT")

    write()
    target = LSN.parse(line.query("SELECT pg_current_wal_lsn()")[0])

    def followed() -> bool:
        write()
        return (
            _lsn(line, "confirmed_flush_lsn") >= target and _lsn(line, "restart_lsn") > restart_lsn
        )

    wait_until(followed, "the slot does not advance", _IDLE_SECONDS, pause=1.0)
    assert line.resume()[1].seq == 0
    assert daemon.health()["status"] == 200
    assert _lsn(line, "confirmed_flush_lsn") <= line.resume()[1].end_lsn


def test_an_idle_slot_is_confirmed_to_what_the_log_holds_and_no_open_transaction_is_lost(
    pipeline: NewPipeline,
) -> None:
    """WAL after an open transaction's rows is confirmed, the daemon killed; then that commits."""
    line = pipeline(*_TABLES)
    line.start().wait_ready()
    with psycopg.connect(line.database.dsn) as slow:
        slow.execute("INSERT INTO users VALUES (1, 1)")
        open_since = LSN.parse(line.query("SELECT pg_current_wal_insert_lsn()")[0])
        before = _lsn(line, "confirmed_flush_lsn")
        line.database.execute(f"INSERT INTO elsewhere.unpublished {_FILLER}")
        wait_until(
            lambda: _lsn(line, "confirmed_flush_lsn") > before, "it does not advance", _IDLE_SECONDS
        )
        assert _lsn(line, "restart_lsn") < open_since
        line.daemon.kill()
    # What was confirmed is in the log, or this start would find a gap.
    line.start().wait_ready()
    wait_until(lambda: line.resume()[1].seq == 1, "the row does not arrive")


def test_confirmed_never_goes_back_nor_beyond_the_log(pipeline: NewPipeline) -> None:
    line = pipeline(*_TABLES)
    line.start().wait_ready()
    seen = LSN(0)
    for number in range(30):
        line.database.execute(f"INSERT INTO users VALUES ({number}, 1)")
        # In this order: the log may advance in between, the slot may not have been ahead of it.
        confirmed = _lsn(line, "confirmed_flush_lsn")
        assert seen <= confirmed
        if number % 5 == 0:
            assert confirmed <= line.resume()[1].end_lsn
        if number == 15:
            line.daemon.kill()
            line.start().wait_ready()
        seen = confirmed
