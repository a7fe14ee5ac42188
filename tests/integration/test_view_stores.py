"""Views from SQL to the stores: real daemon, mirror, views in Delta and in Redis, and commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
import yaml
from pyspark.sql import SparkSession

from cdc.errors import CDCError, Exit
from cdc.events import LSN
from cdc.log.follower_reports import FollowerState
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.followed import Followed
from tests.fixtures.spark import options
from tests.fixtures.store_redis import RedisStore

_SECONDS = 300
TABLES = (
    "CREATE TABLE customers (id int PRIMARY KEY, name text)",
    "CREATE TABLE orders (id int PRIMARY KEY, customer_id int)",
    (
        "CREATE TABLE lines (order_id int, n int, price numeric(10,2), qty int,"
        " PRIMARY KEY (order_id, n))"
    ),
    "CREATE TABLE tweets (id bigint PRIMARY KEY, author_id int, body text, at timestamp NOT NULL)",
    (
        "CREATE TABLE follows (follower_id int, followee_id int,"
        " PRIMARY KEY (follower_id, followee_id))"
    ),
)
TOTALS = """
  SELECT o.id, c.name, sum(l.price * l.qty) AS total FROM orders o
  JOIN customers c ON c.id = o.customer_id
  LEFT JOIN lines l ON l.order_id = o.id GROUP BY o.id, c.name
"""
# The newest 100 of those whom a person follows.
TIMELINE = """
  SELECT follower_id, tweet_id, body, at FROM (
    SELECT f.follower_id, t.id AS tweet_id, t.body, t.at, row_number() OVER (
      PARTITION BY f.follower_id ORDER BY t.at DESC, t.id DESC) AS place
    FROM tweets t JOIN follows f ON f.followee_id = t.author_id) AS x
  WHERE place <= 100
"""
ROWS = (
    "INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 5) n",
    "INSERT INTO orders SELECT n, n % 5 + 1 FROM generate_series(1, 20) n",
    "INSERT INTO lines SELECT n / 3, n % 3, n * 1.25, n % 7 FROM generate_series(3, 59) n",
    (
        "INSERT INTO tweets SELECT n, n % 4 + 1, 'tweet ' || n,"
        " timestamp '2026-01-01' + n * interval '1 minute' FROM generate_series(1, 440) n"
    ),
    "INSERT INTO follows VALUES (1, 2), (1, 3), (2, 1), (3, 1), (3, 2), (3, 4)",
)
CHANGES = (
    "UPDATE customers SET name = 'another' WHERE id = 2",
    "DELETE FROM lines WHERE order_id = 4",
    "UPDATE orders SET customer_id = NULL WHERE id = 7",
    "INSERT INTO follows VALUES (2, 4)",
    "DELETE FROM follows WHERE follower_id = 1 AND followee_id = 3",
    "INSERT INTO tweets VALUES (1000, 2, 'new', '2027-01-01')",
    "DELETE FROM tweets WHERE id = 439",
)


class Viewed(Followed):
    """A pipeline with both views in two stores."""

    client: redis.Redis
    root: Path

    def states_of(self, name: str, until: LSN) -> list[str]:
        """Bring a follower to an LSN; return the states that it was in."""
        run, states = self.run(name, until), list[str]()

        def to(state: FollowerState | Literal["standby"], error: CDCError | None = None) -> None:
            states.append(state)
            enter(state, error)

        enter, run.to = run.to, to  # type: ignore[method-assign]
        assert run.run() == 0, run.error
        return states

    def expect_equal(self) -> None:
        """Fail unless both stores have Postgres' answers."""
        with self.pipeline.database.connect() as connection:
            totals = connection.execute(TOTALS).fetchall()
            timeline = connection.execute(TIMELINE).fetchall()
        names = ["views.order_totals", "views.timeline"]
        read = read_as_of_arrow(str(self.root / "views"), names).tables
        assert sorted(_values(read[names[0]], "id", "name", "total")) == sorted(totals)
        stored = _values(read[names[1]], "follower_id", "tweet_id", "body", "at")
        assert sorted(stored) == sorted(timeline)
        wanted: dict[int, list[int]] = {}
        for follower, tweet, _, _ in sorted(timeline, key=lambda row: (row[3], row[1])):
            wanted.setdefault(follower, []).append(tweet)
        assert {
            int(key.rpartition(b":")[2]): [int(str(member, "ascii")) for member in members]
            for key, members in self._timelines()
        } == wanted

    def _timelines(self) -> Iterator[tuple[bytes, list[Any]]]:
        for key in self.client.scan_iter(f"{self.prefix}-timeline:*"):
            found: Any = self.client.zrange(key, 0, -1)
            yield key, found

    def cdc(self, *arguments: str) -> tuple[int, Any]:
        """Run a command with --json; return its exit code and what it printed."""
        done = subprocess.run(
            [str(Path(sys.executable).with_name("cdc")), *arguments, "--json"],
            env={
                "PATH": "/usr/bin:/bin",
                "LOCKSTEP_CONFIG": str(self.pipeline.config_file),
                **options(),
            },
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
        assert done.stdout, done.stderr.decode()
        return done.returncode, json.loads(done.stdout)


def _values(rows: Any, *names: str) -> list[tuple[Any, ...]]:  # noqa: ANN401 - an Arrow table
    return [tuple(row[name] for name in names) for row in rows.to_pylist()]


@pytest.fixture
def viewed(
    pipeline: NewPipeline, spark: SparkSession, redis_store: RedisStore, tmp_path: Path
) -> Viewed:
    made: PipelineUnderTest = pipeline(
        *TABLES,
        views={
            "order_totals": {"sql": TOTALS, "key": ["id"], "refresh": "strict"},
            "timeline": {
                "sql": TIMELINE, "key": ["follower_id", "tweet_id"], "refresh": "strict",
            },
        },
        followers={
            "lake": {"delta": {"path": str(tmp_path / "lake")}},
            "answers": {
                "mirror": "lake",
                "views": ["order_totals", "timeline"],
                "delta": {"path": str(tmp_path / "views")},
            },
        },
    )  # fmt: skip
    followers = yaml.safe_load(made.config_file.read_text())
    followers["followers"]["cache"] = {
        "mirror": "lake",
        "views": ["timeline"],
        "redis": {
            "url": redis_store.settings.url,
            "shapes": {
                "views.timeline": {
                    "form": "zset",
                    "key": f"{made.config.prefix}-timeline:{{follower_id}}",
                    "member": "{tweet_id}",
                    "score": "at",
                }
            },
        },
    }
    made.config_file.write_text(yaml.safe_dump(followers))
    found = Viewed(made, spark)
    found.client, found.root = redis_store.client, tmp_path
    return found


def test_order_totals_and_timelines_follow_the_database_into_delta_and_redis(
    viewed: Viewed,
) -> None:
    """And `cdc wait` waits for the followers that hold a view; `cdc view verify` compares them."""
    made = viewed.pipeline
    made.database.execute(*ROWS)
    made.start().wait_ready()
    for statements in ((), CHANGES):
        made.database.execute(*statements)
        until = viewed.lsn()
        assert viewed.run("lake", until).run() == viewed.run("answers", until).run() == 0
        states = viewed.states_of("cache", until)
        assert statements or states[0] == "catching_up", states
        viewed.expect_equal()
    unclustered = {
        "order_totals": {"public.orders": ["customer_id"]},
        "timeline": {"public.tweets": ["author_id"]},
    }
    fine = {"refused": None, "hint": ""}
    assert viewed.cdc("view", "check") == (
        Exit.OK,
        [{"view": name, **fine, "unclustered": found} for name, found in unclustered.items()],
    )
    (explained,) = viewed.cdc("view", "explain", "timeline")[1]
    assert set(explained["tables"].values()) == {"the affected follower_id"}
    assert {name: last["how"] for name, last in explained["last"].items()} == {
        "answers": "keys",
        "cache": "keys",
    }
    assert all(last["seconds"] > 0 for last in explained["last"].values())
    with viewed.following("lake", "answers", "cache"):
        waited = viewed.cdc("wait", "--for", "view:order_totals", "--timeout", "120s")
        code, verified = viewed.cdc("view", "verify", "--timeout", "120")
    assert (waited[0], list(waited[1]["followers"])) == (Exit.OK, ["answers"])
    assert (code, [each["missing"] + each["extra"] for each in verified]) == (Exit.OK, [0, 0, 0])


@pytest.mark.long("two minutes of Spark; test_view_changes builds a changed view")
def test_a_changed_definition_replaces_the_view_in_one_commit(
    viewed: Viewed,
) -> None:
    """Its definition is then in a file. Readers of the frontier before still have the old rows."""
    made = viewed.pipeline
    made.database.execute(*ROWS)
    made.start().wait_ready()
    viewed.follow("lake", "answers")
    before = viewed.lsn()
    written = yaml.safe_load(made.config_file.read_text())
    del written["views"]["order_totals"]
    written["view_files"] = "views"
    made.config_file.write_text(yaml.safe_dump(written))
    file = made.config_file.with_name("views") / "order_totals.sql"
    file.parent.mkdir()
    file.write_text(f"-- key: id\nSELECT * FROM ({TOTALS}) AS t WHERE id > 15;\n")
    made.database.execute("INSERT INTO customers VALUES (100, 'nobody')")
    viewed.follow("lake", "answers")
    root, names = str(viewed.root / "views"), ["views.order_totals"]
    new = read_as_of_arrow(root, names).tables[names[0]]
    assert sorted(new["id"].to_pylist()) == [16, 17, 18, 19, 20]
    old = read_as_of_arrow(root, names, lsn=before).tables[names[0]]
    assert sorted(old["id"].to_pylist()) == list(range(1, 21))
