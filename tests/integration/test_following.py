"""Followers on a real log and in a real Spark session: each kind of cut, and gaps."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from cdc.errors import ConfigError, Exit
from cdc.events import LSN
from cdc.log.follower_reports import read
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.apply import large, stores
from lockstep.jobs.apply.following import Following
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.cuts import pieces
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Sink
from tests.fixtures import followed
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import LONG, Followed, small_cuts, starting

if TYPE_CHECKING:
    import redis
    from pyspark.sql import SparkSession

TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, body text)",
    "CREATE TABLE lines (no int, id int, name text, PRIMARY KEY (no, id))",
    "CREATE TABLE clicks (id int, name text)",
    "ALTER TABLE clicks REPLICA IDENTITY FULL",
    # So that Postgres does not send an unchanged long value again.
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
)
Rows = dict[bytes, dict[str, Any]]


def running(
    spark: SparkSession, pipeline: PipelineUnderTest, **sinks: Sink
) -> AbstractContextManager[dict[str, FollowerRun]]:
    """Run followers of these names in the session until the block ends."""
    config = pipeline.config
    return followed.alongside(
        {
            name: FollowerRun(
                config, name, "redis", Following(starting(spark, name), config, name, sink)
            )
            for name, sink in sinks.items()
        }
    )


def reach(pipeline: PipelineUnderTest, *runs: FollowerRun) -> None:
    """Wait until the followers have applied everything that was committed."""
    with pipeline.database.connect() as connection:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row is not None
        connection.execute("SELECT pg_logical_emit_message(true, 'test', 'reach')")
        connection.commit()
    followed.reach(LSN.parse(row[0]), runs)


def table(pipeline: PipelineUnderTest, name: str, *key: str) -> Rows:
    """Return a table's rows as the log has them."""
    with pipeline.database.connect() as connection:
        found = connection.execute(f"SELECT row_to_json(t)::text FROM {name} t").fetchall()
    rows = [msgspec.json.decode(text) for (text,) in found]
    if not key:
        return {b"%d" % at: row for at, row in enumerate(sorted(rows, key=str))}
    return {msgspec.json.encode({each: row[each] for each in key}): row for row in rows}


def in_redis(client: redis.Redis, prefix: str, name: str, *key: str) -> Rows:
    found = {}
    for at in client.scan_iter(f"{prefix}:{name}:*"):
        value = client.get(at)
        assert isinstance(value, bytes)
        row = msgspec.json.decode(value)
        found[msgspec.json.encode({each: row[each] for each in key})] = row
    return found


# A large cut without special cases, then cuts with everything that one partition can't decide.
_WRITES = (
    (
        "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) FROM generate_series(1, 300) g",
        "INSERT INTO lines SELECT g % 7, g, 'n' || g FROM generate_series(1, 200) g",
    ),
    (
        "UPDATE users SET name = name || 'u' WHERE id % 3 = 0",
        "UPDATE users SET id = id + 1000 WHERE id % 2 = 0",
        "INSERT INTO clicks SELECT g, 'c' FROM generate_series(1, 90) g",
        "DELETE FROM clicks WHERE id % 2 = 0",
    ),
    (
        "DELETE FROM users WHERE id < 10",
        "INSERT INTO users VALUES (1, 'again', NULL), (2, 'large', repeat('y', 200000))",
        "UPDATE users SET name = 'moved', id = 3 WHERE id = 2",
        "UPDATE lines SET no = no + 1 WHERE id = 5",
    ),
    (
        # One large transaction: three of its rows are too large for their topic.
        "INSERT INTO users SELECT -g, 'x', repeat('z', 200000 / g) FROM generate_series(1, 60) g",
    ),
)


def in_delta(path: str, name: str, columns: Iterable[str]) -> list[str]:
    """Return a mirror's rows; none for a table without a mirror yet."""
    if not Path(path, name).exists():
        return []
    read = read_as_of_arrow(path, [name]).tables[name].select(list(columns)).to_pylist()
    return sorted(map(str, read))


def compare(made: PipelineUnderTest, client: redis.Redis, lake: str) -> None:
    """Compare the followers' stores with the database."""
    prefix = made.config.prefix
    for name, key in (("users", ("id",)), ("lines", ("no", "id"))):
        wanted = table(made, name, *key)
        assert STORES[prefix].rows(f"public.{name}") == wanted
        assert in_redis(client, prefix, f"public.{name}", *key) == wanted
        columns = next(iter(wanted.values()))
        assert in_delta(lake, f"public.{name}", columns) == sorted(map(str, wanted.values()))
    clicks = STORES[prefix].tables.get("public.clicks")
    found = sorted(clicks.keyless if clicks else [], key=str)
    assert found == list(table(made, "clicks").values())
    assert in_delta(lake, "public.clicks", ("id", "name")) == sorted(map(str, found))


@pytest.mark.commit("every kind of cut in every store")
@pytest.mark.slow
def test_every_kind_of_cut_ends_in_the_databases_state(
    spark: SparkSession,
    pipeline: NewPipeline,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small ones, and large ones by tasks, by the driver and in order; three followers at once."""
    small_cuts(monkeypatch, 40)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 25)
    monkeypatch.setattr(large, "SORTED_BYTES", 4_000)
    keyed = ["public.users", "public.lines"]
    made = pipeline(
        *TABLES,
        followers={
            "memory": {"redis": {"url": redis_url, "prefix": "memory"}, "max_events": 40},
            "cache": {"redis": {"url": redis_url}, "tables": keyed},
            "mirror": {"delta": {"path": str(tmp_path)}, "max_events": 40},
        },
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    execute = made.database.execute
    execute(*_WRITES[0])
    config = made.config
    memory = MemorySink(config.prefix)
    cache, mirror = (
        stores.sink(config, each, config.followers[each]) for each in ("cache", "mirror")
    )
    with running(spark, made, memory=memory, cache=cache, mirror=mirror) as runs:
        everyone = runs.values()
        for more in ((), *_WRITES[1:]):
            execute(*more)
            reach(made, *everyone)
            compare(made, redis_client, str(tmp_path))
        execute(
            "TRUNCATE lines",
            "INSERT INTO lines SELECT 1, g, 'after' FROM generate_series(1, 120) g",
            "ALTER TABLE users ADD COLUMN age int DEFAULT 3",
            "UPDATE users SET age = 4 WHERE id = 1",
            "UPDATE users SET name = 'older' WHERE id = 11",
        )
        reach(made, *everyone)
        # The default too, in rows that were not written since.
        compare(made, redis_client, str(tmp_path))
        # The store lost its data: the follower is rebuilt from the log's beginning.
        STORES[config.prefix].lost = True
        execute("UPDATE users SET name = 'again' WHERE id = 1")
        wait_until(lambda: _generation(runs["memory"]) == 2, "not rebuilt", LONG)
        compare_again = STORES[config.prefix]
        reach(made, *everyone)
        assert compare_again.rows("public.users") == table(made, "users", "id")
        assert _generation(runs["cache"]) == 1
    reported = read(config)
    assert {name: each.state for name, each in reported.items()} == dict.fromkeys(runs, "stopped")
    assert reported["memory"].generation == 2
    for name, run in runs.items():  # each ends where it was, which canaries advance
        assert run.applied is not None
        assert reported[name].seq == run.applied.seq
    assert reported["cache"].canary_at_us


def _generation(run: FollowerRun) -> int | None:
    return run.applied.generation if run.applied else None


@pytest.mark.slow
def test_a_follower_halts_at_a_gap_and_names_it(spark: SparkSession, pipeline: NewPipeline) -> None:
    """Retention has deleted what it needs; the other follower continues."""
    made = pipeline(
        *TABLES[:2],
        followers={
            name: {"redis": {"url": "redis://nowhere"}, "tables": [f"public.{name}"]}
            for name in ("users", "lines")
        },
    )
    made.start().wait_ready()
    made.database.execute(
        "INSERT INTO users SELECT g FROM generate_series(1, 100) g",
        "INSERT INTO lines SELECT 1, g FROM generate_series(1, 50) g",
    )
    config = made.config
    emptied = f"{config.prefix}.public.users"
    wait_until(lambda: made.resume()[1].seq >= 150, "not in the log")
    admin = AdminClient({"bootstrap.servers": made.bootstrap})
    for future in admin.delete_records([TopicPartition(emptied, n, 5) for n in range(3)]).values():
        future.result()
    sinks = {name: MemorySink(f"{config.prefix}-{name}") for name in ("users", "lines")}
    with running(spark, made, **sinks) as runs:
        wait_until(lambda: runs["users"].state == "halted", "it goes on", LONG)
        reach(made, runs["lines"])
    assert runs["users"].exit is Exit.CONFIG
    error = runs["users"].error
    assert error is not None
    assert emptied in error.what
    assert "begins at offset 5: 0 to 4 are deleted" in error.what
    assert "cdc rebuild users" in error.hint
    assert STORES[f"{config.prefix}-users"].rows("public.users") == {}
    assert len(STORES[f"{config.prefix}-lines"].rows("public.lines")) == 50
    reported = read(config)["users"]
    assert (reported.state, reported.what, reported.seq) == ("halted", error.what, 0)


@pytest.mark.long("test_delta_keys refuses another key")
@pytest.mark.slow
def test_another_key_halts_a_mirror_until_it_is_rebuilt(
    spark: SparkSession, pipeline: NewPipeline, tmp_path: Path
) -> None:
    """Following the hint works; the other tables continue where they were."""
    made = pipeline(*TABLES[:2], followers={"mirror": {"delta": {"path": str(tmp_path)}}})
    made.start().wait_ready()
    everyone, reported = Followed(made, spark), list[str]()
    made.database.execute(
        "INSERT INTO users SELECT g, 'n' || g FROM generate_series(1, 20) g",
        "INSERT INTO lines SELECT 1, g FROM generate_series(1, 9) g",
    )
    everyone.follow("mirror")
    made.database.execute(
        "UPDATE users SET id = id + 100 WHERE id < 5",
        "ALTER TABLE users DROP CONSTRAINT users_pkey, ADD PRIMARY KEY (name)",
        "UPDATE users SET id = id + 100 WHERE id < 10",
        "DELETE FROM users WHERE id = 20",
        "DELETE FROM lines WHERE id = 1",
    )
    halted = everyone.run("mirror", everyone.lsn())
    assert halted.run() == Exit.CONFIG
    assert "public.users has another key now (name)" in str(halted.error)
    assert "`cdc rebuild mirror --table public.users`" in cast("ConfigError", halted.error).hint
    builder = LogBuilder(made.config, "mirror", lambda: spark, reported.append)
    Rebuild(everyone.sink("mirror"), builder, reported.append).run(frozenset({"public.users"}))
    made.database.execute("UPDATE users SET id = 0 WHERE name = 'n11'")
    everyone.follow("mirror")
    for name, columns in (("users", ("id", "name", "body")), ("lines", ("no", "id", "name"))):
        rows = map(str, table(made, name).values())
        assert in_delta(str(tmp_path), f"public.{name}", columns) == sorted(rows)


@pytest.mark.long("a minute of Spark each")
@pytest.mark.parametrize(
    ("first", "rebuilt"),
    [
        (["public.users", "public.lines"], None),
        (["public.users"], None),
        (["public.users", "public.lines"], frozenset({"public.lines"})),
        (["public.users"], frozenset({"public.lines"})),
    ],
)
def test_a_table_that_was_not_followed_all_the_time_is_noticed(
    spark: SparkSession,
    pipeline: NewPipeline,
    tmp_path: Path,
    first: list[str],
    rebuilt: frozenset[str] | None,
) -> None:
    """Removed for a while, or added later: otherwise its rows stay old until they change again.

    A rebuild of that table alone adds it, too.
    """

    def followers(*tables: str) -> dict[str, object]:
        return {"mirror": {"delta": {"path": str(tmp_path)}, "tables": list(tables)}}

    made = pipeline(*TABLES[:2], followers=followers(*first))
    made.start().wait_ready()
    everyone, reported = Followed(made, spark), list[str]()
    made.database.execute("INSERT INTO users VALUES (1)", "INSERT INTO lines VALUES (1, 1)")
    everyone.follow("mirror")
    made.config_file = made.write("users.yaml", followers=followers("public.users"))
    made.database.execute("INSERT INTO lines VALUES (2, 2)", "INSERT INTO users VALUES (2)")
    everyone.follow("mirror")
    made.config_file = made.write("all.yaml", followers=followers("public.users", "public.lines"))
    halted = everyone.run("mirror", everyone.lsn())
    assert halted.run() == Exit.CONFIG
    assert "public.lines has changes" in str(halted.error)
    assert "`cdc rebuild mirror`" in cast("ConfigError", halted.error).hint
    made.database.execute("INSERT INTO lines VALUES (4, 4)")
    builder = LogBuilder(made.config, "mirror", lambda: spark, reported.append)
    Rebuild(everyone.sink("mirror"), builder, reported.append).run(rebuilt)
    made.database.execute("INSERT INTO lines VALUES (3, 3)")
    everyone.follow("mirror")
    rows = sorted(map(str, table(made, "lines").values()))
    assert in_delta(str(tmp_path), "public.lines", ("no", "id", "name")) == rows
