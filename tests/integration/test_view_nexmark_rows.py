"""Nexmark's queries as views are Postgres' own answers, as persons, auctions and bids change."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

import pytest
from pyspark.sql import SparkSession

from tests.fixtures.nexmark_list import QUERIES, TABLES, VIEWS
from tests.fixtures.servers import Database
from tests.fixtures.viewed import Shop

PARTS: Final = 6
STEPS: Final = 3
PERSONS, AUCTIONS, BIDS = 40, 80, 400
_AT: Final = "timestamp '2026-01-01' + {} * interval '7 seconds'"


def fill(database: Database) -> None:
    """Write rows of which every query finds some: minutes, days and sellers have several."""
    at = _AT.format("n")
    database.execute(
        "INSERT INTO person SELECT n, 'name ' || n % 9, n || '@x', 'city ' || n % 5,"
        f" (ARRAY['OR','ID','CA','WA'])[1 + n % 4], {at} FROM generate_series(1, {PERSONS}) n",
        "INSERT INTO auction SELECT n, 'item ' || n % 7, n * 3 % 50, n * 5 % 90,"
        f" {at}, {at} + (n % 4) * interval '10 minutes', 1 + n % {PERSONS // 2},"
        f" 8 + n % 5 FROM generate_series(1, {AUCTIONS}) n",
        f"INSERT INTO bid SELECT n, 1 + n * 7 % {AUCTIONS}, 1 + n * 3 % {PERSONS},"
        " n * 37 % 1000, 'channel ' || n % 3, '/a/b/' || n % 4,"
        f" {_AT.format('(n / 3)')}, 'extra ' || n FROM generate_series(1, {BIDS}) n",
    )


def change(database: Database, step: int) -> None:
    """Change, delete, move and add some rows of each table."""
    chosen = Random(step)
    bid, auction = chosen.randint(1, BIDS // 2), chosen.randint(1, AUCTIONS // 2)
    database.execute(
        f"UPDATE bid SET price = price + 500 WHERE id BETWEEN {bid} AND {bid + 6}",
        f"UPDATE bid SET auction = auction % 5 + 1 WHERE id BETWEEN {bid + 20} AND {bid + 25}",
        f"UPDATE bid SET id = id + {1000 * step} WHERE id = {bid + 30}",
        f"DELETE FROM bid WHERE id BETWEEN {bid + 40} AND {bid + 50}",
        f"INSERT INTO bid SELECT {2000 * step} + n, n % 9 + 1, n % 11 + 1, 900 + n, 'channel 1',"
        f" '/a', {_AT.format('n')}, NULL FROM generate_series(1, 12) n",
        f"UPDATE auction SET category = 10, expires = expires + interval '1 hour'"
        f" WHERE id BETWEEN {auction} AND {auction + 3}",
        f"DELETE FROM auction WHERE id = {auction + 10}",
        f"INSERT INTO auction VALUES ({500 + step}, 'new', 1, 2, {_AT.format(step)},"
        f" {_AT.format(90)}, {step}, 10)",
        f"UPDATE person SET state = 'OR' WHERE id = {auction % PERSONS + 1}",
        f"DELETE FROM person WHERE id = {PERSONS - step}",
        f"INSERT INTO person VALUES ({100 + step}, 'new', 'x', 'y', 'CA', {_AT.format(step)})",
    )


@pytest.mark.long("all queries in six parts; each is a minute of Spark", sample=["4"])
@pytest.mark.parametrize("part", range(PARTS))
def test_each_query_is_postgres_own_answer_after_each_change(
    database: Database, tmp_path: Path, spark: SparkSession, part: int
) -> None:
    views = {name: VIEWS[name] for name in list(QUERIES)[part::PARTS]}
    shop = Shop(database, tmp_path / "lake", views, tables=TABLES)
    fill(database)
    for step in range(1 + STEPS):
        if step:
            change(database, step)
        shop.expect_answers(spark, str(tmp_path), step)
