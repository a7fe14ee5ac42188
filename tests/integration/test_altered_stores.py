"""DDL that writes no rows, from a daemon to every kind of store: at the frontier each is the table.

Cuts that only alter, cuts with rows before and after, by the small path and by executors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.operate.status import read_status
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.followed import Followed, small_cuts
from tests.fixtures.store_opensearch import OpenSearchStore
from tests.fixtures.store_sqlite import SqliteStore
from tests.integration.test_altered_tables import alter

if TYPE_CHECKING:
    import redis
    from pyspark.sql import SparkSession

TABLES: Final = (
    "CREATE TABLE t (id int PRIMARY KEY, a text, b int, body text)",
    "ALTER TABLE t ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE quiet (id int PRIMARY KEY, a text)",
)
ROWS: Final = (
    "INSERT INTO t SELECT i, 'a' || i, i, repeat('x', 3000) FROM generate_series(1, 60) i",
    "INSERT INTO quiet SELECT i, 'q' || i FROM generate_series(1, 20) i",
)
Rows = dict[int, dict[str, Any]]


class Altered(Followed):
    """A pipeline with a follower of each kind."""

    redis: redis.Redis
    search: OpenSearchStore
    file: SqliteStore
    lake: Path

    def check(self) -> None:
        """Follow to here; fail unless every store shows what the database does."""
        converge(self.config)
        self.follow("cache", "search", "copy", "mirror")
        for name in ("t", "quiet"):
            wanted = self.source(name)
            columns = next(iter(wanted.values())).keys()
            assert self.in_redis(name) == wanted, name
            assert self.in_opensearch(name) == wanted, name
            assert only(columns, self.in_sqlite(name)) == wanted, name
            assert only(columns, self.in_delta(name)) == wanted, name

    def source(self, table: str) -> Rows:
        with self.pipeline.database.connect() as connection:
            found = connection.execute(f"SELECT row_to_json(t)::text FROM {table} t").fetchall()
        return by_id([msgspec.json.decode(text) for (text,) in found])

    def in_redis(self, table: str) -> Rows:
        names = self.redis.scan_iter(f"{self.prefix}:public.{table}:*", count=5_000)
        return by_id([msgspec.json.decode(cast("bytes", self.redis.get(name))) for name in names])

    def in_opensearch(self, table: str) -> Rows:
        return by_id([hit["_source"] for hit in self.search.hits(f"public.{table}").values()])

    def in_sqlite(self, table: str) -> Rows:
        return by_id(self.file.query(f"SELECT * FROM {table}"))

    def in_delta(self, table: str) -> Rows:
        name = f"public.{table}"
        return by_id(read_as_of_arrow(str(self.lake), [name]).tables[name].to_pylist())


def by_id(rows: list[dict[str, Any]]) -> Rows:
    return {row["id"]: row for row in rows}


def only(columns: Any, rows: Rows) -> Rows:  # noqa: ANN401 - any collection
    """Return rows without our columns, and those that the source has dropped."""
    return {key: {name: row.get(name) for name in columns} for key, row in rows.items()}


@pytest.fixture
def altered(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_url: str,
    redis_client: redis.Redis,
    opensearch_store: OpenSearchStore,
    tmp_path: Path,
) -> Altered:
    search = {"url": opensearch_store.url, "prefix": opensearch_store.prefix}
    followers: dict[str, object] = {
        "cache": {"redis": {"url": redis_url}},
        "search": {"opensearch": search},
        "copy": {"sql": {"url": f"sqlite:///{tmp_path}/copy.db"}},
        "mirror": {"delta": {"path": str(tmp_path / "lake")}},
    }
    made = Altered(pipeline(*TABLES, followers=followers), spark)
    made.redis, made.search, made.lake = redis_client, opensearch_store, tmp_path / "lake"
    made.file = SqliteStore(tmp_path / "copy.db")
    made.pipeline.start().wait_ready()
    made.pipeline.database.execute(*ROWS)
    return made


@pytest.mark.long("minutes of Spark and of four stores", sample=["small"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_every_store_shows_what_ddl_without_rows_has_changed(
    altered: Altered, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    line, execute = altered.pipeline, altered.pipeline.database.execute
    altered.check()
    if size == "large":
        small_cuts(monkeypatch, 0)
    alter(line, "ALTER TABLE quiet ADD c text DEFAULT 'now', ADD n int DEFAULT 15")
    altered.check()
    # Names are exchanged, one is another column now, and rows are written before and after.
    execute(
        "UPDATE t SET b = -b WHERE id < 10",
        "ALTER TABLE t RENAME a TO z; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME z TO b",
        "UPDATE t SET a = 7 WHERE id BETWEEN 5 AND 15",
        "BEGIN; DELETE FROM t WHERE id > 55; ALTER TABLE t ADD c int DEFAULT 9;"
        " INSERT INTO t VALUES (70, 'new', 1, 'y'); COMMIT",
    )
    altered.check()
    # Which of two columns of one name a row has would not be proven, if the daemon lagged.
    alter(line, "ALTER TABLE t DROP c; ALTER TABLE t ADD c text DEFAULT 'other'")
    execute(
        "UPDATE t SET id = id + 100 WHERE id BETWEEN 20 AND 25",
        "ALTER TABLE t RENAME body TO text",
        "UPDATE t SET c = NULL WHERE id < 3",
    )
    altered.check()
    # One after the other: with a rewrite, a type that needs none may have other values.
    alter(line, "ALTER TABLE quiet ALTER id TYPE bigint")
    alter(line, "ALTER TABLE quiet ALTER a TYPE varchar, DROP c")
    alter(line, "ALTER TABLE quiet ADD c int")
    altered.check()
    assert not read_status(line.config).incomplete_topics
    assert line.daemon.term() == 0


@pytest.mark.long("minutes of Spark and of four stores")
def test_what_a_rewrite_has_changed_is_in_every_store_once_it_is_read_again(
    altered: Altered,
) -> None:
    line = altered.pipeline
    altered.check()
    alter(line, "ALTER TABLE t ADD c double precision DEFAULT random()")
    alter(line, "ALTER TABLE quiet ALTER a TYPE varchar(40) USING a || '!'")
    wait_until(lambda: len(read_status(line.config).incomplete_topics) == 2, "not incomplete")
    for name in ("public.t", "public.quiet"):
        wanted = ["snapshot", name, "--replace", "--wait", "-c", str(line.config_file)]
        assert run(wanted) == Exit.OK
    altered.check()
    assert not read_status(line.config).incomplete_topics
    assert line.daemon.term() == 0
