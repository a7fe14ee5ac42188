"""The first rows of all are Postgres' own after any change, and chosen from rows in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from cdc.config.views import View
from lockstep.jobs.views import answers
from tests.fixtures.random_views import ways_of_random_cuts
from tests.fixtures.servers import Database

_CHOSEN: Final = "the first ones of "
_VIEWS: Final = {
    # By an aggregate that is no column of the view, with ties, and NULL for customers without any.
    "best": View(
        sql="SELECT c.id, c.name FROM customers c LEFT JOIN orders o ON o.customer_id = c.id"
        " LEFT JOIN lines l ON l.order_id = o.id GROUP BY c.id, c.name"
        " ORDER BY sum(l.qty) DESC NULLS LAST, c.id LIMIT 3",
        key=("id",),
    ),
    "earliest": View(
        sql="SELECT o.id, o.placed, c.region FROM orders o JOIN customers c ON c.id = o.customer_id"
        " WHERE o.state <> 'lost' ORDER BY o.placed NULLS FIRST, o.id DESC LIMIT 7",
        key=("id",),
    ),
    "by_text": View(
        sql='SELECT id, region FROM customers ORDER BY region COLLATE "C" DESC, id LIMIT 4',
        key=("id",),
    ),
    # One region may be in several of all rows, and in one of the first.
    "first_of_all": View(
        sql="WITH busy AS (SELECT customer_id, count(*) AS many FROM orders GROUP BY customer_id"
        " HAVING count(*) > 1) SELECT c.region AS r, b.many FROM customers c"
        " JOIN busy b ON b.customer_id = c.id WHERE c.region IS NOT NULL"
        " ORDER BY b.many DESC, c.id LIMIT 1",
        key=("r",),
    ),
}


@pytest.mark.long("other seeds find what one does not", sample=["0"])
@pytest.mark.parametrize("number", range(6))
def test_the_first_rows_of_all_are_postgres_own_after_each_cut(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    if number % 3 == 2:  # views of which few rows are kept
        monkeypatch.setattr(answers, "MOST_ROWS", 30)
    ways = ways_of_random_cuts(
        database, tmp_path, spark, monkeypatch, views=_VIEWS, number=number, cuts=30, way=_CHOSEN
    )
    assert number % 3 == 2 or all(ways.values()), ways
