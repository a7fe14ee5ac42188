"""A log of two epochs: new followers whose first cut spans both, for every kind of cut."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc.cli.main import run as cdc
from lockstep.jobs.apply import large
from lockstep.jobs.cuts import pieces
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.generations.rebuilding import Rebuild
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.followed import Followed, small_cuts
from tests.integration.test_following import TABLES, in_delta, in_redis, table
from tests.integration.test_topic_monitor import widen

if TYPE_CHECKING:
    import redis
    from pyspark.sql import SparkSession

    from tests.fixtures.daemon import PipelineUnderTest


def two_epochs(made: PipelineUnderTest) -> None:
    """Write rows, add partitions, acknowledge that, then delete and change the same rows."""
    daemon = made.start().wait_ready()
    made.database.execute(
        "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) FROM generate_series(1, 300) g",
        "INSERT INTO lines SELECT g % 7, g, 'n' || g FROM generate_series(1, 200) g",
        "UPDATE users SET name = 'first' WHERE id % 3 = 0",
    )
    wait_until(lambda: made.resume()[1].seq >= 600, "not in the log")
    assert daemon.term() == 0
    for name in ("users", "lines"):
        widen(made, f"{made.config.prefix}.public.{name}", 7)
    assert cdc(["topics", "acknowledge", "-c", str(made.config_file), "--yes"]) == 0
    made.start().wait_ready()
    made.database.execute(
        "DELETE FROM users WHERE id % 4 = 0",
        # The values that an update leaves unchanged are in the previous epoch.
        "UPDATE users SET name = 'second' WHERE id % 2 = 1",
        "DELETE FROM lines WHERE id % 5 = 0",
        "UPDATE lines SET name = 'second' WHERE id % 3 = 0",
    )


@pytest.mark.long("two minutes of Spark")
@pytest.mark.slow
@pytest.mark.parametrize("small", [20_000, 40])
def test_a_new_follower_whose_first_cut_spans_two_epochs_has_the_databases_state(
    spark: SparkSession,
    pipeline: NewPipeline,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small: int,
) -> None:
    """By the driver and by executors, in Redis and in Delta; and for a rebuilt generation."""
    small_cuts(monkeypatch, small)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 25)
    monkeypatch.setattr(large, "SORTED_BYTES", 4_000)
    made = pipeline(
        *TABLES[:2],
        TABLES[-1],
        followers={
            "cache": {"redis": {"url": redis_url}},
            "mirror": {"delta": {"path": str(tmp_path)}, "max_events": small},
        },
    )
    two_epochs(made)
    everyone = Followed(made, spark)
    everyone.follow("cache", "mirror")
    prefix = made.config.prefix

    def compare() -> None:
        for name, key in (("users", ("id",)), ("lines", ("no", "id"))):
            wanted = table(made, name, *key)
            assert in_redis(redis_client, prefix, f"public.{name}", *key) == wanted
            columns = next(iter(wanted.values()))
            found = in_delta(str(tmp_path), f"public.{name}", columns)
            assert found == sorted(map(str, wanted.values()))

    compare()
    for name in ("cache", "mirror"):
        reported: list[str] = []
        builder = LogBuilder(made.config, name, lambda: spark, reported.append)
        outcome = Rebuild(everyone.sink(name), builder, reported.append).run()
        assert not any(each.differences for each in outcome.tables), reported
    compare()
