"""A log with other counts than its frontiers: it empties no store, and all are rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from cdc.errors import MiscountedError, UnavailableError
from cdc.log import follower_reports
from lockstep.jobs.apply import stores
from lockstep.jobs.generations.builders import LogBuilder, switching
from lockstep.jobs.generations.in_place import InPlace
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.sinks.contract import Generations
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.followed import Followed
from tests.fixtures.store_sqlite import SqliteStore
from tests.fixtures.witness import records_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_USERS = "SELECT id, name FROM users ORDER BY id"


def rebuild(followed: Followed, name: str, reported: list[str]) -> InPlace | Rebuild:
    config = followed.config
    builder = LogBuilder(config, name, lambda: followed.spark, reported.append)
    sink = stores.sink(config, name, config.followers[name])

    def report(*given: Any) -> None:  # noqa: ANN401
        switching(config, name, *given)

    if isinstance(sink, Generations):
        return Rebuild(sink, builder, reported.append, report, 1)
    return InPlace(sink, builder, report, 1)


@pytest.mark.long("half a minute of Spark")
def test_no_store_is_emptied_for_a_log_with_wrong_counts_and_a_rebuild_reads_the_rows_again(
    pipeline: NewPipeline, spark: SparkSession, redis_url: str, tmp_path: Path
) -> None:
    file = SqliteStore(tmp_path / "copy.db")
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        followers={
            "copy": {"sql": {"url": f"sqlite:///{file.path}"}},
            "cache": {"redis": {"url": redis_url}},
        },
    )
    made.start().wait_ready()
    made.database.execute("INSERT INTO users SELECT n, 'n' FROM generate_series(1, 30) n")
    followed = Followed(made, spark)
    followed.follow("copy", "cache")
    made.database.execute("UPDATE users SET name = 'm'")
    followed.lsn()
    topic = f"{followed.prefix}.public.users"
    (*_, newest) = records_of(made, lambda name: name == topic)
    producer = Producer({"bootstrap.servers": made.bootstrap})
    producer.produce(topic, newest.value, newest.key, newest.partition)
    assert producer.flush(60) == 0
    made.database.execute("UPDATE users SET name = 'o'", "DELETE FROM users WHERE id < 10")
    until = followed.lsn()
    for name in ("copy", "cache"):
        run = followed.run(name, until)
        run.run()
        assert isinstance(run.error, MiscountedError), run.error
        assert f"cdc rebuild {name}" in run.error.hint
    before = file.query(_USERS)
    assert [row["id"] for row in before] == list(range(1, 31))

    made.daemon.term()
    with pytest.raises(UnavailableError, match="events are missing in it") as error:
        rebuild(followed, "copy", []).run()
    assert "start `cdc run`" in error.value.hint
    assert file.query(_USERS) == before
    # So that its follower's reports still count.
    assert follower_reports.read(made.config)["copy"].generation == 1

    made.start().wait_ready()
    for name in ("copy", "cache"):
        reported: list[str] = []
        assert rebuild(followed, name, reported).run().generation == 2
        assert any("the rows are read again" in each for each in reported)
    made.database.execute("INSERT INTO users VALUES (100, 'last')")
    followed.follow("copy", "cache")
    assert file.query(_USERS) == [{"id": n, "name": "o"} for n in range(10, 31)] + [
        {"id": 100, "name": "last"}
    ]
