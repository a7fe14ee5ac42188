"""Maintained views are Postgres' own answers at each frontier of their mirror, in every store."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc.config.views import View
from cdc.errors import OvertakenError, UnavailableError
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.apply.following_views import ViewsFollowing
from lockstep.jobs.views import computing, definitions, reducing, states
from lockstep.jobs.views.cuts import ViewCuts
from lockstep.sinks.contract import Applied, Changes, Sink, Version
from lockstep.sinks.delta import plain
from tests.fixtures.servers import Database
from tests.fixtures.view_list import FULL, STRICT, VIEWS
from tests.fixtures.viewed import Shop, Workload, same

PARTS = 5


def _rows(store: str, view: str) -> list[dict[str, Any]]:
    return list(STORES[store].rows(f"views.{view}").values())


@pytest.mark.commit("each supported clause of a view")
@pytest.mark.long("the views in five parts, of which one has each kind of join", sample=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_each_view_is_postgres_own_answer_after_each_cut(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    part: int,
) -> None:
    """Of a random workload with new keys, deletes and truncates over six tables.

    First Spark reads Delta tables; then the follower knows the last answers, and only the rows are
    read that the affected ones depend on; then it was restarted, and reads all rows of the small
    tables; then Spark reads their files. From the second cut on, the store first takes a part of
    one, and there are more changes before it is repeated.
    """
    views = {name: VIEWS[name] for name in list(VIEWS)[part::PARTS]}
    shop, name = Shop(database, tmp_path / "lake", VIEWS, views), str(tmp_path)
    load, faults, store = Workload(database, part), Random(part), partial(MemorySink, name)
    wrong, done, read_here = [], dict[str, set[str]](), set[tuple[int, str]]()
    small, reduced = (states, "SMALL_ROWS"), (reducing, "MOST_ROWS")
    limits = [[(plain, "MOST_FILES")], [small], [], [small, reduced]]
    for step in range(len(limits)):
        load.run(70 if step == 0 else 10)
        shop.cut()
        with monkeypatch.context() as patched:
            for limit in limits[step]:
                patched.setattr(*limit, 0)
            if step:
                shop.tear(spark, store, faults)
                load.run(5)
                shop.cut()
            found = decisions = shop.follow(spark, store, restarted=step > 1)
            while found:
                decisions = found
                for view, (how, why) in decisions.items():
                    done.setdefault(view, set()).add(how)
                    if how == "keys" and "made of" in why:
                        read_here.add((step, view))
                found = shop.follow(spark, store, restarted=step > 1)
        wrong += [
            f"cut {step}, {decisions[view]}, {differing}"
            for view in views
            if (differing := shop.differences(view, _rows(name, view)))
        ]
    assert wrong == []
    assert {step for step, _ in read_here} == {1, 2}
    assert [view for view in views if view in STRICT and "full" in done[view]] == []
    assert [view for view in views if view in FULL and not done[view] & {"full", "keys"}] == []


def test_a_view_that_is_declared_again_while_it_is_dropped_is_computed_again(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Its rows may be deleted or not: another process may have been killed before or after."""
    views = {
        name: View(sql="SELECT id, name FROM customers", key=("id",)) for name in ("kept", "again")
    }
    shop, name = Shop(database, tmp_path / "lake", views), str(tmp_path)
    with_both = shop.config
    only = msgspec.structs.replace(with_both.followers["views"], views=("kept",))
    with_one = msgspec.structs.replace(with_both, followers=with_both.followers | {"views": only})
    database.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'b')")
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name))
    for steps in (1, 2):
        shop.config = with_one
        for step in range(steps):
            shop.cut()
            with closing(MemorySink(name)) as sink:
                shop.drop_step(spark, sink, "again", step)
        assert len(_rows(name, "again")) == 2 * (steps == 1)
        shop.config = with_both
        shop.cut()
        decisions = shop.follow(spark, lambda: MemorySink(name))
        assert {view: how for view, (how, _) in decisions.items()} == {
            "kept": "nothing", "again": "build",
        }  # fmt: skip
        assert shop.differences("again", _rows(name, "again")) == ""


@pytest.mark.parametrize("read", ["here", "files", "delta"])
def test_a_column_that_a_mirror_lacks_is_null(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    read: str,
) -> None:
    """A column without values is added to a mirror with the next rows of its table."""
    if read != "here":
        monkeypatch.setattr(states, "SMALL_ROWS", 0)
    if read == "delta":
        monkeypatch.setattr(plain, "plain_files", lambda _: None)
    noted = View(
        sql="SELECT o.id, c.name, c.note FROM orders o JOIN customers c ON c.id = o.customer_id",
        key=("id",),
    )
    shop, store = Shop(database, tmp_path / "lake", {"noted": noted}), str(tmp_path)
    database.execute("INSERT INTO customers VALUES (1, 'a')", "INSERT INTO orders VALUES (1, 1)")
    shop.cut()
    database.execute("ALTER TABLE customers ADD COLUMN note text")
    shop.altered("customers")
    database.execute("INSERT INTO orders VALUES (2, 1)")
    shop.expect_answers(spark, store, 1)
    DeltaTable(tmp_path / "lake" / "public.customers").optimize.compact()
    database.execute("INSERT INTO orders VALUES (3, 1)")
    shop.expect_answers(spark, store, 2)
    database.execute("UPDATE customers SET note = 'b'", "INSERT INTO orders VALUES (4, 1)")
    shop.expect_answers(spark, store, 3)


_OF_CUSTOMERS = View(
    sql="SELECT o.id, c.name, c.region, c.since FROM orders o JOIN customers c"
    " ON c.id = o.customer_id",
    key=("id",),
    refresh="strict",
)


@pytest.mark.parametrize("small_rows", [states.SMALL_ROWS, 0])
@pytest.mark.parametrize(
    ("statements", "columns"),
    [
        (
            (
                "ALTER TABLE customers DROP COLUMN since",
                "ALTER TABLE customers ADD COLUMN since date DEFAULT '1970-01-08'",
            ),
            {"since": b"7"},
        ),
        (
            (
                "ALTER TABLE customers RENAME COLUMN name TO x",
                "ALTER TABLE customers RENAME COLUMN region TO name",
                "ALTER TABLE customers RENAME COLUMN x TO region",
            ),
            {"name": "region", "region": "name"},
        ),
    ],
)
def test_ddl_that_changes_the_values_of_a_column_reaches_views(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    statements: tuple[str, ...],
    columns: dict[str, str | bytes],
    small_rows: int,
) -> None:
    """No event reports it, rows keep their seqs, and names and types are what they were."""
    monkeypatch.setattr(states, "SMALL_ROWS", small_rows)
    shop, store = Shop(database, tmp_path / "lake", {"v": _OF_CUSTOMERS}), str(tmp_path)
    database.execute(
        "INSERT INTO customers VALUES (1, 'a', 'b', '2026-01-01')",
        "INSERT INTO orders VALUES (1, 1)",
    )
    shop.expect_answers(spark, store, 1)
    database.execute(*statements, "INSERT INTO orders VALUES (2, 1)")
    shop.alter("customers", columns)
    shop.expect_answers(spark, store, 2)


def test_ddl_that_no_view_reads_computes_none_again(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """A new column, with values or without, and one that is renamed and has another type."""
    shop, store = Shop(database, tmp_path / "lake", {"v": _OF_CUSTOMERS}), str(tmp_path)
    database.execute(
        "INSERT INTO customers VALUES (1, 'a', 'b', '2026-01-01')",
        "INSERT INTO orders VALUES (1, 1)",
    )
    shop.expect_answers(spark, store, 1)
    steps: tuple[tuple[str, dict[str, str | bytes]], ...] = (
        ("ADD COLUMN note int DEFAULT 7", {"note": b"7"}),
        ("ADD COLUMN other text", {"other": b"null"}),
        ("RENAME COLUMN note TO remark", {"remark": "note"}),
        ("ALTER COLUMN other TYPE varchar", {}),
    )
    for number, (statement, columns) in enumerate(steps, 2):
        database.execute(
            f"ALTER TABLE customers {statement}", f"INSERT INTO orders VALUES ({number}, 1)"
        )
        shop.alter("customers", columns)
        shop.cut()
        decisions = shop.follow(spark, lambda: MemorySink(store), restarted=False)
        assert decisions["v"][0] == "keys", (statement, decisions)
        assert shop.differences("v", _rows(store, "v")) == ""


class Killed(BaseException):
    """A process is killed."""


class DeletesLast(MemorySink):
    """Writes rows one by one, and deletes those below a truncate last, as the sink of Redis does.

    The process is killed before the store's call of a number.
    """

    def __init__(self, name: str, kill_at: float = inf) -> None:
        super().__init__(name)
        self.calls, self._kill_at, self._truncates = 0, kill_at, list[Changes]()

    def _call(self) -> None:
        self.calls += 1
        if self.calls > self._kill_at:
            raise Killed

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        self._call()
        super().begin(reached, versions, above)

    def write(self, changes: Changes) -> int:
        new = 0
        for each in changes.changes:
            self._call()
            new += super().write(changes._replace(changes=[each], truncated=None))
        if changes.truncated is not None:
            self._truncates.append(changes._replace(changes=[]))
        return new

    def commit(self, applied: Applied) -> None:
        for each in self._truncates:
            self._call()
            super().write(each)
        self._truncates.clear()
        self._call()
        super().commit(applied)


class Rebuilding(ViewsFollowing):
    """A follower of a shop's views that applies a cut when asked to."""

    def __init__(self, shop: Shop, spark: SparkSession, sink: Sink, request: str = "") -> None:
        self._of_shop = shop.views(spark)
        asked = ("v", request) if request else None
        super().__init__(shop.config, "views", sink, once=bool(request), rebuild=asked)

    def _cuts(self) -> ViewCuts:
        return self._of_shop

    def next(self) -> bool:
        """Apply a cut; return whether the follower ends then."""
        cut = self._mirror.cut(self._sink.open())
        assert cut is not None
        self._apply(cut, 1)
        return self._until is not None


def test_views_follow_mirrors_that_were_rebuilt(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Rows may differ at the frontier of the views: other values, more rows, and fewer."""
    view = View(sql="SELECT id, name FROM customers", key=("id",))
    shop, name = Shop(database, tmp_path / "lake", {"v": view}), str(tmp_path)
    database.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'b')")
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name), restarted=False)
    database.execute("UPDATE customers SET name = 'c' WHERE id = 1")
    database.execute("DELETE FROM customers WHERE id = 2")
    database.execute("INSERT INTO customers VALUES (3, 'd')")
    shop.rebuild()
    assert shop.follow(spark, lambda: MemorySink(name), restarted=False) == {}
    shop.idle()
    assert shop.follow(spark, lambda: MemorySink(name), restarted=False) == {}
    shop.cut()
    done = shop.follow(spark, lambda: MemorySink(name), restarted=False)
    assert [how for how, _ in done.values()] == ["build"]
    assert shop.differences("v", _rows(name, "v")) == ""
    database.execute("UPDATE customers SET name = 'e' WHERE id = 3")
    shop.cut()
    done = shop.follow(spark, lambda: MemorySink(name), restarted=False)
    assert [how for how, _ in done.values()] != ["build"]
    assert shop.differences("v", _rows(name, "v")) == ""


def test_views_are_computed_again_where_the_mirror_lost_their_frontier(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """No command takes them out of it: `cdc view rebuild` only follows as the job does."""
    view = View(sql="SELECT id, name FROM customers", key=("id",))
    shop, name = Shop(database, tmp_path / "lake", {"v": view}), str(tmp_path)
    database.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'b')")
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name))
    database.execute("DELETE FROM customers WHERE id = 1")
    shop.cut()
    DeltaTable(tmp_path / "lake" / "_frontiers").delete(f"seq < {shop.seq}")
    following = Rebuilding(shop, spark, MemorySink(name), "request")
    assert not following.next()
    assert shop.differences("v", _rows(name, "v")) == ""
    for ends in (False, True):
        database.execute("UPDATE customers SET name = name || 'c'")
        shop.cut()
        assert following.next() == ends
        assert shop.differences("v", _rows(name, "v")) == ""


def test_a_rebuild_waits_for_cuts_in_which_rows_can_be_written(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """A cut to a frontier of the same seq writes none: the view would not be computed again."""
    view = View(sql="SELECT id, name FROM customers", key=("id",))
    shop, name = Shop(database, tmp_path / "lake", {"v": view}), str(tmp_path)
    database.execute("INSERT INTO customers VALUES (1, 'a')")
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name))
    STORES[name].tables["views.v"].rows.clear()
    following = Rebuilding(shop, spark, MemorySink(name), "request")
    shop.idle()
    assert not following.next()
    shop.cut()
    assert not following.next()
    shop.idle()
    assert not following.next()
    shop.cut()
    assert following.next()
    assert shop.differences("v", _rows(name, "v")) == ""


def test_a_rebuild_that_is_killed_anywhere_is_continued_by_any_process(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Once the store has it on record; and no request counts as answered before its rows are."""
    view = View(sql="SELECT id, name FROM customers", key=("id",))
    shop = Shop(database, tmp_path / "lake", {"v": view})
    database.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'b')")
    shop.cut()
    reached = set[str]()
    for kill_at in count():
        name = f"{tmp_path} {kill_at}"
        shop.follow(spark, lambda: MemorySink(name))  # noqa: B023 - at once
        rows = STORES[name].tables["views.v"].rows
        former = rows.pop(b'{"id":1}')
        rows[b'{"id":9}'] = former
        killed = DeletesLast(name, kill_at)
        following = Rebuilding(shop, spark, killed, "request")
        try:
            for _ in range(2):
                shop.cut()
                following.next()
        except Killed:
            pass
        for again in range(3):
            with closing(DeletesLast(name)) as sink:
                state = sink.open()
                assert state is not None
                stored = definitions.stored(sink, ["v"])["v"]
                if stored.has_answered("request", state.applied.seq):
                    assert shop.differences("v", _rows(name, "v")) == ""
                    reached.add(f"answered after {again}")
                    break
                shop.cut()
                # The record itself may be missing: only then is it asked for again.
                asked = "" if stored.is_due else "request"
                Rebuilding(shop, spark, sink, asked).next()
        else:
            pytest.fail(f"never answered, killed at {kill_at}")
        if kill_at >= killed.calls:
            break
    assert reached == {f"answered after {again}" for again in range(3)}


_NAMES = View(sql="SELECT id, name FROM customers", key=("id",))
_MARKED = View(sql="SELECT id, name || 'x' AS name FROM customers WHERE id > 1", key=("id",))
_LONGER = View(sql="SELECT id, name || 'z' AS name FROM customers WHERE id <> 2", key=("id",))


@pytest.mark.parametrize(
    ("before", "interrupted", "after"),
    [
        (_NAMES, _MARKED, _NAMES),
        (_NAMES, _MARKED, _LONGER),
        (_NAMES, _NAMES, _MARKED),
        (None, _MARKED, _LONGER),
    ],
    ids=["reverted", "changed-again", "changed", "first-build"],
)
def test_a_cut_that_is_killed_anywhere_is_not_repeated_by_another_definition(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    before: View | None,
    interrupted: View,
    after: View,
) -> None:
    """Its rows have the seq of the cut, as another definition's would: they would stay."""
    shop = Shop(database, tmp_path / "lake", {"v": interrupted})

    def follow(view: View, sink: MemorySink, *, restarted: bool = True) -> None:
        shop.config = msgspec.structs.replace(shop.config, views={"v": view})
        with suppress(Killed, OvertakenError):
            shop.follow(spark, lambda: sink, restarted=restarted)

    for kill_at in count():
        name = f"{tmp_path} {kill_at}"
        database.execute(
            "TRUNCATE customers", "INSERT INTO customers VALUES (1, 'a'), (2, 'b'), (3, 'c')"
        )
        shop.cut()
        if before is not None:
            follow(before, MemorySink(name))
        database.execute(
            "UPDATE customers SET name = 'bb' WHERE id = 2",
            "DELETE FROM customers WHERE id = 1",
            "INSERT INTO customers VALUES (4, 'd')",
        )
        shop.cut()
        killed = DeletesLast(name, kill_at)
        follow(interrupted, killed)
        follow(after, DeletesLast(name))
        store, is_killed = STORES[name], killed.calls > kill_at
        if is_killed and store.applied is not None and store.applied.seq == shop.seq:
            assert shop.differences("v", _rows(name, "v")) == "", kill_at
        shop.cut()
        for _ in range(2):
            follow(after, DeletesLast(name), restarted=False)
        assert store.applied is not None
        assert store.applied.seq == shop.seq
        assert shop.differences("v", _rows(name, "v")) == "", kill_at
        if not is_killed:
            break


def test_texts_in_documents_have_postgres_escapes(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Each control character, quotes and backslashes; and keys, of which the last value counts."""
    tables = {"notes": "id int PRIMARY KEY, half int, t text NOT NULL"}
    views = {
        "texts": View(
            sql="SELECT half, jsonb_agg(t ORDER BY id) AS b, json_agg(t ORDER BY id) AS j,"
            " array_agg(t ORDER BY id) AS a FROM notes GROUP BY half",
            key=("half",),
        ),
        "keys": View(
            sql="SELECT half, jsonb_object_agg(left(t, 1), id ORDER BY id) AS b,"
            " json_object_agg(t, t ORDER BY id DESC) AS j FROM notes GROUP BY half",
            key=("half",),
        ),
    }
    shop, store = Shop(database, tmp_path / "lake", views, None, tables), str(tmp_path)
    database.execute(
        "INSERT INTO notes"
        " SELECT n, n % 2, chr(n) || 'b' || chr(n) FROM generate_series(1, 300) AS n",
        r"""INSERT INTO notes VALUES (301, 1, '\\u000B "\n"'), (302, 0, ''), (303, 1, '€😀')""",
    )
    shop.expect_answers(spark, store, 1)
    database.execute("DELETE FROM notes WHERE id < 20", "UPDATE notes SET t = 'é' WHERE id = 99")
    shop.expect_answers(spark, store, 2)


def test_many_affected_values_are_joined_and_most_are_computed_completely(
    database: Database, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Spark finds them; those that are found here are joined however many they are."""
    monkeypatch.setattr(computing, "MOST_ANCHORS", 3)
    monkeypatch.setattr(computing, "MOST_LITERALS", 3)
    here = reducing.MOST_ROWS
    monkeypatch.setattr(reducing, "MOST_ROWS", 0)
    sql = (
        "SELECT c.id, c.name, count(o.id) AS orders FROM customers c"
        " LEFT JOIN orders o ON o.customer_id = c.id GROUP BY c.id, c.name"
    )
    views = {
        "auto": View(sql=sql, key=("id",)),
        "strict": View(sql=sql, key=("id",), refresh="strict"),
    }
    shop, name = Shop(database, tmp_path / "lake", views), str(tmp_path)
    database.execute("INSERT INTO customers SELECT g, 'c' || g FROM generate_series(1, 100) g")
    database.execute(
        "INSERT INTO orders (id, customer_id) SELECT g, g FROM generate_series(1, 90) g"
    )
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name))
    for changes, wanted in (
        ("UPDATE customers SET name = 'few' WHERE id <= 3", ("keys", "keys")),
        ("UPDATE customers SET name = 'some' WHERE id <= 9", ("keys", "keys")),
        ("DELETE FROM orders WHERE id BETWEEN 5 AND 12", ("keys", "keys")),
        ("UPDATE customers SET name = 'most' WHERE id > 40", ("full", "keys")),
    ):
        database.execute(changes)
        shop.cut()
        decisions = shop.follow(spark, lambda: MemorySink(name))
        assert (decisions["auto"][0], decisions["strict"][0]) == wanted, decisions
        assert shop.differences("auto", _rows(name, "auto")) == ""
        assert shop.differences("strict", _rows(name, "strict")) == ""
    assert decisions["strict"][1].startswith("joined: 60 values of id")
    monkeypatch.setattr(reducing, "MOST_ROWS", here)
    monkeypatch.setattr(states, "SMALL_ROWS", 0)
    database.execute("UPDATE customers SET name = 'again' WHERE id > 30")
    shop.cut()
    decisions = shop.follow(spark, lambda: MemorySink(name))
    read = "70 by changes of public.customers, made of 130 rows"
    assert [decisions[each] for each in views] == [("keys", read)] * 2
    assert [shop.differences(each, _rows(name, each)) for each in views] == ["", ""]


def test_what_a_store_did_not_take_is_not_remembered(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """A cut that failed is repeated; one of another process makes what is remembered outdated."""
    by_state = "SELECT state, count(*) AS n FROM orders WHERE state IS NOT NULL GROUP BY state"
    view = View(sql=by_state, key=("state",))
    shop, name = Shop(database, tmp_path / "lake", {"v": view}), str(tmp_path)
    fails = False

    class Failing(MemorySink):
        def commit(self, applied: Applied) -> None:
            if fails:
                raise UnavailableError("the store is away", hint="")
            super().commit(applied)

    def follow(*, restarted: bool = False) -> str:
        shop.follow(spark, lambda: Failing(name), restarted=restarted)
        return shop.differences("v", _rows(name, "v"))

    def write(state: str) -> None:
        values = f"SELECT g, '{state}' FROM generate_series({shop.seq}, {shop.seq + 5}) g"
        database.execute(f"INSERT INTO orders (id, state) {values}")
        database.execute("UPDATE orders SET state = 'sent' WHERE id % 3 = 0")
        shop.cut()

    write("new")
    assert follow() == ""
    write("paid")
    assert follow() == ""
    write("paid")
    fails = True
    with pytest.raises(UnavailableError):
        follow()
    fails = False
    database.execute("DELETE FROM orders WHERE state = 'new'")
    shop.cut()
    follow()  # to the end of the cut that failed
    assert follow() == ""
    mine = shop.remembering
    write("new")
    assert follow(restarted=True) == ""
    shop.remembering = mine
    write("late")
    assert follow() == ""


JSON_TABLES = {
    "docs": "id int PRIMARY KEY, j jsonb, name text, n int",
    "tags": "name text PRIMARY KEY, about jsonb",
}
JSON_VIEWS = {
    "members": View(
        sql="SELECT d.id, d.j -> 'a' AS a, d.j -> 'a' ->> 'b' AS b, d.j ->> 0 AS first FROM docs d"
        " WHERE d.j ->> 'k' IS NOT NULL OR d.j -> 'a' IS NOT NULL",
        key=("id",),
        refresh="strict",
    ),
    "operators": View(
        sql="SELECT id, j #> '{a,b}' AS p, j #>> ARRAY['a', '0'] AS q, j #>> '{-1}' AS r,"
        " j -> name AS by_key, j ->> n AS by_index, j ? 'a' AS has, j ?| '{a,x}' AS any,"
        " j ?& ARRAY['a', 'b'] AS every, jsonb_typeof(j) AS kind, jsonb_typeof(j -> 'a') AS inner,"
        " CASE WHEN jsonb_typeof(j) = 'array' THEN jsonb_array_length(j) END AS length,"
        " j @> '{\"a\": 1.50}' AS one, j @> '[1.5, \"x\"]'::jsonb AS two, j -> 'a' <@ j AS three,"
        " j -> 'a' @> (j -> 'b') AS four FROM docs WHERE j IS NOT NULL",
        key=("id",),
        refresh="strict",
    ),
    "by_member": View(
        sql="SELECT j ->> 'k' AS k, count(*) AS n, min(id) AS least FROM docs"
        " WHERE j ->> 'k' IS NOT NULL GROUP BY j ->> 'k'",
        key=("k",),
    ),
    "joined_by_member": View(
        sql="SELECT d.id, t.name, t.about ->> 'n' AS n FROM docs d JOIN tags t"
        " ON t.name = d.j ->> 'k' WHERE coalesce(t.about ->> 'n', '') <> '2'",
        key=("id",),
    ),
    "left_joined_by_member": View(
        sql="SELECT d.id, d.k, t.about -> 'l' AS l FROM (SELECT id, j ->> 'k' AS k FROM docs) AS d"
        " LEFT JOIN tags t ON t.name = d.k",
        key=("id",),
    ),
    "in_by_member": View(
        sql="SELECT d.id, d.k FROM (SELECT id, j ->> 'k' AS k FROM docs) AS d WHERE d.k IN"
        " (SELECT name FROM tags) AND NOT EXISTS (SELECT 1 FROM tags t WHERE t.name = d.k"
        " AND t.about IS NULL)",
        key=("id",),
    ),
    "first_of_member": View(
        sql="SELECT k, id, a FROM (SELECT j ->> 'k' AS k, id, j -> 'a' AS a, row_number() OVER"
        " (PARTITION BY j ->> 'k' ORDER BY id DESC) AS place FROM docs"
        " WHERE j ->> 'k' IS NOT NULL) AS x WHERE place = 1",
        key=("k",),
    ),
}


def _json(chosen: Random, depth: int = 0) -> object:
    """Return a random value of every kind, with escapes, and with equal keys at each depth."""
    kind = chosen.randrange(9 if depth < 3 else 6)
    if kind >= 7 or (depth == 0 and kind > 1):
        keys = ["a", "b", "k", "l", "n", "", 'q"', "k\\", "ä", " a", "0"]
        return {key: _json(chosen, depth + 1) for key in chosen.sample(keys, chosen.randrange(8))}
    if kind == 6:
        return [_json(chosen, depth + 1) for _ in range(chosen.randrange(4))]
    texts = ["", "x", 'a"b', "c\\d", "é\n\t", "{", "[1, 2]", '{"b": 1}', "null", "\u0001", "😀 }"]
    numbers = [0, -1, 1.5, 2, 10**30, 12345678901234567890.125]
    return [None, True, chosen.choice(texts), chosen.choice(texts), chosen.choice(numbers), False][
        kind
    ]


@pytest.mark.long("six views over three cuts, each with Python processes: two minutes")
def test_members_of_random_jsonb_are_postgres_own_after_each_cut(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    """Selected, in conditions, joined by, grouped by, and numbered by."""
    shop = Shop(database, tmp_path / "lake", JSON_VIEWS, None, JSON_TABLES)
    chosen, name, wrong, seen = Random(16), str(tmp_path), list[str](), set[str]()
    for changes in (150, 15, 15):
        with database.connect() as connection:
            for _ in range(changes):
                made = json.dumps(_json(chosen))
                # Digits after the point that no double has.
                text = re.sub(r"(?<=\d)\.125(?=[,}\]])", ".12500", made)
                key = chosen.randrange(60)
                connection.execute("DELETE FROM docs WHERE id = %s", [key])
                row = [key, text, chosen.choice(["a", "", None]), chosen.choice([0, -1, None])]
                connection.execute("INSERT INTO docs VALUES (%s, %s::jsonb, %s, %s)", row)
            for tag in ("x", "true", "", "2", "-1", "null", "1.5"):
                about = json.dumps(_json(chosen)) if chosen.random() < 0.8 else None
                connection.execute("DELETE FROM tags WHERE name = %s", [tag])
                connection.execute("INSERT INTO tags VALUES (%s, %s::jsonb)", [tag, about])
        shop.cut()
        shop.follow(spark, lambda: MemorySink(name))
        for view in JSON_VIEWS:
            rows = _rows(name, view)
            seen |= {view} if rows else set()
            if found := shop.differences(view, rows):
                wrong.append(found)
    assert wrong == []
    assert seen == JSON_VIEWS.keys()


VALUES = (
    "id int PRIMARY KEY, a int, b bigint, s smallint, m numeric(12,4), k numeric(5,0), f float8,"
    " t text, v varchar(20), d date, at timestamp, z timestamptz, ok bool, u uuid, j jsonb"
)
# Random, with NULLs, halves, extremes, blanks and letters of several bytes.
GENERATED = r"""
  INSERT INTO vals SELECT n,
    CASE WHEN n % 11 > 0 THEN CASE WHEN n % 13 = 0 THEN 2147483647 ELSE r(-50, 50)::int END END,
    CASE WHEN n % 7 > 0 THEN r(-1000000000000, 1000000000000)::bigint END,
    CASE WHEN n % 17 > 0 THEN r(-300, 300)::smallint END,
    CASE WHEN n % 5 > 0 THEN
      CASE WHEN n % 2 = 0 THEN r(-40, 40)::int / 2.0 ELSE r(-9999, 9999) END END,
    CASE WHEN n % 6 > 0 THEN r(-99, 99) END,
    CASE WHEN n % 9 > 0 THEN
      CASE WHEN n % 2 = 0 THEN r(-40, 40)::int / 2.0 ELSE r(-9999, 9999) END END,
    (ARRAY['', ' a ', 'Zoë', 'a\b', 'a%_b', 'it''s', 'ärger', 'B', NULL])[1 + n % 9],
    (ARRAY['a', 'B', 'Zoë', ' ', NULL])[1 + n % 5],
    CASE WHEN n % 10 > 0 THEN date '1999-12-28' + r(0, 12000)::int END,
    CASE WHEN n % 8 > 0 THEN timestamp '1969-12-30' + r(0, 2000000000) * interval '1 second' END,
    CASE WHEN n % 8 > 1 THEN
      timestamptz '1990-01-01 UTC' + r(0, 2000000000) * interval '1 second' END,
    CASE n % 3 WHEN 0 THEN true WHEN 1 THEN false END,
    CASE WHEN n % 4 > 0 THEN md5(n::text)::uuid END,
    CASE n % 7 WHEN 0 THEN '[{"a": 1}]' WHEN 1 THEN '"a"' WHEN 2 THEN '{"b": null, "a": null}'
      WHEN 3 THEN '{"a": 1.500, "b": 12345678901234567890.10, "c.d": {"b": 1.0, "a": [1,"x"]}}'
      WHEN 4 THEN '{"a": "Zoë \"x\" \\ \n\u00e9", "b": true, "c.d": [1e3, {"x": -0.10}, []]}'
      WHEN 5 THEN '{"a": "", "b": {}, "c.d": "{\"b\": 1}"}' END::jsonb
  FROM generate_series(1, 300) AS n
"""
EXPRESSIONS = """
  a / nullif(s, 0) | b / nullif(a, 0) | b % 1000 | s % 7 | -s | abs(m) | m * k | m + k | m - s
  m % nullif(k, 0) | round(m, 1) | round(m) | floor(m) | ceil(m) | m::int | f::int | k::smallint
  m::numeric(8,1) | m::float8 / 3 | f + s | f * 0.5 | f > m | m = k | s::numeric(9,3) * 1.25
  coalesce(m, s) | greatest(a, s, b) | least(m, k) | nullif(s, 5) | a IS DISTINCT FROM s
  CASE WHEN m > k THEN m WHEN m IS NULL THEN 0 END | CASE s % 3 WHEN 0 THEN 'x' WHEN 1 THEN t END
  d + s | d - date '2020-02-29' | d::timestamp | at::date | at < d | d >= '2010-06-01'
  extract(year FROM d) | extract(month FROM at) | extract(day FROM d) | extract(hour FROM at)
  extract(minute FROM at) | date_trunc('year', at) | date_trunc('quarter', at)
  date_trunc('month', at) | date_trunc('week', at) | date_trunc('day', at)
  date_trunc('hour', at) | date_trunc('second', at) | z AT TIME ZONE 'UTC'
  z < '2020-01-01 00:00:00+00' | at BETWEEN '2000-01-01' AND '2020-01-01 12:30'
  t || v | length(t) | substring(t, 2, 2) | substring(t, 2) | left(v, 2) | trim(t)
  replace(t, 'a', '\\') | t LIKE '%a%' | t LIKE 'a_' | t = v | t COLLATE "C" < v
  nullif(t, v) | coalesce(t, v, 'none') | t IN ('B', ' a ') | t NOT IN ('B', v)
  ok IS NOT TRUE | ok IS FALSE | NOT ok | ok AND a > 0 | ok OR s > 0
  a::text | b::text | m::text | k::text | ok::text | d::text | ok::int
  u = 'c4ca4238-a0b9-2382-0dcc-509a6f75849b' | u
  m / nullif(k, 0) | k / nullif(m, 0) | a / nullif(m, 0) | m / nullif(a, 0) | b / nullif(k, 0)
  b::numeric(13,0) / nullif(a, 0) | b / nullif(m, 0) | 1.0 / nullif(a, 0) | m / 3 | k / 7.0
  2 / nullif(s, 0)::numeric(6,2) | -m / 0.0001 | m / 10000 | 0.0001 / nullif(k, 0) | b / 12345.6789
  round(m / nullif(k, 0), 3) | (m / nullif(s, 0))::numeric(12,2) | round(m / 7, 2) / nullif(s, 0)
  coalesce(m, 0) / nullif(s, 0) | b / 99999999.99 | m / 9999.5 > k / 17 | m / nullif(f, 0)
  t NOT LIKE '%a%' | m::numeric(34,3) * k | m::numeric(38,4) > b | m::numeric(38,4) - k
  j | j -> 'a' | j -> 'b' | j -> 'c.d' | j ->> 'a' | j ->> 'b' | j ->> 'c.d' | j ->> 'A' | j -> ' a'
  j -> 0 | j ->> 0 | j -> -1 | j ->> 1 | j -> 'c.d' -> 'a' -> 1 | j -> 'c.d' ->> 'b' | j -> '0'
  j -> 'c.d' -> 1 ->> 'x' | j -> 'c.d' -> 0 | j -> 'c.d' ->> 2 | j -> 0 -> 'a' | j -> 0 ->> 'a'
  (j ->> 'a') || t | length(j ->> 'c.d') | j ->> 'a' = t | j ->> 'b' IS NULL | j -> 'a' IS NULL
  j #> '{c.d,b}' | j #>> '{c.d,a,1}' | j #>> ARRAY['0', 'a'] | j #> '{}' | j -> t | j ->> s
  j ? 'a' | j ?& '{a,b}' | NOT j ?| ARRAY['a', 'x'] | jsonb_typeof(j) | jsonb_typeof(j -> 'b')
  j @> '{"a": 1.5}' | j @> '{"c.d": {"a": ["x"]}}' | '[{}]' <@ j | j @> '"a"'::jsonb | j <@ j
  CASE WHEN jsonb_typeof(j) = 'array' THEN jsonb_array_length(j) END | j -> 'c.d' @> (j -> 'c.d')
  coalesce(j ->> 'b', 'none') | CASE WHEN j ->> 'a' LIKE '%x%' THEN j END
"""
# Of texts, dates and times, numbers.
MORE_EXPRESSIONS = r"""
  split_part(t, 'b', 1) | split_part(t, ' ', 2) | split_part(t, v, -1) | split_part(t, '', -1)
  split_part(t, '', 2) | split_part(t, 'a', -2) | strpos(t, 'b') | position('' in t) | strpos(t, v)
  left(t, -1) | left(t, -9) | left(t, 0) | right(t, 2) | right(t, -1) | right(t, 0) | right(t, 99)
  right(v, -9) | lpad(t, 4) | lpad(t, 5, 'äx') | rpad(t, 5, '\xé') | lpad(t, 2, '') | rpad(v, 0, t)
  lpad(t, -1, 'x') | rpad(t, 3, v) | trim(both ' a' from t) | ltrim(t) | rtrim(t, 'be%')
  btrim(t, v)
  trim(trailing from t) | trim(leading 'Zä' from t) | ltrim(t, '') | substring(t from 0 for 2)
  substring(t, -1) | substring(t for 1) | substring(t, -3, 2) | substring(t, 3, 0) | substring(t, 0)
  concat(t, v) | concat(t, NULL, a, '-') | concat_ws('-', t, v, s) | concat_ws(v, t, 'x', t)
  concat_ws(', ', NULL, v) | concat(NULL, v) | char_length(t) | character_length(v) | reverse(t)
  repeat(t, 3) | repeat(v, 0) | repeat(v, -2) | starts_with(t, 'a') | starts_with(t, v) | t ^@ ''
  replace(t, v, '<>') | replace(t, '', 'x') | replace(v, 'B', t) | translate(t, 'aZ%s', 'Xä')
  translate(t, v, 'q') | translate(t, 'äaa', 'ab😀') | lower(t COLLATE "C") | upper(v COLLATE "C")
  upper(t COLLATE "C") LIKE '%Ö%' | lower(t COLLATE "C") < 'b' | repeat('😀' || t, 2) LIKE '_a%'
  reverse('😀' || t) | left('😀' || t, 2) | length('😀' || t) | strpos('😀' || t, 'a')
  lpad('😀' || t, 7, '😀') | right('x' || t || '😀', 2) | split_part(t || '😀' || v, '😀', 2)
  trunc(m, 1) | trunc(m) | trunc(m, -2) | trunc(-m / 7, 3) | trunc(k, 2) | round(m, -1)
  round(k, -2)
  round(k, 1) | sign(m) | sign(a) | mod(a, 7) | mod(-s, 7) | mod(m, 2.5) | a & s | a # s | ~s
  (a|b) + 1 | (s|8::smallint) | b & 1023 | ~b | s # 255::smallint
  extract(second FROM at) | extract(milliseconds FROM at) | extract(microseconds FROM at)
  extract(quarter FROM d) | extract(week FROM d) | extract(week FROM at) | extract(dow FROM d)
  extract(isodow FROM at) | extract(doy FROM at) | extract(isoyear FROM d) | extract(decade FROM at)
  extract(century FROM d) | extract(millennium FROM at) | extract(epoch FROM d)
  extract(dow FROM at)
  extract(epoch FROM at) | extract(epoch FROM z) | extract(epoch FROM at - timestamp '2001-02-03')
  extract(epoch FROM (z - timestamptz '2001-02-03 04:05:06.789+00')) | extract(isoyear FROM at)
  extract(epoch FROM at) / 86400 | extract(second FROM at)::text | extract(epoch FROM at)::text
  extract(milliseconds FROM at)::text | extract(isodow FROM d)::int + 1 | extract(isodow FROM d)
  date_trunc('milliseconds', at) | date_trunc('microseconds', at) | date_trunc('minute', at)
  date_trunc('decade', at) | date_trunc('century', at) | date_trunc('millennium', at)
  date_trunc('day', z, 'UTC') | date_trunc('month', z, 'UTC') | date_trunc('week', d::timestamp)
  at + interval '1 day' | at - interval '1 month' | d + interval '1 month'
  at + interval '-13 months'
  d - interval '1 year 1 month 1 day' | at + interval '1 month 30 days 12 hours 30 seconds'
  at + interval '01:30:15' | at + interval '1 day 02:00' | interval '3 weeks' + at
  at + '1 day'::interval
  at + interval '1' month | (z + interval '90 minutes') AT TIME ZONE 'UTC'
  (z - interval '36 hours') AT TIME ZONE 'UTC' | at - interval '1 ms'
  at + s * interval '1 day' | at - interval '1 month' * s | d + interval '1 hour 1 day' * (s % 9)
  (z + s * interval '1 second') AT TIME ZONE 'UTC' | at + 2 * interval '1 month 1 day'
  at > d + interval '1 year'
  (at + interval '1 month')::date | d + 7 - interval '1 microsecond' | at + interval '0 days'
  make_date(2000 + s, 2, 28) | make_date(extract(year FROM d)::int, extract(month FROM d)::int, 1)
  a = ANY(ARRAY[1, NULL, s]) | a <> ALL(ARRAY[1, s]) | t = ANY(ARRAY['B', v]) | k <> ALL(ARRAY[1.0])
  (' +' || abs(s)::text || ' ')::int | ('-' || abs(b)::text)::bigint | (s::text || '0')::int + 1
  (m::text)::numeric(12,2) | (m::text || 'e2')::numeric(20,1) | ('.' || abs(a)::text)::numeric(4,3)
  (m::text)::float8 | (a::text || 'E-3')::float8 | (ok::text)::boolean | (' ' || d::text)::date
  (d::text || ' 12:30:05.1234')::timestamp | (d::text || 'T01:02')::timestamp > at
  (CASE WHEN ok THEN 'On' ELSE 'nO' END)::boolean | (j ->> 'x')::int
  (extract(year FROM d)::int::text || '-2-3')::date
  greatest(d, at) | least(at, '2005-01-01') | greatest(ok, a > 0) | least(u, u) | greatest(f, m)
"""


# Of groups of one row to some dozens, in some of which every value is NULL.
AGGREGATES = r"""
  every(ok) | bool_and(ok) | bool_or(ok) | every(ok) FILTER (WHERE a > 0) | bit_and(a) | bit_or(s)
  bit_xor(b) | bit_or(a) FILTER (WHERE a < 0) | count(DISTINCT (a, ok)) | count(DISTINCT (t, v, k))
  count(DISTINCT (ok, u)) FILTER (WHERE a > 0) | count(DISTINCT k) | count(k) FILTER (WHERE k > 0)
  string_agg(t, ', ' ORDER BY id) | string_agg(v, '' ORDER BY a DESC, id) | string_agg(t, '\' ORDER
  BY t COLLATE "C") | string_agg(v, '-' ORDER BY d DESC NULLS LAST, v COLLATE "C" DESC)
  string_agg(DISTINCT v::text COLLATE "C", ',' ORDER BY v::text COLLATE "C")
  string_agg(t, 'ü' ORDER BY m, id)
  string_agg(DISTINCT t COLLATE "C", ',' ORDER BY t COLLATE "C" DESC) FILTER (WHERE a > 0)
  string_agg(a::text, ',' ORDER BY a, id) FILTER (WHERE ok) | length(string_agg(t, ',' ORDER BY id))
  var_samp(a % 30000) | var_pop(a % 999) | variance(s) | var_pop(s) FILTER (WHERE ok)
  var_samp(k) | var_pop(k)
  variance(m::numeric(9,2)) | var_pop(m::numeric(9,3)) | var_samp(b / 1000000) | var_samp(a % 2)
  stddev(a) | stddev_pop(s) FILTER (WHERE ok) | stddev_samp(m) | stddev_pop(k) | stddev(b)
  stddev_samp(k) FILTER (WHERE k > 90) | stddev_pop(m::numeric(9,4)) | round(stddev(k), 3) + 1
  stddev(a % 2) | stddev_pop(round(k / 100, 3)) | stddev(CASE WHEN ok THEN s % 3 ELSE k END)
  round(var_pop(k), 3) | var_samp(k) FILTER (WHERE k > 90) | var_pop(m::numeric(6,1)) > 5
  percentile_disc(0.5) WITHIN GROUP (ORDER BY a) | percentile_disc(0) WITHIN GROUP (ORDER BY m DESC)
  percentile_disc(1) WITHIN GROUP (ORDER BY d) | percentile_disc(0.95) WITHIN GROUP (ORDER BY at)
  percentile_disc(0.3) WITHIN GROUP (ORDER BY t COLLATE "C" DESC) FILTER (WHERE a > 0)
  percentile_disc(0.25) WITHIN GROUP (ORDER BY k) FILTER (WHERE ok) + 1
  mode() WITHIN GROUP (ORDER BY a) | mode() WITHIN GROUP (ORDER BY ok DESC)
  mode() WITHIN GROUP (ORDER BY t COLLATE "C" DESC) | mode() WITHIN GROUP (ORDER BY d)
  mode() WITHIN GROUP (ORDER BY k) FILTER (WHERE a > 0) * 2
  mode() WITHIN GROUP (ORDER BY s % 3 DESC)
  avg(k) FILTER (WHERE k > 0)
  percentile_disc(0.5) WITHIN GROUP (ORDER BY b) | sum(DISTINCT s) FILTER (WHERE ok)
  avg(DISTINCT k)
  max(at) - interval '1 day' | min(v COLLATE "C") | max(t COLLATE "C") | extract(epoch FROM max(at))
  string_agg(j ->> 'a', ',' ORDER BY id) | count(DISTINCT (j ->> 'a', ok)) | every(j ? 'a')
  percentile_disc(0.5) WITHIN GROUP (ORDER BY (j ->> 'a') COLLATE "C") | count(j) FILTER (WHERE ok)
  CASE WHEN every(ok) IS NULL THEN 0 ELSE bit_or(s) END | sum(a) * 2 + count(*) | max(d) - min(d)
"""
# Of the same groups.
COLLECTED = r"""
  array_agg(a ORDER BY id) | array_agg(t ORDER BY m DESC, id)
  array_agg(DISTINCT s ORDER BY s DESC)
  array_agg(m ORDER BY k, id) FILTER (WHERE a > 0) | array_agg(d ORDER BY d NULLS FIRST)
  array_agg(at ORDER BY id) | array_agg(z ORDER BY id) | array_agg(ok ORDER BY id)
  array_agg(f ORDER BY id) | array_agg(u ORDER BY u) FILTER (WHERE ok) | array_agg(b ORDER BY b)
  array_agg(DISTINCT t COLLATE "C" ORDER BY t COLLATE "C") | array_agg(v ORDER BY id)
  coalesce(array_agg(a ORDER BY id) FILTER (WHERE a > 900), '{}') | array_agg(k / 7 ORDER BY id)
  coalesce(array_agg(t ORDER BY id) FILTER (WHERE ok), '{}'::text[])
  jsonb_agg(a ORDER BY id) | jsonb_agg(t ORDER BY id) | jsonb_agg(m ORDER BY id)
  json_agg(m ORDER BY m)
  jsonb_agg(k ORDER BY id) | jsonb_agg(d ORDER BY id) | jsonb_agg(at ORDER BY id)
  jsonb_agg(ok ORDER BY id DESC) | jsonb_agg(j ORDER BY id) | json_agg(j ORDER BY id)
  jsonb_agg(u ORDER BY id) | json_agg(repeat(t, 2) ORDER BY id DESC) | json_agg(at ORDER BY at)
  jsonb_agg(DISTINCT s ORDER BY s) FILTER (WHERE ok) | json_agg(v ORDER BY id) FILTER (WHERE a > 0)
  coalesce(jsonb_agg(b ORDER BY b) FILTER (WHERE b > 0), '[]') | jsonb_agg(j ->> 'a' ORDER BY id)
  jsonb_agg(m ORDER BY m, id) -> 0 | jsonb_array_length(jsonb_agg(a ORDER BY id))
  jsonb_object_agg(id, m) | jsonb_object_agg(coalesce(t, ''), s ORDER BY id)
  jsonb_object_agg(u, d ORDER BY id) FILTER (WHERE u IS NOT NULL)
  json_object_agg(id, t ORDER BY id DESC)
  json_object_agg(coalesce(v, 'x'), at ORDER BY m, id)
  jsonb_object_agg(coalesce(t, v, '"'), j ORDER BY id)
"""
# In partitions like these groups, ordered by what repeats and is NULL, or is unique.
WINDOWS = r"""
  last_value(t) OVER (w id) | last_value(a) OVER (w a, id ROWS BETWEEN CURRENT ROW AND 2 FOLLOWING)
  last_value(m) OVER (w a DESC, id RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING)
  nth_value(a, 3) OVER (w id)
  nth_value(v, 2) OVER (w d, id ROWS BETWEEN 2 PRECEDING AND 1 FOLLOWING)
  first_value(k) OVER (w id ROWS BETWEEN 3 PRECEDING AND 1 PRECEDING) | lag(a, 2, 0) OVER (w id)
  first_value(k) OVER (w id ROWS BETWEEN 2 FOLLOWING AND 3 FOLLOWING) | lead(t, 0) OVER (w id)
  ntile(4) OVER (w id) | ntile(1) OVER (w m, id) | ntile(100) OVER (w id DESC)
  ntile(3) OVER (w a, id)
  percent_rank() OVER (w a) | percent_rank() OVER (w ok DESC) | cume_dist() OVER (w a)
  rank() OVER (w k)
  cume_dist() OVER (w ok NULLS FIRST) | dense_rank() OVER (w d DESC) | percent_rank() OVER (w s) * 8
  sum(a) OVER (w id ROWS BETWEEN 2 PRECEDING AND CURRENT ROW) | sum(k) OVER (w id ROWS 1 PRECEDING)
  sum(m) OVER (w id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
  count(*) OVER (w id ROWS BETWEEN
  4 FOLLOWING AND UNBOUNDED FOLLOWING)
  count(k) OVER (w a RANGE BETWEEN CURRENT ROW AND CURRENT ROW)
  max(b) OVER (w id ROWS BETWEEN 1 FOLLOWING AND 3 FOLLOWING)
  min(d) OVER (w a RANGE UNBOUNDED PRECEDING)
  avg(k) OVER (w id ROWS BETWEEN 2 PRECEDING AND 1 PRECEDING)
  every(ok) OVER (w id ROWS 2 PRECEDING)
  avg(a) FILTER (WHERE ok) OVER (w id ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING)
  bit_or(s) OVER (w a)
  stddev(k) OVER (w id ROWS 3 PRECEDING) | stddev_pop(s) FILTER (WHERE a > 0) OVER (w a)
  var_samp(s) OVER (w id ROWS 3 PRECEDING) | var_pop(k) FILTER (WHERE a > 0) OVER (w a)
  sum(b) OVER (w s)
  count(*) FILTER (WHERE ok) OVER (w id ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)
  sum(a) OVER (w s RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) | bool_or(ok) OVER (w id)
"""


def _listed(text: str) -> list[str]:
    """Return expressions that are separated by bars, or by lines that do not end within one."""
    found = list[str]()
    for line in text.splitlines():
        parts = [each.strip() for each in re.split(r" \| ", line)]
        if found and found[-1].count("(") > found[-1].count(")"):
            found[-1] += f" {parts.pop(0)}"
        found += filter(None, parts)
    return found


def _by_place(given: list[str]) -> str:
    return ", ".join(f"{each} AS e{at}" for at, each in enumerate(given))


@pytest.mark.parametrize("listed", ["first", "more", "aggregates", "collected", "windows"])
def test_expressions_of_generated_values_are_postgres_own(
    database: Database, tmp_path: Path, spark: SparkSession, listed: str
) -> None:
    """Each on its own list: integers, numeric, floating point, texts, dates and times, booleans."""
    given = {
        "first": EXPRESSIONS, "more": MORE_EXPRESSIONS, "aggregates": AGGREGATES,
        "collected": COLLECTED,
        "windows": WINDOWS.replace("(w ", "(PARTITION BY id / 30 * (id % 3) ORDER BY "),
    }[listed]  # fmt: skip
    chosen = _listed(given)
    is_grouped = listed in {"aggregates", "collected"}
    of = "vals GROUP BY id / 30 * (id % 3)" if is_grouped else "vals"
    key = "id / 30 * (id % 3)" if is_grouped else "id"
    view = View(sql=f"SELECT {key} AS id, {_by_place(chosen)} FROM {of}", key=("id",))
    shop, name = (
        Shop(database, tmp_path / "lake", {"v": view}, None, {"vals": VALUES}),
        str(tmp_path),
    )
    database.execute(
        "CREATE FUNCTION r(low numeric, high numeric) RETURNS numeric LANGUAGE sql AS"
        " 'SELECT (low + (high - low) * random()::numeric)::numeric(18,4)'",
        "SELECT setseed(0.5)",
        GENERATED,
    )
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name))
    wanted = {row["id"]: row for row in shop.select(view.sql)}
    stored = {row["id"]: row for row in _rows(name, "v")}
    assert stored.keys() == wanted.keys()
    wrong = {
        chosen[int(column[1:])]: (row["id"], value, stored[row["id"]][column])
        for row in wanted.values()
        for column, value in row.items()
        if column != "id" and not same(value, stored[row["id"]][column])
    }
    assert wrong == {}
