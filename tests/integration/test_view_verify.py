"""`cdc view verify` compares a view with Postgres in each kind of store, in any shape."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import requests

from cdc.errors import Exit
from tests.fixtures.commands import completed
from tests.fixtures.followed import Followed
from tests.fixtures.store_sqlite import SqliteStore

if TYPE_CHECKING:
    import redis
    from pyspark.sql import SparkSession

    from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
    from tests.fixtures.store_opensearch import OpenSearchStore

_TABLE: Final = (
    "CREATE TABLE people (id int PRIMARY KEY, name text, born date, seen timestamp,"
    " at timestamptz(3), score numeric(8,2), ratio double precision, active bool, note text)"
)
_ROWS: Final = (
    """INSERT INTO people SELECT n, 'n' || n % 7, date '1960-01-01' + n * 99,
    timestamp '2026-01-01' + n * interval '1.5 s', timestamptz '2026-01-01Z' + n * interval '1 h',
    n * 1.5, n / 3.0, n % 2 = 0, nullif('note ' || n, 'note 5') FROM generate_series(1, 40) n""",
    # Some shapes have no place for these, and a hash no field; each other store has them.
    "INSERT INTO people (id) VALUES (50), (-51)",
    "INSERT INTO people (id, name, active, ratio) VALUES (52, 'n1', true, -0.5)",
)
_VIEW: Final = {"sql": "SELECT * FROM people WHERE id <> 9", "key": ["id"]}
_SHAPES: Final[dict[str, dict[str, object]]] = {
    "rows": {},
    "hashes": {"form": "hash", "key": "hash:{id}", "fields": ["born", "seen", "active", "note"]},
    "scores": {"form": "zset", "key": "scores:{active}", "member": "{id}", "score": "score"},
    "names": {"form": "set", "key": "names", "member": "{name}:{id}"},
    "texts": {"form": "text", "key": "text:{id}", "value": "{name} {at}"},
    "passing": {"ttl_seconds": 3600},
}


def started(
    pipeline: NewPipeline, tmp_path: Path, stores: dict[str, dict[str, Any]]
) -> PipelineUnderTest:
    """Return a pipeline with the table's rows in its log, and the view in all of these stores."""
    of_views = {"mirror": "lake", "views": ["known"]}
    followers: dict[str, object] = {name: {**each, **of_views} for name, each in stores.items()}
    followers["lake"] = {"delta": {"path": str(tmp_path / "lake")}}
    line = pipeline(_TABLE, views={"known": _VIEW}, followers=followers)
    line.database.execute(*_ROWS)
    line.start().wait_ready()
    return line


def test_a_view_in_any_store_is_compared_with_postgres(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_url: str,
    redis_client: redis.Redis,
    opensearch_store: OpenSearchStore,
    tmp_path: Path,
) -> None:
    stores: dict[str, dict[str, Any]] = {
        "answers": {"delta": {"path": str(tmp_path / "views")}},
        "search": {"opensearch": {"url": opensearch_store.url, "prefix": opensearch_store.prefix}},
        "copy": {"sql": {"url": f"sqlite:///{tmp_path}/copy.db"}},
        "topics": {"topic": {}},
        **{
            name: {"redis": {"url": redis_url, "prefix": name, "shapes": {"views.known": shape}}}
            for name, shape in _SHAPES.items()
        },
    }
    line = started(pipeline, tmp_path, stores)
    kept = Followed(line, spark)
    kept.follow("lake", *stores)
    compared = sorted(stores.keys() - {"passing"})
    with kept.following("lake", *stores):
        code, found, errors = _verified(line.config_file)
        assert "known in passing is not compared: its rows expire" in errors
        assert (code, found) == (Exit.OK, dict.fromkeys(compared, (0, 0)))
        assert redis_client.delete("rows:views.known:3")
        redis_client.hset("hash:4", "note", "another")
        assert redis_client.zrem("scores:true", "6")
        assert redis_client.srem("names", "n1:8")
        assert redis_client.delete("text:10")
        SqliteStore(tmp_path / "copy.db").query("UPDATE known SET name = 'x' WHERE id < 4")
        index = f"{opensearch_store.url}/{opensearch_store.prefix}-views.known"
        query = {"query": {"terms": {"id": [11, 12]}}}
        deleted = requests.post(f"{index}/_delete_by_query?refresh=true", json=query, timeout=60)
        assert deleted.json()["deleted"] == 2
        code, found, _ = _verified(line.config_file)
    assert (code, found) == (
        Exit.FAILED,
        dict.fromkeys(compared, (0, 0))
        | dict.fromkeys(("rows", "scores", "names", "texts"), (1, 0))
        | {"hashes": (1, 1), "copy": (4, 4), "search": (2, 0)},
    )


def test_a_view_that_never_stays_the_same_is_compared_with_its_mirrors_at_a_frontier(
    pipeline: NewPipeline, spark: SparkSession, tmp_path: Path
) -> None:
    """One row of it changes all the time, and a store has another row that is wrong."""
    stores: dict[str, dict[str, Any]] = {
        "answers": {"delta": {"path": str(tmp_path / "views")}},
        "copy": {"sql": {"url": f"sqlite:///{tmp_path}/copy.db"}},
    }
    line = started(pipeline, tmp_path, stores)
    kept, written = Followed(line, spark), threading.Event()
    kept.follow("lake", *stores)

    def write() -> None:
        with line.database.connect() as connection:
            while not written.wait(0.1):
                connection.execute("UPDATE people SET score = score + 1 WHERE id = 1")

    writing = threading.Thread(target=write)
    writing.start()
    try:
        with kept.following("lake", *stores):
            SqliteStore(tmp_path / "copy.db").query("UPDATE known SET name = 'x' WHERE id = 4")
            code, found, errors = _verified(line.config_file)
    finally:
        written.set()
        writing.join()
    wanted = dict.fromkeys(stores, (0, 0)) | {"copy": (1, 1)}
    assert (code, found) == (Exit.FAILED, wanted), errors


def _verified(config: Path) -> tuple[int, dict[str, tuple[int, int]], str]:
    """Return the exit code of `cdc view verify`, what it found of each follower, and its errors."""
    done = completed(config, "view", "verify", "--json", "--timeout=360")
    assert done.stdout, done.stderr.decode()
    found = {each["follower"]: (each["missing"], each["extra"]) for each in json.loads(done.stdout)}
    return done.returncode, found, done.stderr.decode()
