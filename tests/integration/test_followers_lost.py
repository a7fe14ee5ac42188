"""Stores that lost a part after retention deleted the log's beginning: nothing is emptied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from opensearchpy import OpenSearch

from cdc.errors import Exit
from cdc.log.follower_reports import read
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.rebuilding import Rebuild
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import LONG, Followed
from tests.integration.test_following import TABLES, in_delta, in_redis, table

if TYPE_CHECKING:
    import redis
    from pyspark.sql import SparkSession

Rows = dict[bytes, dict[str, Any]]


class Stores:
    """Three followers of one pipeline, and what readers of their stores find."""

    def __init__(
        self,
        pipeline: PipelineUnderTest,
        spark: SparkSession,
        client: redis.Redis,
        search: OpenSearch,
        lake: Path,
    ) -> None:
        self.pipeline, self.client, self.search, self.lake = pipeline, client, search, lake
        self.followed = Followed(pipeline, spark)
        self.prefix = pipeline.config.prefix

    def users(self) -> dict[str, list[str]]:
        """Return the users that readers of each store see."""
        cache = in_redis(self.client, self.prefix, "public.users", "id").values()
        alias = f"{self.prefix}-public.users"
        found = self.search.search(index=alias, size=1_000, ignore_unavailable=True)["hits"]["hits"]
        is_whole = Path(self.lake, "_frontiers").exists()
        return {
            "cache": sorted(map(str, cache)),
            "search": sorted(str(each["_source"]) for each in found),
            "mirror": in_delta(str(self.lake), "public.users", ("id", "name", "body"))
            if is_whole
            else [],
        }

    def wanted(self) -> dict[str, list[str]]:
        rows = sorted(map(str, table(self.pipeline, "users", "id").values()))
        return dict.fromkeys(("cache", "search", "mirror"), rows)

    def retention(self) -> None:
        """Delete the beginning of a topic, as its retention does."""
        topic = f"{self.prefix}.public.lines"
        admin = AdminClient({"bootstrap.servers": self.pipeline.bootstrap})
        cut = [TopicPartition(topic, number, 3) for number in range(3)]
        for future in admin.delete_records(cut).values():
            future.result(120)

    def rebuild(self, name: str) -> None:
        told: list[str] = []
        config, spark = self.pipeline.config, self.followed.spark
        builder = LogBuilder(config, name, lambda: spark, told.append)
        reported = read(config)[name].generation
        sink = self.followed.sink(name)
        outcome = Rebuild(sink, builder, told.append, reported=reported).run()
        assert outcome.generation == 2, told

    # -- injuries ----------------------------------------------------------------------------------

    def part_of_each(self) -> None:
        """Delete one key, one index, one directory."""
        self.client.delete(f"{self.prefix}:cdc:cache")
        (index,) = self.search.indices.get_alias(name=f"{self.prefix}-public.lines")
        self.search.indices.delete(index=index)
        shutil.rmtree(self.lake / "public.lines")

    def record_of_each(self) -> None:
        """Delete the records of the stores' positions."""
        self.client.delete(f"{self.prefix}:cdc:cache")
        self.search.indices.delete(index=f"{self.prefix}-followers-1")
        shutil.rmtree(self.lake / "_frontiers")


@pytest.fixture
def stores(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_client: redis.Redis,
    redis_url: str,
    opensearch_url: str,
    tmp_path: Path,
) -> Any:  # noqa: ANN401 - a generator
    lake = tmp_path / "lake"
    made = pipeline(
        *TABLES[:2],
        followers={
            "cache": {"redis": {"url": redis_url}},
            "search": {"opensearch": {"url": opensearch_url}},
            "mirror": {"delta": {"path": str(lake)}},
        },
    )
    made.start().wait_ready()
    made.database.execute(
        "INSERT INTO users SELECT g, 'n' || g, 'b' FROM generate_series(1, 60) g",
        "INSERT INTO lines SELECT 1, g, 'n' FROM generate_series(1, 60) g",
    )
    with OpenSearch(opensearch_url, timeout=60) as search:
        found = Stores(made, spark, redis_client, search, lake)
        found.followed.follow("cache", "search", "mirror")
        yield found
        search.indices.delete(index=f"{made.config.prefix}-*", ignore_unavailable=True)


@pytest.mark.long("two minutes of Spark; the contract has lost stores")
@pytest.mark.slow
@pytest.mark.parametrize("injure", [Stores.part_of_each, Stores.record_of_each])
def test_a_store_that_lost_a_part_keeps_the_rest_if_the_log_is_too_short(
    stores: Stores, injure: Callable[[Stores], None]
) -> None:
    """It halts and names the table at each start; its hint works."""
    before = stores.users()
    assert before == stores.wanted()
    stores.retention()
    injure(stores)
    stores.pipeline.database.execute(
        "DELETE FROM users WHERE id <= 10", "UPDATE users SET name = 'later' WHERE id > 50"
    )
    until = stores.followed.lsn()
    for name in ("cache", "search", "mirror", "cache"):
        run = stores.followed.run(name, until)
        assert run.run() is Exit.CONFIG, run.error
        assert run.error is not None
        assert "public.lines starts at offset 3 of " in run.error.what
        assert f"cdc rebuild {name}" in run.error.hint
        told = read(stores.pipeline.config)[name]
        assert (told.state, told.what, told.lsn) == ("halted", run.error.what, 0)
        assert told.had_lsn
    found = stores.users()
    if not (stores.lake / "_frontiers").exists():
        del before["mirror"], found["mirror"]  # its tables exist, but without a frontier
        assert (stores.lake / "public.users").exists()
    assert found == before
    for name in before.keys() | {"mirror"}:
        stores.rebuild(name)
    assert stores.users() == stores.wanted()
    stores.pipeline.database.execute("UPDATE users SET name = 'last' WHERE id = 20")
    stores.followed.follow("cache", "search", "mirror")
    assert stores.users() == stores.wanted()


@pytest.mark.long("Spark once more")
@pytest.mark.slow
def test_a_lake_that_is_not_mounted_is_no_new_one(stores: Stores) -> None:
    """Neither without a folder nor with an empty one: the follower waits, and finds it again."""
    away = stores.lake.with_name("away")
    stores.lake.rename(away)
    stores.pipeline.database.execute("UPDATE users SET name = 'later' WHERE id > 50")
    with stores.followed.following("mirror") as runs:
        for there in (False, True):
            if there:
                stores.lake.mkdir()
            errors = runs["mirror"].progress.errors
            wait_until(
                lambda errors=errors: runs["mirror"].progress.errors > errors + 1,  # type: ignore[misc]
                "it does not look",
                LONG,
            )
            assert runs["mirror"].state == "waiting"
            error = runs["mirror"].error
            assert error is not None
            assert f"there is nothing at {stores.lake}" in error.what
            assert not stores.lake.exists() or not list(stores.lake.iterdir())
        stores.lake.rmdir()
        away.rename(stores.lake)
        stores.followed.reach(runs["mirror"])
    assert stores.users()["mirror"] == stores.wanted()["mirror"]
