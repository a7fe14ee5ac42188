"""Followers of a running pipeline are rebuilt, from every source that they can be built from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import redis
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from cdc.cli.main import run as cdc
from cdc.errors import ConfigError
from cdc.operate.commands.setup import survey, tear_down
from lockstep.jobs.generations.builders import LogBuilder, MirrorBuilder
from lockstep.jobs.generations.rebuilding import Rebuild
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import LONG, Followed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES: Final = (
    "CREATE TABLE orders (id int PRIMARY KEY, buyer text, placed timestamptz)",
    "CREATE TABLE items (order_id int, line int, price numeric(10,2))",
    "ALTER TABLE items ADD PRIMARY KEY (order_id, line)",
)
DOCUMENT: Final = {
    "table": "public.orders",
    "children": {
        "items": {
            "table": "public.items",
            "by": {"order_id": "id"},
            "columns": ["line", "price"],
            "order": ["-price"],
        }
    },
}


class Shop(Followed):
    """Orders with their items, and the caches of both."""

    def __init__(
        self, pipeline: PipelineUnderTest, spark: SparkSession, client: redis.Redis
    ) -> None:
        super().__init__(pipeline, spark)
        self.client = client
        self.reported: list[str] = []

    def rebuild(self, name: str) -> Rebuild:
        config = self.config
        builder = (
            MirrorBuilder(config, name, self.reported.append)
            if config.followers[name].documents
            else LogBuilder(config, name, lambda: self.spark, self.reported.append)
        )
        return Rebuild(self.sink(name), builder, self.reported.append)

    def command(self, *given: str) -> dict[str, Any]:
        """Return the output of `cdc rebuild … --json`."""
        command = [sys.executable, "-m", "cdc.cli.main", "rebuild", *given, "--json"]
        file = str(self.pipeline.config_file)
        done = subprocess.run([*command, "-c", file], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return cast("dict[str, Any]", json.loads(done.stdout))

    def values(self, what: str) -> dict[str, Any]:
        """Return what readers of Redis see, by key without the prefix."""
        names = self.client.scan_iter(f"{what}:*")
        found = {name.decode(): cast("bytes", self.client.get(name)) for name in names}
        return {name.removeprefix(f"{what}:"): json.loads(value) for name, value in found.items()}

    def check(self) -> None:
        """Fail unless both caches equal the source."""
        items = (
            "SELECT order_id || ':' || line, jsonb_build_object('order_id', order_id, 'line', line,"
            " 'price', price::text) FROM items"
        )
        assert self.values(f"{self.prefix}:public.items") == self.rows(items)
        assert self.values("docs:documents.order") == self.documents()

    def documents(self) -> dict[str, Any]:
        return self.rows(
            "SELECT o.id::text, jsonb_build_object('id', o.id, 'buyer', o.buyer, 'placed',"
            " replace(placed::text, ' ', 'T')::text, 'items', (SELECT"
            " coalesce(jsonb_agg(jsonb_build_object('line', line, 'price', price::text)"
            " ORDER BY price DESC, line), '[]') FROM items i WHERE i.order_id = o.id))"
            " FROM (SELECT id, buyer, to_char(placed AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')"
            " || 'Z' AS placed FROM orders) o"
        )


@pytest.fixture
def shop(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> Shop:
    """A shop with some orders, and three followers that have applied all of the source."""
    followers: dict[str, object] = {
        "lake": {"delta": {"path": str(tmp_path / "lake")}},
        "cache": {"redis": {"url": redis_url}},
        "docs": {
            "redis": {"url": redis_url, "prefix": "docs"},
            "mirror": "lake",
            "documents": {"order": DOCUMENT},
        },
    }
    made = Shop(pipeline(*TABLES, followers=followers), spark, redis_client)
    made.pipeline.start().wait_ready()
    made.pipeline.database.execute(
        "INSERT INTO orders SELECT n, 'buyer ' || n, '2026-01-02 03:04:05Z'"
        " FROM generate_series(1, 40) n",
        "INSERT INTO items SELECT n % 45, n, n * 1.25 FROM generate_series(1, 150) n",
        "DELETE FROM items WHERE line % 7 = 0",
        "UPDATE items SET order_id = order_id + 1 WHERE line % 5 = 0",
    )
    made.follow("lake", "cache", "docs")
    return made


def test_a_damaged_cache_is_rebuilt_while_its_follower_runs(shop: Shop) -> None:
    """So are its documents, from the mirror; a state of the past is a shadow build."""
    shop.check()
    asked = shop.lsn()
    past = shop.values(f"{shop.prefix}:public.items")
    shop.pipeline.database.execute("DELETE FROM items WHERE line % 3 = 0")
    still = shop.rebuild("cache").as_of(asked)
    shadow = shop.sink("cache").at(still.generation)
    shadow.open()
    versions = {each.name: each for each in LogBuilderVersions(shop).versions(still)}
    held = {key: json.loads(row) for key, _, row in shadow.contents(versions["public.items"])}
    assert sorted(held.values(), key=str) == sorted(past.values(), key=str)
    shadow.close()
    shop.client.set(f"{shop.prefix}:public.items:1:1", b'{"price": "forged"}')
    with shop.following("cache", "lake", "docs") as runs:
        outcome = shop.rebuild("cache").run()
        assert sum(len(each.differences) for each in outcome.tables) >= 1, shop.reported
        assert shop.command("docs")["generation"] == 2
        shop.pipeline.database.execute(
            "UPDATE items SET price = price + 1 WHERE line % 2 = 0",
            "DELETE FROM orders WHERE id % 4 = 0",
        )
        until = shop.lsn()
        for run in (runs["cache"], runs["docs"]):
            wait_until(
                lambda run=run: (
                    run.applied and run.applied.lsn >= until and run.applied.generation == 2
                ),  # type: ignore[misc]
                f"{run.name} is {run.state}: {run.error}",
                LONG,
            )
    shop.check()
    assert shop.command("cache", "--drop-old") == {"dropped": [1, still.generation]}
    shop.check()


class LogBuilderVersions:
    """The versions that a log has at a generation's frontier."""

    def __init__(self, shop: Shop) -> None:
        self._builder = LogBuilder(shop.config, "cache", lambda: pytest.fail("no"), print)

    def versions(self, outcome: Any) -> Any:  # noqa: ANN401 - an Outcome
        return self._builder.versions(outcome.applied)


@pytest.mark.long("a minute of Spark; test_rebuild_truth reads again")
def test_without_the_logs_beginning_rows_are_read_again(shop: Shop) -> None:
    """By the daemon, through the stream; documents continue across the rebuild of their mirror."""
    shop.pipeline.daemon.term()
    state = shop.sink("cache").generations()[1]
    assert state is not None
    topic = f"{shop.prefix}.public.items"
    admin = AdminClient({"bootstrap.servers": shop.pipeline.bootstrap})
    cut = [TopicPartition(topic, number, end) for number, end in enumerate(state.ends[topic])]
    for done in admin.delete_records(cut).values():
        done.result(timeout=120)
    assert cdc(["topics", "acknowledge", "--yes", "-c", str(shop.pipeline.config_file)]) == 0
    shop.pipeline.database.execute("DELETE FROM items WHERE line % 4 = 0")
    shop.pipeline.start().wait_ready()
    for name in ("cache", "lake"):
        assert shop.rebuild(name).run().generation == 2
        assert any("reading again" in each for each in shop.reported)
        shop.reported.clear()
    shop.follow("lake", "cache", "docs")
    shop.check()


@pytest.mark.long("a minute of Spark")
def test_followers_of_a_log_that_was_started_over_are_rebuilt_from_the_new_one(shop: Shop) -> None:
    """Their frontiers are above those of the new log, and mean nothing in it."""
    line = shop.pipeline
    line.daemon.term()
    list(tear_down(line.config, survey(line.config), with_topics=True))
    line.set_up()
    line.start().wait_ready()
    line.database.execute("UPDATE orders SET buyer = buyer", "UPDATE items SET price = price + 1")
    with pytest.raises(ConfigError, match="followed another log"):
        shop.rebuild("cache").run(frozenset({"public.items"}))
    for name in ("cache", "lake", "docs"):
        outcome = shop.rebuild(name).run()
        assert outcome.tables == (), "nothing was compared"
    assert sum("followed another log" in each for each in shop.reported) == 3
    shop.check()
