"""`cdc view plan`, `apply`, `rebuild` and `drop` on a running pipeline, in four stores."""

from __future__ import annotations

import json
import signal
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from pyspark.sql import SparkSession

from cdc.errors import Exit, LagError
from cdc.failpoints import VIEW_NAMES, VIEW_REQUEST_NAMES
from cdc.log import follower_reports
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.changing_views import Patience, build, drop, planned, rebuild
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures.commands import CommandSession, completed
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import Followed
from tests.fixtures.store_redis import RedisStore
from tests.fixtures.store_topic import rows_of

_SECONDS = 400
PRICES = "SELECT id, price * 2 AS twice FROM products"
NAMES = "SELECT id, name FROM products WHERE id > 3"
CHANGED = "SELECT id, price * 3 AS thrice, name FROM products WHERE id < 9"
SHARES = "SELECT id, id * 100 / price::int AS share FROM products"
ROWS = "INSERT INTO products SELECT n, 'product ' || n, n * 1.25 FROM generate_series(1, 12) n"
DECLARED = {"prices": {"sql": PRICES, "key": ["id"]}, "names": {"sql": NAMES, "key": ["id"]}}
WITHOUT = "has no answer, in Postgres neither: division by zero, at "
STORES = ("answers", "cache", "table", "stream")


class Changed(Followed):
    """A pipeline with views in Delta, Redis, SQLite and topics, and its commands."""

    client: redis.Redis
    root: Path

    def declare(self, views: dict[str, Any]) -> None:
        """Write a configuration with these views in each store."""
        file = self.pipeline.config_file
        written = yaml.safe_load(file.read_text())
        written["views"] = views
        for name in STORES:
            written["followers"][name]["views"] = sorted(views)
        file.write_text(yaml.safe_dump(written))

    def cdc(self, *arguments: str, failpoint: str = "") -> tuple[int, Any, str]:
        """Run a command with --json; return its exit code, what it printed, and its errors."""
        done = completed(self.pipeline.config_file, *arguments, "--json", failpoint=failpoint)
        printed = json.loads(done.stdout) if done.stdout else None
        return done.returncode, printed, done.stderr.decode()

    def plan(self) -> tuple[int, dict[str, set[str]]]:
        """Return the exit code of `cdc view plan`, and the states of each view."""
        code, found, error = self.cdc("view", "plan")
        assert found is not None, error
        states: dict[str, set[str]] = {}
        for each in found:
            states.setdefault(each["view"], set()).add(each["state"])
        return code, states

    def states(self) -> dict[str, set[str]]:
        """Return the states of each view in the plan."""
        states: dict[str, set[str]] = {}
        for each in planned(self.config):
            states.setdefault(each.view, set()).add(each.state)
        return states

    def stored(self, view: str) -> list[list[dict[str, Any]]]:
        """Return a view's rows in each store, by id."""
        name = f"views.{view}"
        delta = read_as_of_arrow(str(self.root / "views"), [name]).tables[name].to_pylist()
        topic = rows_of(self.pipeline.bootstrap, f"{self.prefix}-stream.{name}").values()
        return [
            sorted(map(_plain, rows), key=lambda row: int(row["id"]))
            for rows in (delta, list(self._in_redis(view)), self.in_table(view), topic)
        ]

    def in_table(self, view: str) -> list[dict[str, Any]]:
        """Return a view's rows in SQLite."""
        with closing(sqlite3.connect(self.root / "table.db")) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f"SELECT * FROM {view}")]

    def damage(self, view: str) -> None:
        """Delete a row of a view in SQLite, and change another."""
        with closing(sqlite3.connect(self.root / "table.db")) as connection, connection:
            found = [
                connection.execute(f"DELETE FROM {view} WHERE id = 7"),
                connection.execute(f"UPDATE {view} SET id = 99 WHERE id = 8"),
            ]
            assert [each.rowcount for each in found] == [1, 1]

    def runs(self, follower: str) -> bool:
        """Return whether a follower's job reports that it runs."""
        record = follower_reports.read(self.config).get(follower)
        return record is not None and record.runs

    def expect_running(self, runs: Mapping[str, FollowerRun]) -> None:
        """Fail unless all of these follow, soon."""
        fine = {"following", "catching_up"}
        wait_until(lambda: {run.state for run in runs.values()} <= fine, "a follower does not run")

    def _in_redis(self, view: str) -> Iterator[dict[str, Any]]:
        for key in self.client.scan_iter(f"{self.prefix}-{view}:*"):
            value: Any = self.client.get(key)
            yield json.loads(value)

    def expect_equal(self, view: str, sql: str) -> None:
        """Fail unless each store has Postgres' answer."""
        with self.pipeline.database.connect() as connection:
            found = connection.execute(sql.encode())
            names = [each.name for each in found.description or ()]
            wanted = [_plain(dict(zip(names, row, strict=True))) for row in found]
        wanted.sort(key=lambda row: int(row["id"]))
        assert wanted, "a view without rows shows nothing"
        assert self.stored(view) == [wanted] * len(STORES)


def _plain(row: dict[str, Any]) -> dict[str, str]:
    """Return a row's own columns as texts: stores have numeric as numbers or as text."""
    return {
        name: str(value) for name, value in row.items()
        if not name.startswith("_") and value is not None
    }  # fmt: skip


@pytest.fixture
def changed(
    pipeline: NewPipeline, spark: SparkSession, redis_store: RedisStore, tmp_path: Path
) -> Changed:
    made: PipelineUnderTest = pipeline(
        "CREATE TABLE products (id int PRIMARY KEY, name text, price numeric(8,2))",
        views=DECLARED,
        followers={"lake": {"delta": {"path": str(tmp_path / "lake")}}},
    )
    written = yaml.safe_load(made.config_file.read_text())
    prefix = made.config.prefix
    of_views = {"mirror": "lake", "views": sorted(DECLARED)}
    shapes = {
        f"views.{name}": {"form": "row", "key": f"{prefix}-{name}:{{id}}"} for name in DECLARED
    }
    written["followers"] |= {
        "answers": {**of_views, "delta": {"path": str(tmp_path / "views")}},
        "cache": {**of_views, "redis": {"url": redis_store.settings.url, "shapes": shapes}},
        "stream": {**of_views, "topic": {}},
        "table": {**of_views, "sql": {"url": f"sqlite:///{tmp_path / 'table.db'}"}},
    }
    made.config_file.write_text(yaml.safe_dump(written))
    found = Changed(made, spark)
    found.client, found.root = redis_store.client, tmp_path
    return found


def test_a_changed_view_is_built_and_a_dropped_ones_rows_are_deleted(changed: Changed) -> None:
    """In all stores, while the mirror's follower runs; a view that nothing changed stays."""
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake")
    with changed.following("lake"):
        assert changed.states() == {"prices": {"new"}, "names": {"new"}}
        build(changed.config, Patience(_SECONDS))
        changed.expect_equal("prices", PRICES)
        changed.expect_equal("names", NAMES)
        assert changed.plan() == (Exit.OK, {"prices": {"unchanged"}, "names": {"unchanged"}})

        code, _, error = changed.cdc("view", "drop", "names", "--yes")
        assert code == Exit.CONFIG
        assert f"view names is declared in {changed.pipeline.config_file}:" in error
        changed.declare({"prices": {"sql": CHANGED, "key": ["id"]}})
        assert changed.plan() == (Exit.FAILED, {"prices": {"changed"}, "names": {"dropped"}})
        build(changed.config, Patience(_SECONDS))
        changed.expect_equal("prices", CHANGED)
        changed.expect_equal("names", NAMES)

        assert drop(changed.config, STORES, "names", Patience(_SECONDS)) == set(STORES)
        assert changed.stored("names") == [[]] * len(STORES)
        changed.expect_equal("prices", CHANGED)
        assert changed.states() == {"prices": {"unchanged"}}
        assert drop(changed.config, STORES, "names", Patience(_SECONDS)) == set()


@pytest.mark.long("five followers are started twice: a minute")
def test_a_follower_that_runs_builds_its_views_itself(changed: Changed) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    changed.declare({"prices": {"sql": CHANGED, "key": ["id"]}})
    with changed.following("lake", *STORES):
        build(changed.config, Patience(_SECONDS))
        changed.expect_equal("prices", CHANGED)
        changed.expect_equal("names", NAMES)


@pytest.mark.long("five followers are started twice: a minute", sample=["True"])
@pytest.mark.parametrize("declares", [True, False])
def test_a_follower_that_runs_deletes_a_dropped_view_itself(
    changed: Changed, *, declares: bool
) -> None:
    """Whether or not the configuration that it was started with still declares the view."""
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    kept = {"prices": DECLARED["prices"]}
    if not declares:
        changed.declare(kept)
    with changed.following("lake", *STORES) as runs:
        changed.expect_running(runs)
        changed.declare(kept)
        assert drop(changed.config, STORES, "names", Patience(_SECONDS)) == set(STORES)
        assert changed.stored("names") == [[]] * len(STORES)
        changed.pipeline.database.execute("UPDATE products SET price = price + 1, name = 'other'")
        changed.reach(*runs.values())
        changed.expect_equal("prices", PRICES)
        assert changed.stored("names") == [[]] * len(STORES)
        assert changed.states() == {"prices": {"unchanged"}}


def test_a_view_without_an_answer_is_dropped_while_its_follower_waits(changed: Changed) -> None:
    changed.declare(DECLARED | {"prices": {"sql": SHARES, "key": ["id"]}})
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    with changed.following("lake", *STORES) as runs:
        changed.pipeline.database.execute("UPDATE products SET price = 0, name = 'other'")
        waiting = [runs[name] for name in STORES]
        wait_until(lambda: {run.state for run in waiting} == {"waiting"}, "one has an answer", 120)
        changed.declare({"names": DECLARED["names"]})
        assert drop(changed.config, STORES, "prices", Patience(_SECONDS)) == set(STORES)
        assert changed.stored("prices") == [[]] * len(STORES)
        changed.expect_equal("names", NAMES)
        changed.expect_running(runs)


@pytest.mark.long("jobs with Spark, which are killed", sample=[f"{VIEW_REQUEST_NAMES[0]}:2"])
@pytest.mark.parametrize(
    "failpoint", [f"{name}:{count}" for name in VIEW_REQUEST_NAMES for count in (1, 2, 3)]
)
def test_what_a_killed_job_has_not_deleted_the_command_deletes(
    changed: Changed, tmp_path: Path, failpoint: str
) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", "table")
    job = CommandSession(
        changed.pipeline.config_file,
        *("follow", "--followers", "table"),
        log=tmp_path / "follow.log",
        scratch=tmp_path / "scratch",
        failpoint=failpoint,
    )
    with changed.following("lake"):
        wait_until(lambda: changed.runs("table"), "the job does not run", 120)
        changed.declare({"prices": DECLARED["prices"]})
        assert drop(changed.config, ["table"], "names", Patience(_SECONDS)) == {"table"}
        assert job.process.wait(_SECONDS) == -signal.SIGKILL, job.log
        job.kill()
        assert changed.in_table("names") == []
        assert changed.in_table("prices") != []


def test_a_view_is_computed_again_by_the_job_that_runs_or_else_by_the_command(
    changed: Changed, capsys: pytest.CaptureFixture[str]
) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.declare({"prices": DECLARED["prices"]})
    changed.follow("lake", *STORES)
    with changed.following("lake"):
        assert changed.client.delete(f"{changed.prefix}-prices:3")
        rebuild(changed.config, ["cache"], "prices", Patience(_SECONDS))
        changed.expect_equal("prices", PRICES)
        with changed.following("cache") as runs:
            changed.expect_running(runs)
            assert changed.client.delete(f"{changed.prefix}-prices:3")
            rebuild(changed.config, ["cache"], "prices", Patience(_SECONDS))
            changed.expect_equal("prices", PRICES)
            work = runs["cache"].progress.views["prices"]
            assert (work.how, work.why) == ("build", "cdc view rebuild has asked for it")
            assert "its job is asked to compute prices again" in capsys.readouterr().err

            changed.declare(DECLARED)  # which the job has not read
            with pytest.raises(LagError, match="view names: cache has not computed it again"):
                rebuild(changed.config, ["cache"], "names", Patience(5))
            changed.expect_running(runs)


@pytest.mark.long("three followers with Spark; the command and one job are in the test before")
def test_two_commands_have_a_view_computed_again_while_rows_change(changed: Changed) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    stopping = threading.Event()

    def change() -> None:
        while not stopping.wait(0.05):
            changed.pipeline.database.execute(
                "UPDATE products SET price = price + 1 WHERE id = 1 + (random() * 11)::int"
            )

    with changed.following("lake", "cache", "table") as runs, ThreadPoolExecutor(3) as threads:
        changed.expect_running(runs)
        changing = threads.submit(change)
        try:
            assert changed.client.delete(f"{changed.prefix}-names:7")
            changed.damage("names")
            both = [
                threads.submit(rebuild, changed.config, each, "names", Patience(_SECONDS))
                for each in (["cache", "table"], ["table", "cache"])
            ]
            for each in both:
                each.result()
        finally:
            stopping.set()
        changing.result()
        changed.reach(*runs.values())
        changed.follow("answers", "stream")
        changed.expect_equal("names", NAMES)
        changed.expect_equal("prices", PRICES)


@pytest.mark.long("jobs with Spark, which are killed", sample=["view_written:1"])
@pytest.mark.parametrize(
    "failpoint",
    [
        *(f"{VIEW_REQUEST_NAMES[0]}:1", f"{VIEW_REQUEST_NAMES[1]}:1"),
        *(f"{VIEW_NAMES[0]}:1", f"{VIEW_NAMES[0]}:2", f"{VIEW_REQUEST_NAMES[1]}:2"),
    ],
)
def test_what_a_killed_job_has_not_computed_again_the_command_computes(
    changed: Changed, tmp_path: Path, failpoint: str
) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    job = CommandSession(
        changed.pipeline.config_file,
        *("follow", "--followers", "table"),
        log=tmp_path / "follow.log",
        scratch=tmp_path / "scratch",
        failpoint=failpoint,
    )
    with changed.following("lake"):
        wait_until(lambda: changed.runs("table"), "the job does not run", 120)
        changed.damage("prices")
        rebuild(changed.config, ["table"], "prices", Patience(_SECONDS))
        changed.expect_equal("prices", PRICES)
        assert job.process.wait(_SECONDS) == -signal.SIGKILL, job.log
        job.kill()
        changed.expect_equal("names", NAMES)


@pytest.mark.long("a job with Spark")
def test_a_rebuild_reports_where_it_has_computed_the_view(changed: Changed) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    with changed.following("lake"):
        assert changed.client.delete(f"{changed.prefix}-prices:3")
        code, found, error = changed.cdc("view", "rebuild", "prices")
        assert code == Exit.OK, error
        changed.expect_equal("prices", PRICES)
    assert found == [
        {"view": "prices", "follower": each} for each in changed.config.followers if each != "lake"
    ]


@pytest.mark.long("six jobs with Spark, of which five are killed")
@pytest.mark.parametrize(
    "failpoints",
    [
        [f"{name}:{count}" for count in (1, 1, 1) for name in VIEW_REQUEST_NAMES],
        ["view_request_written:2", "view_request_written:2"],
    ],
)
def test_a_drop_that_is_killed_anywhere_is_done_by_the_next_one(
    changed: Changed, failpoints: list[str]
) -> None:
    """Each process is killed one step after the one before."""
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    changed.declare({"prices": {"sql": PRICES, "key": ["id"]}})
    drop = ("view", "drop", "names", "--yes")
    with changed.following("lake"):
        for each in failpoints:
            code, _, error = changed.cdc(*drop, failpoint=each)
            assert code == -signal.SIGKILL, error
            assert changed.states()["prices"] == {"unchanged"}
        code, _, error = changed.cdc(*drop)
        assert code == Exit.OK, error
        assert changed.stored("names") == [[]] * len(STORES)
        changed.expect_equal("prices", PRICES)
        assert changed.plan() == (Exit.OK, {"prices": {"unchanged"}})


def test_views_wait_for_a_frontier_at_which_they_have_an_answer(changed: Changed) -> None:
    """In all stores: readers keep the rows before, and the job continues by itself."""
    changed.declare(DECLARED | {"prices": {"sql": SHARES, "key": ["id"]}})
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    before = changed.stored("prices"), changed.stored("names")
    with changed.following("lake", *STORES) as runs:
        changed.pipeline.database.execute(
            "UPDATE products SET price = 0 WHERE id = 3; DELETE FROM products WHERE id = 5"
        )
        waiting = [runs[name] for name in STORES]
        wait_until(
            lambda: all(run.state == "waiting" and run.error for run in waiting),
            "one has not met it",
            120,
        )
        for run in waiting:
            assert run.error is not None
            assert run.error.what.startswith(f"view prices {WITHOUT}"), run.error
        assert (changed.stored("prices"), changed.stored("names")) == before
        changed.pipeline.database.execute("UPDATE products SET price = 4 WHERE id = 3")
        changed.reach(*runs.values())
        changed.expect_equal("prices", SHARES)
        changed.expect_equal("names", NAMES)


@pytest.mark.long("four jobs with Spark, which are killed")
def test_what_a_killed_job_has_written_is_replaced_where_a_view_has_no_answer(
    changed: Changed, tmp_path: Path
) -> None:
    """The interrupted cut can't be repeated, and a row that it has written is deleted since."""
    changed.declare(DECLARED | {"prices": {"sql": SHARES, "key": ["id"]}})
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS, "UPDATE products SET price = 0 WHERE id = 3")
    changed.follow("lake")
    for name in STORES:
        job = CommandSession(
            changed.pipeline.config_file,
            *("follow", "--followers", name),
            log=tmp_path / "follow.log",
            scratch=tmp_path / "scratch",
            failpoint=f"{VIEW_NAMES[0]}:2",  # the definitions come first
        )
        assert job.process.wait(_SECONDS) == -signal.SIGKILL, job.log
        job.kill()
    changed.pipeline.database.execute(
        "DELETE FROM products WHERE id = 5", "UPDATE products SET price = 4 WHERE id = 3"
    )
    with changed.following("lake", *STORES) as runs:
        changed.reach(*runs.values())
        changed.expect_equal("prices", SHARES)
        changed.expect_equal("names", NAMES)


@pytest.mark.long("two jobs with Spark")
def test_apply_reports_what_it_has_built(changed: Changed) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake")
    with changed.following("lake"):
        code, applied, error = changed.cdc("view", "apply")
        assert code == Exit.OK, error
        assert {(each["was"], each["state"]) for each in applied} == {("new", "unchanged")}
        code, applied, error = changed.cdc("view", "apply")
        assert (code, {each["was"] for each in applied}) == (Exit.OK, {"unchanged"}), error
        changed.expect_equal("prices", PRICES)


@pytest.mark.long("half a minute of Spark; refusals have unit tests")
def test_a_refused_view_keeps_all_others_as_they_are(changed: Changed) -> None:
    changed.pipeline.start().wait_ready()
    changed.pipeline.database.execute(ROWS)
    changed.follow("lake", *STORES)
    before = changed.stored("prices")
    refused = {"sql": "SELECT id, lower(name) AS name FROM products", "key": ["id"]}
    changed.declare({"prices": {"sql": CHANGED, "key": ["id"]}, "names": refused})
    code, states = changed.plan()
    assert (code, states["names"]) == (Exit.CONFIG, {"refused"})
    code, _, error = changed.cdc("view", "apply")
    assert code == Exit.CONFIG
    assert "nothing was changed" in error
    assert "view names: a view can't have lower" in error
    assert changed.stored("prices") == before
