"""TPC-H's queries as views are Postgres' own answers after each of its refresh functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.fixtures import tpch_data, tpch_list
from tests.fixtures.servers import Database
from tests.fixtures.viewed import Shop

PARTS = 11
REFRESHES = 2
EACH = 12  # orders of a refresh: a hundredth


@pytest.mark.long("the 22 queries in eleven parts; each is a minute of Spark", sample=["2"])
@pytest.mark.parametrize("part", range(PARTS))
def test_each_query_is_postgres_own_answer_after_each_refresh(
    database: Database, tmp_path: Path, spark: SparkSession, part: int
) -> None:
    """Orders are inserted (RF1) and deleted (RF2); no query's answer is empty.

    Each as TPC-H has it: the test's database orders texts by their bytes.
    """
    numbers = list(tpch_list.QUERIES)[part::PARTS]
    views = {f"q{number}": tpch_list.original(number) for number in numbers}
    shop = Shop(
        database,
        tmp_path / "lake",
        views,
        tables={each.table: tpch_list.columns(each.table) for each in tpch_list.TABLES.values()},
    )
    tpch_data.fill(database)
    for step in range(1 + REFRESHES):
        if step:
            _refresh(database, step)
        shop.expect_answers(spark, str(tmp_path), step)


def test_every_query_finds_rows_after_each_refresh(database: Database) -> None:
    """Otherwise an answer would be right whatever the view did."""
    for table in tpch_list.TABLES.values():
        database.execute(f"CREATE TABLE {table.table} ({tpch_list.columns(table.table)})")
    tpch_data.fill(database)
    for step in range(1 + REFRESHES):
        if step:
            _refresh(database, step)
        with database.connect() as connection:
            found = {
                number: connection.execute(tpch_list.original(number).sql.encode()).fetchone()
                for number in tpch_list.QUERIES
            }
        # A total of no rows is a row with NULL.
        assert [number for number, row in found.items() if row is None or None in row] == []


def _refresh(database: Database, step: int) -> None:
    first = tpch_data.ORDERS + step * EACH
    tpch_data.new_orders(database, first, first + EACH - 1)
    tpch_data.delete_orders(database, step * EACH, step * EACH + EACH - 1)
