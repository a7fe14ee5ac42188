"""Stores that lost a part: it is built again alongside what is left, which is not emptied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from opensearchpy import OpenSearch

from cdc.log.follower_reports import read
from lockstep.jobs.apply.running import FollowerRun
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

    def identities(self) -> dict[str, object]:
        """Return what shows that a table of users was not built again, by store."""
        (index,) = self.search.indices.get_alias(name=f"{self.prefix}-public.users")
        files = sorted(str(each) for each in Path(self.lake, "public.users").glob("*.parquet"))
        return {"search": index, "mirror": files}

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


def waits_for(run: FollowerRun) -> str:
    """Return the remedy, where the run waits for rows that the log does not have."""
    error = run.error
    return error.hint if error is not None and "does not have all rows" in error.what else ""


@pytest.mark.long("two minutes of Spark; the contract has lost stores")
@pytest.mark.slow
@pytest.mark.parametrize("injure", [Stores.part_of_each, Stores.record_of_each])
def test_a_store_that_lost_a_part_keeps_the_rest_until_all_of_it_is_there_again(
    stores: Stores, injure: Callable[[Stores], None]
) -> None:
    """The log is too short, and without a daemon nothing can read the rows: the follower waits."""
    before = stores.users()
    assert before == stores.wanted()
    stores.retention()
    injure(stores)
    stores.pipeline.database.execute(
        "DELETE FROM users WHERE id <= 10", "UPDATE users SET name = 'later' WHERE id > 50"
    )
    stores.followed.lsn()
    stores.pipeline.daemon.term()
    with stores.followed.following("cache", "search", "mirror") as runs:
        for run in runs.values():
            # The second time: between the two it says again what is missing.
            wait_until(lambda run=run: run.progress.errors > 1, "it does not wait", LONG)  # type: ignore[misc]
            wait_until(lambda run=run: "start `cdc run`" in waits_for(run), "no remedy", LONG)  # type: ignore[misc]
            reported = read(stores.pipeline.config)[run.name]
            assert (reported.lsn, bool(reported.had_lsn)) == (0, True)
        found = stores.users()
        if not (stores.lake / "_frontiers").exists():
            del before["mirror"], found["mirror"]  # its tables exist, but without a frontier
            assert (stores.lake / "public.users").exists()
        assert found == before
        stores.pipeline.start().wait_ready()
        stores.followed.reach(*runs.values())
        assert stores.users() == stores.wanted()
        assert all(run.applied and run.applied.generation == 2 for run in runs.values())
        stores.pipeline.database.execute("UPDATE users SET name = 'last' WHERE id = 20")
        stores.followed.reach(*runs.values())
    assert stores.users() == stores.wanted()


@pytest.mark.long("Spark once more")
@pytest.mark.slow
def test_only_the_table_that_was_lost_is_built_again(stores: Stores) -> None:
    before = stores.identities()
    stores.part_of_each()
    stores.pipeline.database.execute("UPDATE lines SET name = 'x'")
    stores.followed.follow("search", "mirror")
    assert stores.identities() == before
    assert stores.users()["search"] == stores.wanted()["search"]
    config = stores.pipeline.config
    for name in ("search", "mirror"):
        assert read(config)[name].generation == 2
        assert list(stores.followed.sink(name).generations()) == [2]
    found = stores.search.search(index=f"{stores.prefix}-public.lines", size=1_000)["hits"]["hits"]
    assert {each["_source"]["id"] for each in found} == set(range(1, 61))
    assert {each["_source"]["name"] for each in found} == {"x"}
    mirror = in_delta(str(stores.lake), "public.lines", ("id", "name"))
    assert mirror == sorted(str({"id": number, "name": "x"}) for number in range(1, 61))


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
