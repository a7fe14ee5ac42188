"""No environment, role or hook changes how values are written: every session's settings are pinned.

libpq sends PGTZ and PGDATESTYLE after the settings in `options`, so that they win over those. A
value that is nine hours wrong and marked `Z` is silent, in the snapshot and in the stream alike.
"""

from __future__ import annotations

from contextlib import closing

import orjson
import psycopg
import pytest

from cdc.errors import ConfigError
from cdc.source.connection import SESSION, connect, expect_pinned
from lockstep.jobs.copying import adbc
from tests.fixtures.daemon import Daemon, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.servers import Database
from tests.fixtures.witness import records_of

_HOSTILE = {
    "PGTZ": "Asia/Tokyo",
    "PGDATESTYLE": "German, DMY",
    "PGCLIENTENCODING": "LATIN1",
    "PGOPTIONS": "-c extra_float_digits=-15 -c bytea_output=escape -c IntervalStyle=iso_8601",
}
_ROLE = (
    "TimeZone = 'America/New_York'",
    "DateStyle = 'SQL, DMY'",
    "IntervalStyle = 'sql_standard'",
    "bytea_output = 'escape'",
    "extra_float_digits = -15",
    "search_path = 'elsewhere'",
    "standard_conforming_strings = off",
    "quote_all_identifiers = on",
    "idle_session_timeout = '1s'",
    "idle_in_transaction_session_timeout = '1s'",
    "lock_timeout = '1s'",
)
_TIMEOUTS = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "transaction_timeout",
)
_TABLE = (
    "CREATE TABLE users (id int PRIMARY KEY, at timestamptz, t timetz, d date, i interval,"
    " f float8, b bytea, n text, r tstzrange)"
)
_ROW = (
    "(%s, '2026-03-29 01:30:00+00', '01:30:00+00', '2026-03-02', '1 day 02:03:04',"
    " 0.1::float8 + 0.2::float8, '\\xff00', U&'Zo\\00EB',"
    " '[2026-03-29 01:30:00+00,2026-03-29 02:30:00+00)')"
)
_VALUES = {
    "at": "2026-03-29T01:30:00Z",
    "f": 0.30000000000000004,
    "b": "/wA=",
    "n": "Zoë",
    "r": '["2026-03-29 01:30:00+00","2026-03-29 02:30:00+00")',
}


def rows(line: PipelineUnderTest) -> list[dict[str, object]]:
    found = records_of(line, line.is_data)
    return [orjson.loads(each.value)["after"] for each in found if each.value is not None]


def start(line: PipelineUnderTest, **env: str) -> Daemon:
    log = line.config_file.parent / "hostile.log"
    line.daemons.append(Daemon(line.config_file, log, **env))
    return line.daemon.wait_ready()


def insert(line: PipelineUnderTest, key: int) -> None:
    line.database.execute(f"INSERT INTO users VALUES {_ROW % key}")


@pytest.mark.long("the other place", sample=["role"])
@pytest.mark.parametrize("where", ["environment", "role"])
def test_hostile_settings_reach_neither_the_snapshot_nor_the_stream(
    where: str, pipeline: NewPipeline
) -> None:
    line = pipeline(_TABLE, snapshot={"mode": "initial"})
    insert(line, 1)
    if where == "role":
        name = line.database.name
        line.database.execute(
            *(f'ALTER ROLE CURRENT_USER IN DATABASE "{name}" SET {each}' for each in _ROLE)
        )
    start(line, **(_HOSTILE if where == "environment" else {}))
    # The writing session has hostile settings too if the role does: it resets two for its literals.
    with psycopg.connect(line.database.dsn, autocommit=True) as connection:
        connection.execute(b"SET standard_conforming_strings = on; SET search_path = public")
        connection.execute(f"INSERT INTO users VALUES {_ROW % 2}".encode())
    wait_until(lambda: len(rows(line)) == 2, "the rows do not arrive")
    copied, streamed = rows(line)
    assert {**copied, "id": 0} == {**streamed, "id": 0}
    assert {name: copied[name] for name in _VALUES} == _VALUES


@pytest.mark.pg(">= 17")
def test_a_hook_that_changes_sessions_as_they_begin_is_overruled(pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE)
    line.database.execute(
        "CREATE FUNCTION tokyo() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM set_config('TimeZone', 'Asia/Tokyo', false); END$$",
        "CREATE EVENT TRIGGER tokyo ON login EXECUTE FUNCTION tokyo()",
        "ALTER EVENT TRIGGER tokyo ENABLE ALWAYS",
    )
    with connect(line.config) as connection:
        assert connection.execute("SHOW TimeZone").fetchone() == ("UTC",)


@pytest.mark.parametrize("replication", [False, True])
def test_every_connection_has_the_pinned_settings(
    *, replication: bool, pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = pipeline(_TABLE)
    for name, value in _HOSTILE.items():
        monkeypatch.setenv(name, value)
    with connect(line.config, replication=replication) as connection:
        found = {}
        for name in SESSION:
            row = connection.execute(f"SHOW {name}".encode()).fetchone()
            assert row is not None
            found[name] = row[0]
    assert found == SESSION


@pytest.mark.parametrize("replication", [False, True])
def test_no_timeout_of_the_role_ends_a_session(*, replication: bool, pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE)
    name = line.database.name
    known = f"SELECT array_agg(name) FROM pg_settings WHERE name IN {_TIMEOUTS}"
    timeouts = line.query(known)[0]
    assert len(timeouts) == (5 if line.query("SHOW server_version_num")[0] >= "170000" else 4)
    line.database.execute(
        *(f"ALTER ROLE CURRENT_USER IN DATABASE \"{name}\" SET {each} = '1s'" for each in timeouts)
    )
    with connect(line.config, replication=replication) as connection:
        for each in timeouts:
            assert connection.execute(f"SHOW {each}".encode()).fetchone() == ("0",), each
        connection.execute("BEGIN")
        connection.execute("SELECT pg_sleep(1.2)")
        connection.execute("COMMIT")


def test_rows_that_adbc_reads_are_written_by_the_pinned_settings(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _HOSTILE.items():
        monkeypatch.setenv(name, value)
    with database.connect() as exporting:
        exporting.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        row = exporting.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        with closing(adbc.Reading(database.dsn)) as reading:
            (batch,) = reading.batches(
                "SELECT '2026-03-29 01:30:00+00'::timestamptz::text AS at", str(row[0])
            )
        assert batch.column(0).to_pylist() == ["2026-03-29 01:30:00+00"]


def test_a_setting_that_does_not_hold_is_named() -> None:
    answer = {**SESSION, "TimeZone": "Asia/Tokyo"}
    with pytest.raises(ConfigError, match="TimeZone is 'Asia/Tokyo'"):
        expect_pinned(tuple(answer.values()))
