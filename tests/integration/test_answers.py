"""Stored rows are compared with Postgres' answer by the values that Postgres reads in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import pytest

from cdc.source import answers
from cdc.source.answers import CatalogQuestion

if TYPE_CHECKING:
    from tests.fixtures.servers import Database

_COLUMNS: Final = {
    "id": "int4", "price": "numeric", "ratio": "float8", "name": "text", "at": "timestamp",
    "seen": "timestamptz", "ok": "bool", "doc": "jsonb", "few": "_int4",
}  # fmt: skip
_SQL: Final = """
  SELECT n AS id, n * 1.50 AS price,
    CASE n WHEN 2 THEN 0.0::float8 ELSE n / 8.0::float8 END AS ratio,
    CASE n WHEN 3 THEN NULL ELSE 'a "b", %s \\ (ü)' END AS name,
    timestamp '2026-01-01' + n * interval '1 ms' AS at,
    timestamptz '2026-01-01 00:00Z' AS seen, n % 2 = 0 AS ok,
    jsonb_build_object('n', 1.50, 'm', n) AS doc, ARRAY[n, NULL] AS few
  FROM numbers"""
_QUESTION: Final = CatalogQuestion(
    _SQL, {"numbers": "SELECT n FROM generate_series(1, 3) n"}, _COLUMNS, ""
)


def _row(n: int, **others: object) -> dict[str, object]:
    return {
        "id": n,
        "price": f"{n * 1.5:.3f}",
        "ratio": "-0" if n == 2 else n / 8,
        "name": None if n == 3 else 'a "b", %s \\ (ü)',
        "at": f"2026-01-01 00:00:00.00{n}",
        "seen": "2026-01-01T01:00:00+01:00",
        "ok": n % 2 == 0,
        "doc": f'{{"m": {n}, "n": 1.50}}',
        "few": [n, None],
        **others,
    }


def _compared(database: Database, parts: Iterable[list[dict[str, Any]]]) -> tuple[int, int]:
    with database.connect() as connection:
        return answers.compare(connection, _QUESTION, (json.dumps(each).encode() for each in parts))


def test_equal_rows_are_equal_in_any_parts_and_order(database: Database) -> None:
    one, two, three = (_row(n) for n in (1, 2, 3))
    for parts in ([[one, two, three]], [[three], [], [two, one]]):
        assert _compared(database, parts) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"price": "3.01"}, {"ratio": 0.1}, {"name": "A"}, {"name": None}, {"ok": None},
        {"at": "2026-01-01 00:00:00.003"}, {"doc": '{"m": 2}'}, {"few": [2]}, {"id": 4},
    ],
)  # fmt: skip
def test_another_value_is_found(database: Database, wrong: dict[str, Any]) -> None:
    assert _compared(database, [[_row(1), _row(2, **wrong)], [_row(3)]]) == (1, 1)


def test_missing_and_repeated_rows_are_found(database: Database) -> None:
    assert _compared(database, []) == (3, 0)
    assert _compared(database, [[_row(1)], [_row(1)], [_row(1)]]) == (2, 2)


@pytest.mark.long("gigabytes of text")
def test_rows_of_more_than_a_value_holds_are_compared(database: Database) -> None:
    """An answer of 1.2 GB of text; stored rows of 300 MB, more than a jsonb can have."""
    wide = CatalogQuestion(
        "SELECT n AS id, repeat('x', 3000000) AS name FROM generate_series(1, 400) n",
        {},
        {"id": "int4", "name": "text"},
    )
    with database.connect() as connection:
        assert answers.digest(connection, wide).startswith("400 ")
        stored = (json.dumps([{"id": n, "name": "x" * 3_000_000}]).encode() for n in range(1, 101))
        assert answers.compare(connection, wide, stored) == (300, 0)


def test_a_digest_is_that_of_the_rows_in_any_order(database: Database) -> None:
    def asked(text: str) -> str:
        with database.connect() as connection:
            return answers.digest(connection, CatalogQuestion(text, {}, {}))

    one = asked("VALUES (1, 'a'), (2, NULL)")
    assert asked("VALUES (2, NULL), (1, 'a')") == one
    assert asked("SELECT 1, 'a' WHERE false") == "0  "
    others = {asked("VALUES (1, 'a'), (2, '')"), asked("VALUES (1, 'a')"), one}
    assert len(others) == 3
