"""A figure of views counts only if their rows are Postgres' own: the check sees one wrong value."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest

from benchmarks.view_contents import differing

if TYPE_CHECKING:
    from tests.fixtures.servers import Database

_QUERY: Final = """
  SELECT n AS id, CASE n WHEN 1 THEN '' WHEN 2 THEN NULL ELSE E'it''s "ü", \\n%s' END AS name,
    n * 1.50 AS price, date '2026-01-01' + n AS day, n % 2 = 0 AS is_even,
    timestamp '2026-01-01' + n * interval '1 ms' AS at
  FROM generate_series(1, 3) AS n"""


def _rows(**others: list[Any]) -> pa.Table:
    at = dt.datetime(2026, 1, 1)  # noqa: DTZ001 - a timestamp without time zone
    numbers = (1, 2, 3)
    columns: dict[str, list[Any]] = {
        "id": [*numbers],
        "name": ["", None, 'it\'s "ü", \n%s'],
        "price": [Decimal("1.500") * each for each in numbers],
        "day": [dt.date(2026, 1, 1 + each) for each in numbers],
        "is_even": [False, True, False],
        "at": [at + dt.timedelta(milliseconds=each) for each in numbers],
    }
    return pa.table(columns | others)


def test_the_same_rows_are_equal_in_any_order_and_scale(database: Database) -> None:
    rows = _rows()
    with database.connect() as connection:
        assert differing(connection, _QUERY, rows) == (0, 0)
        assert differing(connection, _QUERY, rows.take([2, 0, 1])) == (0, 0)
        assert differing(connection, _QUERY, rows.select(rows.column_names[::-1])) == (0, 0)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("name", ["", None, "it's"]),
        ("name", [None, "", 'it\'s "ü", \n%s']),
        ("price", [Decimal("1.50"), Decimal("3.00"), Decimal("4.51")]),
        ("id", [1, 2, 2]),
    ],
)
def test_a_wrong_value_is_found(database: Database, column: str, values: list[Any]) -> None:
    with database.connect() as connection:
        missing, extra = differing(connection, _QUERY, _rows(**{column: values}))
    assert missing == extra > 0


def test_a_missing_and_a_repeated_row_are_found(database: Database) -> None:
    rows = _rows()
    with database.connect() as connection:
        assert differing(connection, _QUERY, rows.slice(1)) == (1, 0)
        assert differing(connection, _QUERY, pa.concat_tables([rows, rows.slice(2)])) == (0, 1)
        assert differing(connection, _QUERY, rows.slice(0, 0)) == (3, 0)
