"""Values of which a view has no exact answer halt its follower, and are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.config.views import View
from cdc.errors import ConfigError
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.views import states
from tests.fixtures.servers import Database
from tests.fixtures.viewed import Shop

_TABLES = {
    "vals": "id int PRIMARY KEY, g int, a int, big numeric(38,0), m numeric(12,4), n numeric(12,1)"
}
_ROW = "INSERT INTO vals VALUES (1, 1, 5, 10, 1.5, 2.5), (2, 1, 6, 20, 2.5, 3.5)"
_LARGE = "9" * 38
_SUM = "SELECT g AS id, sum(big) AS b FROM vals GROUP BY g"


@pytest.mark.parametrize(
    ("sql", "change", "says"),
    [
        (_SUM, f"UPDATE vals SET big = {_LARGE}", "a value that its type does not have"),
        (
            "SELECT id, big * a AS b FROM vals",
            f"UPDATE vals SET big = {_LARGE} WHERE id = 1",
            "a value that its type does not have",
        ),
        (
            "SELECT id, a + 1 AS b FROM vals",
            "UPDATE vals SET a = 2147483647 WHERE id = 2",
            "arithmetic overflow",
        ),
        ("SELECT id, 7 / a AS b FROM vals", "UPDATE vals SET a = 0 WHERE id = 2", "divide by zero"),
        (
            "SELECT id, m / n AS b FROM vals",
            "UPDATE vals SET m = 0.0001, n = 99999999999.9 WHERE id = 1",
            "a quotient of more digits than a store has",
        ),
        (
            "SELECT id, m + 1 AS b FROM vals",
            "UPDATE vals SET m = 'NaN' WHERE id = 1",
            "public.vals.m has a value that is only text in its mirror",
        ),
        ("SELECT g AS id, a FROM vals", "INSERT INTO vals VALUES (3, 9), (4, 9)", "several rows"),
        (
            "SELECT nullif(a, 0) AS id, n FROM vals",
            "INSERT INTO vals VALUES (3, 1, 0)",
            "without id",
        ),
    ],
    ids=["sum", "product", "integer", "zero", "quotient", "inexact", "several", "null"],
)
@pytest.mark.parametrize("reads", ["rows", "files"])
def test_a_value_without_an_exact_answer_halts_the_follower_in_a_later_cut(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    sql: str,
    change: str,
    says: str,
    reads: str,
) -> None:
    """The store keeps what it has, and the error has no value of a row."""
    if reads == "files":
        monkeypatch.setattr(states, "SMALL_ROWS", 0)
    shop = Shop(database, tmp_path / "lake", {"v": View(sql=sql, key=("id",))}, None, _TABLES)
    name = str(tmp_path)
    rows = _ROW if "g AS id, a" not in sql else _ROW.replace("(2, 1,", "(2, 2,")
    database.execute(rows)
    shop.cut()
    shop.follow(spark, lambda: MemorySink(name))
    before = dict(STORES[name].rows("views.v"))
    assert before
    database.execute(change)
    shop.cut()
    with pytest.raises(ConfigError, match=says) as raised:
        shop.follow(spark, lambda: MemorySink(name), restarted=reads == "files")
    assert raised.value.hint
    assert _LARGE not in str(raised.value)
    assert STORES[name].rows("views.v") == before
