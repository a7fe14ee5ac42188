"""The first rows of each key are Postgres' own, after rows were added, and after any change."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from cdc.config.views import View
from tests.fixtures.random_views import ways_of_random_cuts
from tests.fixtures.servers import Database
from tests.fixtures.view_list import VIEWS

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


@pytest.mark.long("other seeds find what one does not", sample=["0"])
@pytest.mark.parametrize("number", range(6))
def test_the_first_rows_of_each_key_are_postgres_own_after_each_cut(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    ways = ways_of_random_cuts(
        database, tmp_path, spark, monkeypatch, views=_VIEWS, number=number, cuts=40, way=_ADDED
    )
    assert all(ways.values()), ways
