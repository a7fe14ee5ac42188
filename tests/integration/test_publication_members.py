"""Which tables a publication sends, from the catalogs: what Postgres' own function returns."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cdc.cli.main import run
from cdc.playground.servers.stack import LocalStack
from cdc.source.lookups import look_up
from cdc.source.members import members_clause, read_members, read_sizes
from cdc.source.publications import read_publication
from cdc.source.tables import read_partitions
from cdc.source.volumes import volumes
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.servers import POSTGRES_SETTINGS
from tests.fixtures.standby import majors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.servers import Database

_TABLES = """
CREATE SCHEMA a;
CREATE SCHEMA b;
CREATE TABLE plain (id int PRIMARY KEY);
CREATE TABLE a.plain (id int PRIMARY KEY, v text);
CREATE UNLOGGED TABLE a.unlogged (id int PRIMARY KEY);
CREATE VIEW a.seen AS SELECT 1 AS id;
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (more int) INHERITS (parent);
CREATE TABLE tree (id int, at int, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE tree_1 PARTITION OF tree FOR VALUES FROM (0) TO (10);
CREATE TABLE a.tree_2 PARTITION OF tree FOR VALUES FROM (10) TO (20) PARTITION BY LIST (id);
CREATE TABLE b.tree_2_1 PARTITION OF a.tree_2 FOR VALUES IN (1);
CREATE TABLE a.tree_2_2 PARTITION OF a.tree_2 DEFAULT;
CREATE TABLE b.other (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE other_1 PARTITION OF b.other FOR VALUES FROM (0) TO (10);
CREATE TABLE a.empty (id int PRIMARY KEY) PARTITION BY RANGE (id);
"""
_NAMED = (
    "TABLE plain, a.plain",
    "TABLE tree",
    "TABLE tree, tree_1",
    "TABLE tree, b.tree_2_1",
    "TABLE a.tree_2",
    "TABLE a.tree_2, tree_1, b.tree_2_1",
    "TABLE b.tree_2_1, a.tree_2_2",
    "TABLE parent",
    "TABLE ONLY parent",
    "TABLE a.empty, plain",
)
_WITH_SCHEMAS = (
    "TABLES IN SCHEMA a",
    "TABLES IN SCHEMA b",
    "TABLES IN SCHEMA a, b",
    "TABLES IN SCHEMA a, TABLE tree",
    "TABLES IN SCHEMA b, TABLE a.tree_2, tree_1",
    "TABLES IN SCHEMA public",
    "TABLE plain WHERE (id > 5), a.plain (id)",
)


@pytest.fixture(scope="module", params=majors(14, 15, 16, 17, 18))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    stack = LocalStack(tmp_path_factory.mktemp("members"), tied=True)
    try:
        ends = stack.up(
            ["postgres"], pg_major=request.param, settings={"postgres": POSTGRES_SETTINGS}
        )
        assert ends.postgres_dsn is not None
        with psycopg.connect(ends.postgres_dsn, autocommit=True) as connection:
            connection.execute(_TABLES.encode())
        yield ends.postgres_dsn
    finally:
        stack.down()


def both(connection: psycopg.Connection[Any], name: str) -> tuple[list[int], list[int]]:
    """Return the members by our query, and by Postgres' function."""
    query = (
        members_clause(connection.info.server_version)
        + "SELECT relid::bigint FROM lockstep_members"
    )
    ours = connection.execute(query.encode(), {"publication": name}).fetchall()
    theirs = connection.execute(
        "SELECT relid::bigint FROM pg_get_publication_tables(%s)", (name,)
    ).fetchall()
    # Postgres 14 returns a partition twice if it is named along with its root.
    return sorted(chain(*ours)), sorted(set(chain(*theirs)))


@pytest.mark.majors
def test_members_are_what_postgres_own_function_returns(server: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        cases = ["ALL TABLES", *_NAMED]
        if connection.info.server_version >= 150_000:
            cases += _WITH_SCHEMAS
        compared = 0
        for case in cases:
            for via_root in ("true", "false"):
                options = f"publish_via_partition_root = {via_root}"
                connection.execute(f"CREATE PUBLICATION p FOR {case} WITH ({options})".encode())
                ours, theirs = both(connection, "p")
                assert ours == theirs, f"{case}, via root {via_root}"
                compared += len(ours)
                connection.execute("DROP PUBLICATION p")
        assert compared > 3 * len(cases)


@pytest.mark.pg(">= 15")
def test_an_exclusively_locked_table_keeps_nobody_from_reading_the_publication(
    database: Database,
) -> None:
    """VACUUM FULL and a long ALTER TABLE hold such a lock; Postgres' own function waits for it."""
    database.execute(
        "CREATE TABLE busy (id int PRIMARY KEY)",
        "CREATE TABLE free (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE busy WHERE (id > 0), free",
    )
    with database.connect() as holder, database.connect() as reader, holder.transaction():
        holder.execute("LOCK TABLE busy IN ACCESS EXCLUSIVE MODE")
        reader.execute("SET lock_timeout = '30s'")
        found = read_publication(reader, "p")
        assert found is not None
        assert [each.table for each in found.published.values()] == ["busy", "free"]
        filters = {each.table: each.row_filter for each in found.entries.values()}
        assert filters["busy"]
        assert filters["free"] is None
        assert [each.table for each in read_members(reader, "p")] == ["busy", "free"]


@pytest.mark.pg(">= 15")
def test_a_daemon_starts_and_streams_while_a_table_is_locked_exclusively(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its row filter, or that of a table in the backlog, would have to be read."""
    line = pipeline(
        "CREATE TABLE busy (id int PRIMARY KEY)",
        "CREATE TABLE free (id int PRIMARY KEY)",
        tables={"public.busy": {"where": "id > 0"}},
    )
    line.start().wait_ready()
    line.database.execute("INSERT INTO busy VALUES (1)", "INSERT INTO free VALUES (1)")
    wait_until(lambda: line.resume()[1].seq == 2, "the rows do not arrive")
    line.daemon.term()
    line.database.execute("INSERT INTO busy VALUES (2)")
    with line.database.connect() as holder, holder.transaction():
        holder.execute("LOCK TABLE busy IN ACCESS EXCLUSIVE MODE")
        line.start().wait_ready()
        wait_until(lambda: line.resume()[1].seq == 3, "its row in the backlog does not arrive")
        line.database.execute("INSERT INTO free VALUES (2)")
        wait_until(lambda: line.resume()[1].seq == 4, "a lock of another table holds it back")
        for command in ("status", "doctor"):
            run([command, "-c", str(line.config_file)])
            assert "lock" not in capsys.readouterr().err
        line.daemon.kill()
        line.start().wait_ready()
    line.database.execute("INSERT INTO busy VALUES (3)")
    wait_until(lambda: line.resume()[1].seq == 5, "the table does not go on")


def test_partitions_are_read_without_a_lock_that_others_wait_for(database: Database) -> None:
    """A DROP of a partition locks it, and then the default one: it must not meet ours there."""
    database.execute(
        "CREATE TABLE tree (id int, at int, PRIMARY KEY (id, at)) PARTITION BY LIST (at)",
        "CREATE TABLE tree_else PARTITION OF tree DEFAULT",
        "CREATE TABLE tree_1 PARTITION OF tree FOR VALUES IN (1)",
        "CREATE TABLE plain (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)",
    )
    with database.connect() as holder, database.connect() as reader:
        oids = [
            number
            for (number,) in reader.execute(
                "SELECT oid::bigint FROM pg_class WHERE relname IN ('tree', 'plain')"
            )
        ]
        for session in (reader, holder):
            session.execute("SET lock_timeout = '2s'")
        with reader.transaction():
            sizes = read_sizes(reader, oids)
            copied = {str(each) for each in volumes(reader, oids)}
            with holder.transaction(force_rollback=True):
                holder.execute("DROP TABLE tree_1")  # also: nothing that was read keeps a lock
                partitions = [each.name for each in read_partitions(reader, oids)]
                found = look_up(reader, "p", oids)
    assert set(sizes) == set(oids)
    assert copied == {"public.plain", "public.tree_1", "public.tree_else"}
    assert partitions == ["tree_1", "tree_else"]
    stored = [each.facts.stored for each in found.values()]
    assert all(each is not None and each.storage for each in stored)
