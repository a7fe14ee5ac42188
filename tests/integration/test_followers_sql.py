"""Followers in databases, from Postgres through the log: equal to the source, and rebuilt."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from cdc.cli.main import run as cdc
from cdc.errors import ConfigError
from lockstep.jobs.apply import stores
from lockstep.jobs.generations.builders import LogBuilder, switching
from lockstep.jobs.generations.in_place import InPlace
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.followed import Followed
from tests.fixtures.servers import Database, PostgresServer, fresh_database
from tests.fixtures.store_postgres import url_of
from tests.fixtures.store_sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, since timestamptz, body text)",
    "CREATE TABLE orders (id int PRIMARY KEY, user_id int REFERENCES users, price numeric(9,2))",
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
)
WRITES = (
    "INSERT INTO users SELECT n, 'n' || n, '2026-01-02', 'x' FROM generate_series(1, 40) n",
    "UPDATE users SET body = repeat('x', 3000)",
    "INSERT INTO orders SELECT n, 1 + n % 40, n / 3.0 FROM generate_series(1, 90) n",
    "UPDATE users SET name = name || 'u' WHERE id % 3 = 0",
    "UPDATE orders SET id = id + 1000 WHERE id % 4 = 0",
    "ALTER TABLE orders ADD note text",
    "DELETE FROM orders WHERE id % 5 = 0",
    "INSERT INTO orders VALUES (7000, 7, 'NaN', 'new')",
)
USERS = "SELECT id, name, since::text, body FROM users ORDER BY id"
ORDERS = "SELECT id, user_id, price::text, note FROM orders ORDER BY id"


class Copies(Followed):
    """A source with copies in Postgres and SQLite."""

    copy: Database
    file: SqliteStore

    def check(self) -> None:
        """Fail unless both copies equal the source."""
        for query in (USERS, ORDERS):
            with self.pipeline.database.connect() as connection:
                connection.execute("SET TimeZone = 'UTC'")
                wanted = connection.execute(query.encode()).fetchall()
            with self.copy.connect() as connection:
                connection.execute("SET TimeZone = 'UTC'")
                assert connection.execute(query.encode()).fetchall() == wanted
            rows = self.file.query(query.replace("::text", ""))
            assert [tuple(row.values()) for row in rows] == wanted

    def rebuild(self, name: str) -> InPlace:
        config = self.config
        output = list[str]()
        builder = LogBuilder(config, name, lambda: self.spark, output.append)
        sink = stores.sink(config, name, config.followers[name])
        return InPlace(sink, builder, lambda *given: switching(config, name, *given), 1)


@pytest.fixture
def copies(
    pipeline: NewPipeline, spark: SparkSession, postgres_server: PostgresServer, tmp_path: Path
) -> Iterator[Copies]:
    with fresh_database(postgres_server.dsn) as copy:
        file = SqliteStore(tmp_path / "copy.db")
        followers: dict[str, object] = {
            "copy": {"sql": {"url": url_of(copy)}},
            "file": {"sql": {"url": f"sqlite:///{file.path}"}},
        }
        made = Copies(pipeline(*TABLES, followers=followers), spark)
        made.copy, made.file = copy, file
        made.pipeline.start().wait_ready()
        made.pipeline.database.execute(*WRITES)
        made.follow("copy", "file")
        yield made


def test_copies_equal_the_source_and_foreign_keys_can_be_added(copies: Copies) -> None:
    copies.check()
    copies.copy.execute(
        "ALTER TABLE orders ADD FOREIGN KEY (user_id) REFERENCES users"
        " DEFERRABLE INITIALLY DEFERRED"
    )
    copies.pipeline.database.execute(
        "BEGIN; INSERT INTO users VALUES (100, 'new'); INSERT INTO orders VALUES (8000, 100, 1);"
        " DELETE FROM orders WHERE user_id = 3; DELETE FROM users WHERE id = 3; COMMIT",
        "TRUNCATE users, orders",
        "INSERT INTO users VALUES (1, 'again')",
        "INSERT INTO orders VALUES (1, 1, 2.50)",
    )
    copies.follow("copy", "file")
    copies.check()


@pytest.mark.long("two minutes of Spark")
def test_a_copy_is_rebuilt_in_place_also_without_the_logs_beginning(copies: Copies) -> None:
    """Rows that the log lost are read again before the store is emptied."""
    copies.copy.execute("DELETE FROM orders WHERE id < 20", "UPDATE users SET name = 'wrong'")
    with pytest.raises(ConfigError, match="several generations"):
        copies.rebuild("copy").run(frozenset({"public.users"}))
    assert copies.rebuild("copy").run().generation == 2
    copies.check()
    with closing(stores.sink(copies.config, "copy", copies.config.followers["copy"])) as sink:
        state = sink.open()
    assert state is not None
    copies.pipeline.daemon.term()
    topic = f"{copies.prefix}.public.users"
    admin = AdminClient({"bootstrap.servers": copies.pipeline.bootstrap})
    lost = [TopicPartition(topic, n, end) for n, end in enumerate(state.applied.ends[topic])]
    for done in admin.delete_records(lost).values():
        done.result(timeout=120)
    assert cdc(["topics", "acknowledge", "--yes", "-c", str(copies.pipeline.config_file)]) == 0
    copies.copy.execute("UPDATE users SET name = 'wrong'")
    copies.pipeline.database.execute("DELETE FROM orders WHERE id % 2 = 0")
    copies.pipeline.start().wait_ready()
    assert copies.rebuild("copy").run().generation == 3
    copies.follow("copy", "file")
    copies.check()
