"""Initial snapshots on servers of their own: a standby, two endpoints, little room for WAL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from cdc.errors import ConfigError, Exit
from cdc.source.connection import connect
from cdc.source.export import Export, config_for_rows
from tests.fixtures.converge import converge
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.servers import PG_MAJOR, Database, KafkaServer, matches
from tests.fixtures.standby import DATABASE, Pair

_SECONDS = 120.0


NewLine = Callable[..., tuple[Pair, PipelineUnderTest]]


@pytest.fixture
def new_line(kafka_server: KafkaServer, topic_prefix: str, tmp_path: Path) -> Iterator[NewLine]:
    """Make a server and a pipeline of it that starts with a snapshot."""
    with ExitStack() as open_things:

        def new(
            *tables: str, standby: bool = False, settings: dict[str, str] | None = None,
            **snapshot: object,
        ) -> tuple[Pair, PipelineUnderTest]:  # fmt: skip
            pair = Pair(tmp_path, PG_MAJOR, settings or {})
            open_things.callback(pair.close)
            with psycopg.connect(pair.primary_dsn, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {DATABASE}".encode())
            dsn = psycopg.conninfo.make_conninfo(pair.primary_dsn, dbname=DATABASE)
            database = Database(dsn, DATABASE)
            database.execute(*tables)
            if standby:
                pair.add_standby(DATABASE)
                there = psycopg.conninfo.make_conninfo(pair.standby_dsn, dbname=DATABASE)
                snapshot["dsn"] = there
            line = PipelineUnderTest(
                database,
                kafka_server.bootstrap,
                topic_prefix,
                tmp_path,
                source={"tables": ["public.*"]},
                snapshot={
                    "mode": "initial",
                    "runner": "local",
                    "range_bytes": 65_536,
                    **snapshot,
                },
            )
            open_things.callback(line.close)
            return pair, line.set_up()

        yield new


def test_rows_come_from_the_standby_and_changes_from_the_primary(new_line: NewLine) -> None:
    if not matches(">= 16", PG_MAJOR):
        pytest.skip(f"standbys make logical slots from 16 on; this is {PG_MAJOR}")
    pair, line = new_line(
        *TABLES,
        "INSERT INTO users SELECT i, 0, 'old', NULL FROM generate_series(100, 3000) i",
        standby=True,
    )
    with Load(line.database.dsn, seed=2, truncates=0) as load:
        line.start().wait_ready(_SECONDS)
        before = load.commits
        wait_until(lambda: load.commits > before + 20, "nothing is written")
    converge(line.config)
    _one_server_is_asked_for(pair, line)


@pytest.mark.long("needs a standby; the path with one is in the first tier")
def test_a_slot_that_nears_its_limit_ends_the_snapshot_and_is_kept(new_line: NewLine) -> None:
    """The snapshot stops before Postgres invalidates the slot."""
    _, line = new_line(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i",
        settings={"max_slot_wal_keep_size": "64MB"},
        rows_per_second=300,
    )
    daemon = line.start()
    wait_until(
        lambda: (daemon.health().get("snapshot") or {}).get("rows", 0) > 200, "no rows", _SECONDS
    )
    line.database.execute(
        "CREATE TABLE filler (v text)",
        "INSERT INTO filler SELECT repeat('y', 1000) FROM generate_series(1, 74000)",
    )
    line.ends(daemon, Exit.CONFIG, "nears max_slot_wal_keep_size", seconds=_SECONDS)


def _one_server_is_asked_for(pair: Pair, line: PipelineUnderTest) -> None:
    """A second connection that reaches another server is reported in words."""
    other = psycopg.conninfo.make_conninfo(pair.primary_dsn, dbname=DATABASE)
    export = Export(line.config)
    try:
        with connect(config_for_rows(line.config)) as same:
            export.check_same_server(same)
        with (
            psycopg.connect(other, autocommit=True) as primary,
            pytest.raises(ConfigError, match="came to two servers"),
        ):
            export.check_same_server(primary)
    finally:
        export.close()
    assert line.daemons[-1].term() == Exit.OK
