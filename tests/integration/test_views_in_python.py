"""Views in Python hold what their code makes of Postgres' own rows, at each frontier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.config.views import View
from lockstep.conformance.memory import STORES, MemorySink
from tests.fixtures import code_views
from tests.fixtures.servers import Database
from tests.fixtures.viewed import Shop, differing

TAG_COUNTS = View(
    sql="SELECT t.tag, count(*) AS n, sum(t.price) AS price, count(p.author) AS authors"
    " FROM post_tags t JOIN posts p ON p.id = t.post_id GROUP BY t.tag",
    key=("tag",),
)


def _rows(store: str, view: str) -> list[dict[str, Any]]:
    return list(STORES[store].rows(f"views.{view}").values())


@pytest.mark.long("each seed is a minute of Python processes", sample=["0"])
@pytest.mark.parametrize("seed", range(6))
def test_views_hold_what_their_code_makes_of_postgres_rows_after_each_cut(
    database: Database, tmp_path: Path, spark: SparkSession, seed: int
) -> None:
    """A transform, a view by visitor, a view of one row, and SQL over the transform."""
    code = code_views.declared(tmp_path)
    views = {**code, "tag_counts": TAG_COUNTS}
    shop, name = Shop(database, tmp_path / "lake", views, None, code_views.TABLES), str(tmp_path)
    chosen, wrong, done = Random(seed), [], Counter[tuple[str, str]]()
    for cut, count in enumerate((0, 60, 8, 8, 1, *(9,) * (5 if seed else 0))):
        with database.connect() as connection:
            if cut in {3, 6}:
                connection.execute(f"TRUNCATE {chosen.choice(list(code_views.TABLES))}".encode())
            for _ in range(count):
                connection.execute(code_views.change(chosen).encode())
        shop.cut()
        decisions = shop.follow(spark, lambda: MemorySink(name))
        done.update((view, how) for view, (how, _) in decisions.items())
        wanted = code_views.answers(code, shop.select)
        wanted["tag_counts"] = _tag_counts(wanted["post_tags"], shop.select("SELECT * FROM posts"))
        wrong += [
            (cut, view, decisions[view], found)
            for view, rows in wanted.items()
            if (found := differing(rows, _rows(name, view)))
        ]
    assert wrong == []
    assert {("post_tags", "keys"), ("sessions", "keys"), ("middle", "full")} <= done.keys()
    assert not {("post_tags", "full"), ("sessions", "full")} & done.keys()


def _tag_counts(tags: list[dict[str, Any]], posts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    authors = {row["id"]: row["author"] for row in posts}
    found = []
    for tag in {row["tag"] for row in tags}:
        its = [row for row in tags if row["tag"] == tag]
        prices = [row["price"] for row in its if row["price"] is not None]
        had = [row for row in its if authors[row["post_id"]] is not None]
        found.append(
            {
                "tag": tag, "n": len(its), "price": sum(prices) if prices else None,
                "authors": len(had),
            }
        )  # fmt: skip
    return found
