"""Executors fold large tables, to bases and into stores, as this process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis

from lockstep.jobs.compacting import proving, restoring, running, runs, slices
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.followed import Followed
from tests.integration.test_compaction import TABLES, rows_of, source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = dict[int, dict[str, Any]]


@pytest.mark.long("a minute of Spark; test_compaction has this process")
@pytest.mark.slow
def test_executors_compact_and_fill_stores_as_this_process_does(
    spark: SparkSession,
    pipeline: NewPipeline,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each slice by a task; a value that was not sent may be in another slice's key."""
    for module in (running, restoring):
        monkeypatch.setattr(module, "LARGE_ROWS", 0)
    monkeypatch.setattr(slices, "SLICE_BYTES", 100_000)
    monkeypatch.setattr(slices, "OWN_BYTES", 30_000)
    made = pipeline(
        *TABLES,
        followers={
            "cache": {"redis": {"url": redis_url}},
            "mirror": {"delta": {"path": str(tmp_path / "lake")}},
        },
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
    )
    made.start().wait_ready()
    archived, followed = Archived(made), Followed(made, spark)
    made.database.execute(
        "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) || g"
        " FROM generate_series(1, 1500) g",
        "INSERT INTO quiet SELECT g, 'q' FROM generate_series(1, 9) g",
        "UPDATE users SET id = id + 10000, name = 'moved' WHERE id % 5 = 0",
    )
    archived.reach()
    record, _ = Compaction(made.config, lambda: spark).run()
    assert record.rows == 1_509 + 300, "with the deletes of the old keys"
    made.database.execute(
        "UPDATE users SET name = 'again' WHERE id % 3 = 0", "DELETE FROM users WHERE id % 7 = 0"
    )
    archived.reach()
    wanted = source(archived, "users")
    for name in ("cache", "mirror"):
        builder = LogBuilder(made.config, name, lambda: spark, print)
        Rebuild(followed.sink(name), builder, print).run()
    assert in_redis(redis_client, followed.prefix) == wanted
    table = read_as_of_arrow(str(tmp_path / "lake"), ["public.users"]).tables["public.users"]
    rows = {row["id"]: row for row in table.to_pylist()}
    assert {
        key: {name: row[name] for name in ("id", "name", "body")} for key, row in rows.items()
    } == wanted
    for number, ratio in enumerate((0, 1 << 30)):  # of few rows, and of all
        monkeypatch.setattr(runs, "RATIO", ratio)
        monkeypatch.setattr(runs, "LEAST_BYTES", 0)
        made.database.execute(f"UPDATE users SET name = 'more {number}' WHERE id % 11 = 0")
        archived.reach()
        folded, _ = Compaction(made.config, lambda: spark).run()
        assert folded == Compaction(made.config, None).run()[0]
        assert rows_of(archived, "users") == source(archived, "users")
        proof = proving.prove(made.config, {})
        assert proof is not None
        assert proof.findings == ()


def in_redis(client: redis.Redis, prefix: str) -> Rows:
    names = client.scan_iter(f"{prefix}:public.users:*", count=5_000)
    rows = [json.loads(cast("bytes", client.get(name))) for name in names]
    return {row["id"]: row for row in rows}
