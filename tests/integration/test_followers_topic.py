"""Followers in topics, from Postgres through the log: killed, rebuilt, read as the docs show."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from pyspark.sql import SparkSession

from cdc import failpoints
from cdc.errors import ConfigError, Exit
from lockstep.jobs.apply import stores
from lockstep.jobs.generations.builders import LogBuilder, switching
from lockstep.jobs.generations.in_place import InPlace
from tests.fixtures.commands import completed
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.followed import Followed
from tests.fixtures.store_topic import records, rows_of

TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, body text)",
    "CREATE TABLE orders (id int PRIMARY KEY, user_id int, price numeric(9,2))",
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
)
WRITES = (
    "INSERT INTO users SELECT n, 'n', 'x' FROM generate_series(1, 40) n ON CONFLICT DO NOTHING",
    "UPDATE users SET body = repeat('x', 3000) || id",
    "INSERT INTO orders SELECT n, 1 + n % 40, n / 3.0 FROM generate_series(1, 90) n",
    "UPDATE users SET name = name || 'u' WHERE id % 3 = 0",
    "UPDATE orders SET id = id + 1000 WHERE id % 4 = 0",
    "DELETE FROM orders WHERE id % 5 = 0",
    (
        "BEGIN; TRUNCATE orders; INSERT INTO orders SELECT n, n, n FROM generate_series(50, 70) n;"
        " UPDATE users SET id = id + 500 WHERE id BETWEEN 30 AND 100; COMMIT"
    ),
    "INSERT INTO orders VALUES (7000, 7, 'NaN')",
    (
        "ALTER TABLE orders RENAME price TO amount; ALTER TABLE users ADD age int DEFAULT 7;"
        " UPDATE orders SET user_id = 3 WHERE id = 51"
    ),
    "UPDATE users SET name = name || 'v' WHERE id % 7 = 0",
)
DIED = [
    *failpoints.FOLLOWER_NAMES,
    "topic_sent:1",
    "topic_flushed:1",
    "topic_flushed:2",
]
PAGE = Path(__file__).parents[2] / "docs" / "TOPICS.md"


class Streams(Followed):
    """A source with a copy in topics."""

    @property
    def topics(self) -> str:
        return f"{self.prefix}-copy"

    def source(self, table: str) -> dict[int, Any]:
        found = self.rows(f"SELECT id::text, row_to_json(t)::text FROM {table} t")
        return {int(number): json.loads(row, parse_float=str) for number, row in found.items()}

    def stored(self, table: str) -> dict[int, Any]:
        rows = rows_of(self.pipeline.bootstrap, f"{self.topics}.public.{table}")
        assert all(json.loads(key) == {"id": row["id"]} for key, row in rows.items())
        return {row["id"]: row for row in rows.values()}

    def check(self) -> None:
        for table in ("users", "orders"):
            wanted = {n: _texts(each) for n, each in self.source(table).items()}
            assert {n: _texts(each) for n, each in self.stored(table).items()} == wanted

    def written(self) -> Counter[tuple[Any, ...]]:
        """Count the records of the tables' topics by topic, key and seq."""
        return Counter(
            (topic, each.key(), dict(headers)["lockstep.seq"])
            for topic in (f"{self.topics}.public.{table}" for table in ("users", "orders"))
            for each in records(self.pipeline.bootstrap, topic)
            if (headers := each.headers()) is not None
        )


def _texts(row: dict[str, Any]) -> dict[str, str | None]:
    return {name: None if value is None else str(value) for name, value in row.items()}


@pytest.fixture
def streams(pipeline: NewPipeline, spark: SparkSession) -> Streams:
    made = Streams(pipeline(*TABLES, followers={"copy": {"topic": {}}}), spark)
    made.pipeline.start().wait_ready()
    return made


def test_killed_anywhere_its_topics_equal_the_source_and_nothing_is_there_twice(
    streams: Streams,
) -> None:
    """While the source goes on: with keys that change, values not sent, truncates and DDL."""
    execute = streams.pipeline.database.execute
    for number, name in enumerate(DIED):
        execute(WRITES[number % len(WRITES)])
        execute(f"INSERT INTO users VALUES ({2000 + number}, 'at {name}')")
        failpoint = name if ":" in name else f"{name}:1"
        arguments = ("follow", "--followers", "copy", "--until", str(streams.lsn()))
        done = completed(streams.pipeline.config_file, *arguments, failpoint=failpoint)
        assert done.returncode == -signal.SIGKILL, (name, done.stderr.decode())
    execute(*WRITES[len(DIED) :])
    streams.follow("copy")
    streams.check()
    assert {each for each, count in streams.written().items() if count > 1} == set()


def test_the_documented_reader_gets_the_state_at_a_frontier(streams: Streams) -> None:
    """Word for word from docs/TOPICS.md; and the simple one a table's newest rows."""
    streams.pipeline.database.execute(*WRITES[:-2])
    streams.follow("copy")
    stored = streams.stored("orders")  # waits until all of it is visible
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for block in blocks:
        scope: dict[str, Any] = {}
        text = block.replace("localhost:9092", streams.pipeline.bootstrap)
        exec(text.replace("shop-copy", streams.topics), scope)  # noqa: S102 - ours
        rows = scope["rows"]
        assert {each["id"]: each for each in rows.values()} == stored
    assert len(blocks) == 2
    with closing(stores.sink(streams.config, "copy", streams.config.followers["copy"])) as sink:
        state = sink.open()
    assert state is not None
    assert (scope["frontier"]["seq"], scope["frontier"]["lsn"]) == (
        state.applied.seq,
        str(state.applied.lsn),
    )


@pytest.mark.long("a minute of Spark")
def test_a_copy_is_rebuilt_in_place_and_refuses_the_rest_by_name(streams: Streams) -> None:
    streams.pipeline.database.execute(*WRITES[:-2])
    streams.follow("copy")
    config = streams.config
    output = list[str]()

    def rebuild() -> InPlace:
        builder = LogBuilder(config, "copy", lambda: streams.spark, output.append)
        sink = stores.sink(config, "copy", config.followers["copy"])
        return InPlace(sink, builder, lambda *given: switching(config, "copy", *given), 1)

    with pytest.raises(ConfigError, match="several generations"):
        rebuild().run(frozenset({"public.users"}))
    assert rebuild().run().generation == 2
    streams.check()
    streams.pipeline.database.execute("DELETE FROM users WHERE id < 10")
    streams.follow("copy")
    streams.check()


def test_a_view_in_a_topic_is_postgres_answer_and_is_verified(
    pipeline: NewPipeline, spark: SparkSession, tmp_path: Path
) -> None:
    sql = "SELECT user_id, count(*) AS n, sum(price) AS total FROM orders GROUP BY user_id"
    made = pipeline(
        *TABLES,
        views={"totals": {"sql": sql, "key": ["user_id"]}},
        followers={"lake": {"delta": {"path": str(tmp_path / "lake")}}},
    )
    written = yaml.safe_load(made.config_file.read_text())
    written["followers"]["copy"] = {"mirror": "lake", "views": ["totals"], "topic": {}}
    made.config_file.write_text(yaml.safe_dump(written))
    viewed = Streams(made, spark)
    made.start().wait_ready()
    changes = (
        "UPDATE orders SET price = price + 0.25 WHERE id < 9",
        "DELETE FROM orders WHERE user_id < 9",
    )
    for statements in (WRITES[:6], changes[:1], changes[1:]):
        made.database.execute(*statements)
        viewed.follow("lake", "copy")
        stored = rows_of(made.bootstrap, f"{viewed.topics}.views.totals")
        wanted = viewed.rows(f"SELECT user_id, ARRAY[n::text, total::text] FROM ({sql}) AS t")
        assert {row["user_id"]: [str(row["n"]), row["total"]] for row in stored.values()} == wanted
    with viewed.following("lake", "copy"):
        done = completed(made.config_file, "view", "verify", "--json")
    (verified,) = msgspec.json.decode(done.stdout)
    assert (done.returncode, verified["follower"]) == (Exit.OK, "copy")
    assert (verified["missing"], verified["extra"]) == (0, 0)
    with closing(stores.sink(viewed.config, "copy", viewed.config.followers["copy"])) as sink:
        assert sink.current() == 1
