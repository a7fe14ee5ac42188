"""Of a backlog the next cut is read while one is written: with every kind of change in them."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lockstep.jobs.apply.reading import CutReading
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.followed import Followed
from tests.fixtures.seeds import first_seed
from tests.fixtures.store_redis import RedisStore

TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, body text)",
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE clicks (id int, name text)",
    "ALTER TABLE clicks REPLICA IDENTITY FULL",
)
TRANSACTIONS = 36
# Most cuts hold two or three transactions.
_MOST_EVENTS = 50


def statements(number: int, dice: random.Random) -> list[str]:
    """Return a transaction of some twenty events."""
    first = dice.randrange(100)
    every = {
        "rows": f"INSERT INTO users SELECT g, 'n', repeat('x', 3000) FROM generate_series("
        f"{first}, {first + 20}) g ON CONFLICT (id) DO UPDATE SET name = users.name || 'u'",
        "unsent": f"UPDATE users SET name = '{number}' WHERE id % 5 = {number % 5}",
        "keys": f"UPDATE users SET id = id + {10_000 * (number + 1)}"
        f" WHERE id BETWEEN {first} AND {first + 9}",
        "letter": f"INSERT INTO users VALUES ({9_000 + number}, 'l', repeat('y', 200000))",
        "deletes": f"DELETE FROM users WHERE id % 20 = {number % 20}",
        "keyless": f"INSERT INTO clicks SELECT g, '{number}' FROM generate_series(1, 12) g",
        "fewer": "DELETE FROM clicks WHERE id % 4 = 1",
        "column": f"ALTER TABLE users ADD COLUMN IF NOT EXISTS c{number % 7} int DEFAULT {number}",
        "emptied": "TRUNCATE clicks",
    }
    return [every[each] for each in dice.choices(list(every), [6, 4, 3, 1, 2, 3, 2, 1, 1], k=3)]


def stored(path: Path, table: str) -> list[str]:
    (rows,) = read_as_of_arrow(str(path), [table]).tables.values()
    columns = sorted(each for each in rows.column_names if not each.startswith("_"))
    return sorted(str(row) for row in rows.select(columns).to_pylist())


def in_sqlite(path: Path, table: str) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = [dict(row) for row in connection.execute(f'SELECT * FROM "{table}"')]
    return sorted(
        str({name: row[name] for name in sorted(row) if not name.startswith("_")}) for row in found
    )


def source(made: PipelineUnderTest, table: str) -> list[str]:
    with made.database.connect() as connection:
        found = connection.execute(f"SELECT * FROM {table}".encode())
        names = [each.name for each in found.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    return sorted(str({name: row[name] for name in sorted(names)}) for row in rows)


def test_a_backlog_of_every_kind_of_change_reaches_stores_as_the_source_has_it(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_store: RedisStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = random.Random(first_seed())
    limited: dict[str, Any] = {"max_events": _MOST_EVENTS}
    keyed = {"tables": ["public.users"]}
    made = pipeline(
        *TABLES,
        log={"kafka": {"message.max.bytes": 60_000}},
        followers={
            "lake": {"delta": {"path": str(tmp_path / "lake")}, **limited},
            "cache": {"redis": {"url": redis_store.settings.url}, **limited, **keyed},
            "answers": {"sql": {"url": f"sqlite:///{tmp_path}/answers.db"}, **limited, **keyed},
        },
    )
    followed = Followed(made, spark)
    made.start().wait_ready()
    for number in range(TRANSACTIONS):
        made.database.execute(*statements(number, dice))
        followed.lsn()  # so that it has a frontier of its own
    ahead = list[int]()
    start = CutReading.start

    def counted(reading: CutReading, cut: Any, most: Any) -> None:  # noqa: ANN401 - as `start`
        ahead.append(cut.seq)
        start(reading, cut, most)

    monkeypatch.setattr(CutReading, "start", counted)
    followed.follow("lake", "cache", "answers")
    assert len(ahead) > TRANSACTIONS // 3, ahead
    for table in ("public.users", "public.clicks"):
        assert stored(tmp_path / "lake", table) == source(made, table)
    assert in_sqlite(tmp_path / "answers.db", "users") == source(made, "users")
    prefix = f"{made.config.prefix}:public.users"
    kept = sum(1 for _ in redis_store.client.scan_iter(f"{prefix}:*"))
    assert kept == len(source(made, "users"))
