"""The first rows of each key are Postgres' own, after rows were added, and after any change."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from cdc.config.views import View
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.views import states
from tests.fixtures.seeds import first_seed
from tests.fixtures.servers import Database
from tests.fixtures.view_list import VIEWS
from tests.fixtures.viewed import Shop

_ADDED: Final = "the first rows of each with those added"
_VIEWS: Final = {
    **{name: VIEWS[name] for name in ("timeline", "newest_of_each", "latest_two")},
    # By a text, over three tables, with conditions on each.
    "of_region": View(
        sql="SELECT region, id, placed, state FROM (SELECT c.region, o.id, o.placed, o.state,"
        " row_number() OVER (PARTITION BY c.region ORDER BY o.id DESC) AS place FROM orders o"
        " JOIN customers c ON c.id = o.customer_id JOIN lines l ON l.order_id = o.id"
        " WHERE l.n = 1 AND o.state <> 'lost') AS x WHERE place <= 4",
        key=("id",),
    ),
}
_MANY: Final = "generate_series(1, {many}) g"
_ADDITIONS: Final = (
    f"tweets SELECT {{at}} + g, (random() * 6)::int, 'b' || g, {{time}} FROM {_MANY}",
    f"follows SELECT (random() * 5)::int, (random() * 6)::int FROM {_MANY}",
    f"orders SELECT {{at}} + g, (random() * 6)::int, {{day}}, 'new' FROM {_MANY}",
    f"lines (order_id, n, qty) SELECT (random() * 200)::int, 1, 1 FROM {_MANY}",
    f"customers (id, name, region) SELECT (random() * 8)::int, 'c', {{region}} FROM {_MANY}",
)
_OTHERS: Final = (
    "DELETE FROM tweets WHERE id % 3 = {many} % 3",
    "UPDATE orders SET placed = {day} WHERE id % 4 = 1",
    "DELETE FROM follows WHERE followee_id = {many} % 6",
    "UPDATE customers SET region = 'r9' WHERE id = {many} % 8",
)


def statement(chosen: Random, at: int) -> str:
    """Return a change; days and times repeat, and some days are NULL."""
    texts: tuple[str, ...] = _OTHERS
    if chosen.random() < 0.85:
        texts = tuple(f"INSERT INTO {each} ON CONFLICT DO NOTHING" for each in _ADDITIONS)
    day = f"date '2026-01-01' + (random() * {chosen.randint(0, 9)})::int"
    time = f"timestamptz '2026-01-01' + interval '1 h' * (random() * {chosen.randint(0, 9)})::int"
    if chosen.random() < 0.1:
        day = "NULL"
    region = chosen.choice(["'r' || (random() * 3)::int", "NULL"])
    many = chosen.randint(1, 8)
    return chosen.choice(texts).format(at=at, many=many, day=day, time=time, region=region)


@pytest.mark.long("other seeds find what one does not", sample=["0"])
@pytest.mark.parametrize("number", range(6))
def test_the_first_rows_of_each_key_are_postgres_own_after_each_cut(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    seed = first_seed("LOCKSTEP_ROUNDS") + number
    if number % 2:  # tables of which only needed rows are read
        monkeypatch.setattr(states, "SMALL_ROWS", 10)
    chosen, ways = Random(seed), dict[str, int]()
    shop, name = Shop(database, tmp_path / "lake", _VIEWS), str(tmp_path)
    for step in range(40):
        with database.connect() as connection:
            connection.execute(f"SELECT setseed({chosen.random()})".encode())
            for _ in range(chosen.choice([1, 1, 1, 2])):
                connection.execute(statement(chosen, 10 * step + 1000 * (step % 3)).encode())
        shop.cut()
        decisions = shop.follow(spark, lambda: MemorySink(name), restarted=step % 13 == 0)
        for view in _VIEWS:
            stored: list[dict[str, Any]] = list(STORES[name].rows(f"views.{view}").values())
            assert shop.differences(view, stored) == "", (seed, step, decisions[view])
            ways[view] = ways.get(view, 0) + decisions[view][1].startswith(_ADDED)
    assert all(ways.values()), ways
