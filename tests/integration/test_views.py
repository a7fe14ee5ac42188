"""Maintained views are Postgres' own answers at each frontier of their mirror, in every store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from cdc.config.views import View
from lockstep.conformance.memory import STORES, MemorySink
from tests.fixtures.servers import Database
from tests.fixtures.viewed import Shop, Workload

ORDER_TOTALS = View(
    sql="SELECT o.id, c.name, sum(l.price * l.qty) AS total, count(l.n) AS lines"
    " FROM orders o JOIN customers c ON c.id = o.customer_id"
    " LEFT JOIN lines l ON l.order_id = o.id GROUP BY o.id, c.name",
    key=("id",),
    refresh="strict",
)
TIMELINE = View(
    sql="SELECT follower_id, tweet_id, body, at FROM (SELECT f.follower_id, t.id AS tweet_id,"
    " t.body, t.at, row_number() OVER (PARTITION BY f.follower_id ORDER BY t.at DESC, t.id DESC)"
    " AS place FROM tweets t JOIN follows f ON f.followee_id = t.author_id) AS x"
    " WHERE place <= 5",
    key=("follower_id", "tweet_id"),
    refresh="strict",
)
VIEWS = {"order_totals": ORDER_TOTALS, "timeline": TIMELINE}


def _rows(store: str, view: str) -> list[dict[str, Any]]:
    return list(STORES[store].rows(f"views.{view}").values())


def test_views_are_postgres_own_answers_after_each_cut(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    shop = Shop(database, tmp_path / "lake", VIEWS)
    name = str(tmp_path)
    load = Workload(database, 1)
    wrong = []
    for step in range(4):
        load.run(60 if step == 0 else 6)
        shop.cut()
        decisions = shop.follow(spark, lambda: MemorySink(name))
        wrong += [
            f"cut {step}, {decisions[view]}, {found}"
            for view in VIEWS
            if (found := shop.differences(view, _rows(name, view)))
        ]
    assert wrong == []
