"""Views that executors build: the same rows as the driver's, and none of them in the driver."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import yaml
from pyspark.sql import SparkSession

from cdc.config.views import View
from cdc.errors import ConfigError, Exit, NoAnswerError, UnavailableError
from cdc.events import LSN
from cdc.failpoints import VIEW_BUILD_NAMES
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.jobs.views import computing
from lockstep.jobs.views.plans import plan
from lockstep.sinks.contract import Applied, Changes
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from lockstep.sinks.opensearch.sink import OpenSearchSink
from lockstep.sinks.redis.sink import RedisSink
from lockstep.sinks.sql.sink import SqlSettings, SqlSink
from tests.fixtures.commands import CommandSession
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.followed import Followed
from tests.fixtures.servers import Database
from tests.fixtures.store_opensearch import OpenSearchStore
from tests.fixtures.store_postgres import url_of
from tests.fixtures.store_redis import RedisStore
from tests.fixtures.view_list import VIEWS
from tests.fixtures.viewed import Shop, Workload

_SECONDS = 300
MANY = 25_000  # more than a follower reads itself
CHOSEN = {name: VIEWS[name] for name in list(VIEWS)[::6]}
TOTALS = View(
    sql="SELECT c.id, c.name, c.since, count(*) AS orders, max(o.placed) AS newest"
    " FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY c.id, c.name, c.since",
    key=("id",),
)
ORDERS = View(sql="SELECT id, customer_id, state FROM orders", key=("id",))
FILLING = (
    (
        "INSERT INTO customers SELECT n, 'customer ' || n, NULL, date '2026-01-01' + n % 90"
        f" FROM generate_series(1, {MANY // 10}) n"
    ),
    (
        f"INSERT INTO orders SELECT n, n % {MANY // 10} + 1, timestamp '2026-01-01' + n *"
        f" interval '1 minute', 'new' FROM generate_series(1, {MANY}) n"
    ),
)


class CountingSink(DeltaSink):
    """Counts the changes that the driver passes, by table."""

    passed: ClassVar = Counter[str]()

    def write(self, changes: Changes) -> int:
        type(self).passed[changes.version.name] += len(changes.changes)
        return super().write(changes)


class DriversSink(DeltaSink):
    """Takes a view's rows from the driver only."""

    def target(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - as any
        return None


class StoppedSink(CountingSink):
    """Ends before the cut is committed."""

    def commit(self, applied: Applied) -> None:
        raise UnavailableError(f"stopped at {applied.lsn}", hint="")


def _store(kind: type[DeltaSink], path: Path, name: str = "views") -> Callable[[], DeltaSink]:
    return lambda: kind(DeltaSettings("x", name, "x", str(path / name)))


def _contents(
    shop: Shop, store: Callable[[], DeltaSink], view: str
) -> list[tuple[bytes, int, Any]]:
    version = plan(view, shop.config.views, shop.versions).version
    with closing(store()) as sink:
        sink.open()
        found = ((key, seq, json.loads(row)) for key, seq, row in sink.contents(version))
        return sorted(found, key=itemgetter(0))


def _own(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("_")}


def _rows(shop: Shop, store: Callable[[], DeltaSink], view: str) -> list[dict[str, Any]]:
    return [row for _, _, row in _contents(shop, store, view)]


def test_executors_build_each_view_as_the_driver_does(
    database: Database, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a changed definition's rows replace the old ones, and cuts after it are as any."""
    shop, load = Shop(database, tmp_path / "lake", VIEWS, CHOSEN), Workload(database, 7)
    load.run(70)
    shop.cut()
    stores = [_store(CountingSink, tmp_path), _store(DriversSink, tmp_path, "drivers")]
    CountingSink.passed.clear()
    with monkeypatch.context() as patched:
        patched.setattr(computing, "SMALL_ROWS", -1)
        for store in stores:
            assert {how for how, _ in shop.follow(spark, store).values()} == {"build"}
    assert {*CountingSink.passed} == {"views.definitions"}
    for view in CHOSEN:
        one, other = (_contents(shop, store, view) for store in stores)
        assert one == other
        assert shop.differences(view, [row for _, _, row in one]) == ""
    load.run(10)
    shop.cut()
    shop.follow(spark, stores[0])
    wrong = {view: shop.differences(view, _rows(shop, stores[0], view)) for view in CHOSEN}
    assert {view: what for view, what in wrong.items() if what} == {}


def test_the_driver_gets_no_rows_of_a_large_view_and_all_of_a_small_one(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """So the next cut computes one state of the small one only."""
    few = View(sql="SELECT state, count(*) AS n FROM orders GROUP BY state", key=("state",))
    views = {"orders_": ORDERS, "totals": TOTALS, "states": few}
    shop, store = Shop(database, tmp_path / "lake", views), _store(CountingSink, tmp_path)
    database.execute(*FILLING)
    shop.cut()
    CountingSink.passed.clear()
    shop.follow(spark, store)
    assert CountingSink.passed == {"views.definitions": len(views)}
    for view in views:
        assert shop.differences(view, _rows(shop, store, view)) == ""
    CountingSink.passed.clear()
    database.execute("UPDATE orders SET state = 'sent' WHERE id <= 3")
    shop.cut()
    shop.follow(spark, store, restarted=False)
    assert CountingSink.passed == {"views.orders_": 3, "views.states": 2}
    for view in views:
        assert shop.differences(view, _rows(shop, store, view)) == ""


def test_a_build_that_ends_before_its_commit_shows_nothing_and_is_done_again(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Files that no commit names are no rows."""
    shop, path = Shop(database, tmp_path / "lake", {"orders_": ORDERS}), tmp_path / "views"
    database.execute(*FILLING)
    shop.cut()
    with pytest.raises(UnavailableError, match="stopped at"):
        shop.follow(spark, _store(StoppedSink, tmp_path))
    assert list((path / "views.orders_").glob("part-*.parquet")) != []
    store = _store(CountingSink, tmp_path)
    assert _rows(shop, store, "orders_") == []
    shop.cut()
    shop.follow(spark, store)
    assert shop.differences("orders_", _rows(shop, store, "orders_")) == ""


def test_a_changed_definition_is_replaced_in_one_commit(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Its columns, too; a reader of the frontier before has the old rows."""
    shop, store = Shop(database, tmp_path / "lake", {"v": ORDERS}), _store(CountingSink, tmp_path)
    database.execute(*FILLING)
    shop.cut()
    shop.follow(spark, store)
    was = LSN(shop.seq)
    changed = View(sql="SELECT id, placed FROM orders WHERE id % 2 = 0", key=("id",))
    shop.config = msgspec.structs.replace(shop.config, views={"v": changed})
    shop.cut()
    CountingSink.passed.clear()
    assert shop.follow(spark, store)["v"][0] == "build"
    assert CountingSink.passed == {"views.definitions": 1}
    assert shop.differences("v", _rows(shop, store, "v")) == ""
    before = read_as_of_arrow(str(tmp_path / "views"), ["views.v"], lsn=was).tables["views.v"]
    assert (before.num_rows, "state" in before.column_names) == (MANY, True)


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT customer_id AS id, state FROM orders", "several rows with one id"),
        ("SELECT nullif(id, 7) AS id FROM orders", "rows without id"),
    ],
)
def test_rows_with_a_wrong_key_halt_the_follower(
    database: Database, tmp_path: Path, spark: SparkSession, sql: str, says: str
) -> None:
    """As executors find them, and once: no task is tried again."""
    shop = Shop(database, tmp_path / "lake", {"v": View(sql=sql, key=("id",))})
    database.execute(*FILLING)
    shop.cut()
    with pytest.raises(ConfigError, match=f"view v has {says}") as raised:
        shop.follow(spark, _store(CountingSink, tmp_path))
    assert raised.value.hint.startswith("`key` must identify")


def test_tasks_write_to_redis_and_replace_what_is_there(
    database: Database, tmp_path: Path, spark: SparkSession, redis_store: RedisStore
) -> None:
    shop = Shop(database, tmp_path / "lake", {"v": ORDERS})
    settings = redis_store.settings._replace(prefix="built")
    database.execute(*FILLING)

    def stored() -> list[dict[str, Any]]:
        names = list(redis_store.client.scan_iter("built:views.v:*", count=5_000))
        found: Any = redis_store.client.mget(names)
        return [_own(json.loads(each)) for each in found]

    for sql in (ORDERS.sql, f"{ORDERS.sql} WHERE id % 3 > 0"):
        shop.config = msgspec.structs.replace(shop.config, views={"v": View(sql=sql, key=("id",))})
        shop.cut()
        shop.follow(spark, lambda: RedisSink(settings))
        assert shop.differences("v", stored()) == ""


def test_tasks_load_rows_for_a_cut_of_postgres(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Readers have the old rows until it takes them; an index of theirs stays, no other table."""
    shop, seen = Shop(database, tmp_path / "lake", {"v": ORDERS}), list[int]()
    database.execute(*FILLING)

    class ReadSink(SqlSink):
        """Fails if the driver passes rows; reads those that are there before the commit."""

        def write(self, changes: Changes) -> int:
            assert not changes.changes or changes.version.table == "definitions"
            return super().write(changes)

        def commit(self, applied: Applied) -> None:
            with database.connect() as connection:
                found = connection.execute("SELECT to_regclass('views.v')").fetchone()
                if found != (None,):
                    seen.extend(connection.execute("SELECT count(*) FROM views.v").fetchone() or ())
            super().commit(applied)

    def store() -> ReadSink:
        return ReadSink(SqlSettings(url_of(database), "copy"))

    with closing(store()) as sink:  # of a build that was killed
        sink.open()
        sink.loader(plan("v", shop.config.views, shop.versions).version)
    for sql in (ORDERS.sql, f"{ORDERS.sql} WHERE id % 3 > 0"):
        shop.config = msgspec.structs.replace(shop.config, views={"v": View(sql=sql, key=("id",))})
        shop.cut()
        shop.follow(spark, store)
        with database.connect() as connection:
            stored = connection.execute("SELECT id, customer_id, state FROM views.v").fetchall()
            names = connection.execute("SELECT relname FROM pg_class").fetchall()
            indexes = connection.execute("SELECT indexname FROM pg_indexes").fetchall()
            wanted = connection.execute(sql).fetchall()
        assert sorted(stored) == sorted(wanted)
        assert [name for (name,) in names if name.startswith("_lockstep_load")] == []
        if seen:
            assert ("mine",) in indexes
        else:
            database.execute("CREATE INDEX mine ON views.v (customer_id)")
    assert seen == [MANY]


def test_tasks_write_to_opensearch_and_replace_what_is_there(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    opensearch_store: OpenSearchStore,
) -> None:
    monkeypatch.setattr(computing, "SMALL_ROWS", -1)
    shop, passed = Shop(database, tmp_path / "lake", {"v": ORDERS}), Counter[str]()
    database.execute("INSERT INTO orders (id, state) SELECT n, 'x' FROM generate_series(1, 6000) n")

    def sink() -> OpenSearchSink:
        made = opensearch_store.sink()
        write = made.write

        def counting(changes: Changes) -> int:
            passed[changes.version.name] += len(changes.changes)
            return write(changes)

        monkeypatch.setattr(made, "write", counting)
        return made

    for sql in (ORDERS.sql, f"{ORDERS.sql} WHERE id % 3 > 0"):
        shop.config = msgspec.structs.replace(shop.config, views={"v": View(sql=sql, key=("id",))})
        shop.cut()
        shop.follow(spark, sink)
        stored = opensearch_store.rows_by("id", "views.v")
        assert shop.differences("v", [_own(row) for row in stored.values()]) == ""
    assert passed["views.v"] == 0


@pytest.mark.parametrize("restarted", [False, True], ids=["same-job", "next-job"])
def test_a_replacing_cut_that_is_interrupted_keeps_all_rows_in_opensearch(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    opensearch_store: OpenSearchStore,
    *,
    restarted: bool,
) -> None:
    """It has started an empty index in place of the one that readers see."""
    views = {
        "a": View(sql="SELECT id, customer_id FROM orders", key=("id",)),
        "v": View(sql="SELECT id, 7 / customer_id AS n FROM orders", key=("id",)),
    }
    was = views | {"v": View(sql="SELECT id, customer_id AS n FROM orders", key=("id",))}
    shop = Shop(database, tmp_path / "lake", was)
    database.execute(
        "INSERT INTO orders (id, customer_id) SELECT n, n FROM generate_series(1, 9) n"
    )
    shop.cut()
    shop.follow(spark, opensearch_store.sink)
    shop.config = msgspec.structs.replace(shop.config, views=views)
    database.execute("INSERT INTO orders (id, customer_id) VALUES (10, 0)")
    shop.cut()
    with pytest.raises(NoAnswerError, match="view v has no answer"):
        shop.follow(spark, opensearch_store.sink)
    database.execute("DELETE FROM orders WHERE id = 10", "DELETE FROM orders WHERE id = 2")
    shop.cut()

    class Away(OpenSearchSink):
        """Fails once it has started an empty index."""

        def write(self, changes: Changes) -> int:
            super().write(changes._replace(changes=[]))
            raise UnavailableError("the store is away", hint="")

    with pytest.raises(UnavailableError):
        shop.follow(spark, lambda: Away(opensearch_store.options), restarted=False)
    shop.follow(spark, opensearch_store.sink, restarted=restarted)
    for view in views:
        stored = opensearch_store.rows_by("id", f"views.{view}")
        assert shop.differences(view, [_own(row) for row in stored.values()]) == ""


@pytest.mark.long("three jobs with Spark, of which two are killed")
def test_a_build_that_is_killed_is_done_by_the_next_job(
    pipeline: NewPipeline, spark: SparkSession, tmp_path: Path
) -> None:
    """The first build, and one by another definition: until then readers have the old rows."""
    place = tmp_path / "views"
    made: PipelineUnderTest = pipeline(
        "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, placed timestamp, state text)",
        views={"v": {"sql": ORDERS.sql, "key": ["id"]}},
        followers={
            "lake": {"delta": {"path": str(tmp_path / "lake")}},
            "answers": {"mirror": "lake", "views": ["v"], "delta": {"path": str(place)}},
        },
    )
    made.start().wait_ready()
    made.database.execute(FILLING[1])
    lake, (failpoint,) = Followed(made, spark), VIEW_BUILD_NAMES
    lake.follow("lake")
    was = 0
    for sql, many in ((ORDERS.sql, MANY), (f"{ORDERS.sql} WHERE id > 9", MANY - 9)):
        written = yaml.safe_load(made.config_file.read_text())
        written["views"]["v"]["sql"] = sql
        made.config_file.write_text(yaml.safe_dump(written))
        with lake.following("lake"):
            assert _applied(made.config_file, tmp_path, failpoint) == -signal.SIGKILL
            if was:
                assert read_as_of_arrow(str(place), ["views.v"]).tables["views.v"].num_rows == was
            assert _applied(made.config_file, tmp_path) == Exit.OK
        assert read_as_of_arrow(str(place), ["views.v"]).tables["views.v"].num_rows == many
        was = many


def _applied(config_file: Path, folder: Path, failpoint: str = "") -> int:
    """Return the exit code of `cdc view apply`."""
    command = CommandSession(
        config_file, "view", "apply", log=folder / "apply.log", scratch=folder / "scratch",
        failpoint=failpoint,
    )  # fmt: skip
    try:
        return command.process.wait(_SECONDS)
    finally:
        print(command.log)  # noqa: T201 - pytest shows it where the test failed
        command.kill()
