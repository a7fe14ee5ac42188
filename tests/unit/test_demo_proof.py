"""The comparison finds every difference between the folded log and the rows of the database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
from psycopg import sql

from cdc.playground.demo import database
from cdc.playground.demo.proof import compare
from cdc.verify.events import Row, TableState, canonical
from cdc.verify.frontiers import Findings

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return the findings between a state and rows that the database is made to return."""

    def run(state: TableState, stored: list[Row], key: tuple[str, ...] = ("id",)) -> list[str]:
        def rows(connection: object, table: database.ComparedTable) -> Iterator[Row]:
            return iter(stored)

        monkeypatch.setattr(database, "rows", rows)
        columns = tuple(stored[0]) if stored else ("id",)
        table = database.ComparedTable("public", "users", columns, key, sql.SQL("").format())
        findings = Findings()
        count = compare(state, table, cast("psycopg.Connection[Any]", None), findings)
        assert count == len(stored)
        return findings.first

    return run


def keyed(*rows: Row) -> TableState:
    state = TableState("shop.public.users", "public", "users")
    for row in rows:
        state.rows[canonical({"id": row["id"]})] = row
    return state


def keyless(*rows: Row) -> TableState:
    state = TableState("shop.public.users", "public", "users")
    state.keyless.update(canonical(row) for row in rows)
    return state


def test_equal_rows_are_equal_whatever_the_order(compared: Callable[..., list[str]]) -> None:
    one, two = {"id": 1, "n": "a"}, {"id": 2, "n": None}
    assert compared(keyed(one, two), [two, one]) == []


@pytest.mark.parametrize(
    ("logged", "stored"),
    [
        ("12.50", "12.5"),
        (1, True),
        (0, False),
        (1, "1"),
        ("", None),
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.000Z"),
        ("a", "a "),
    ],
)
def test_values_must_be_the_same_json(
    compared: Callable[..., list[str]], logged: object, stored: object
) -> None:
    (reported,) = compared(keyed({"id": 1, "n": logged}), [{"id": 1, "n": stored}])
    assert "1 rows differ in column n" in reported


def test_missing_and_surplus_rows_are_reported(compared: Callable[..., list[str]]) -> None:
    reported = compared(keyed({"id": 1}, {"id": 2}), [{"id": 2}, {"id": 3}, {"id": 4}])
    assert len(reported) == 2
    assert "2 rows of the database are missing from the log" in reported[0]
    assert "1 rows of the log are not in the database" in reported[1]


def test_a_record_key_must_fit_its_row(compared: Callable[..., list[str]]) -> None:
    state = keyed({"id": 1})
    state.rows[canonical({"id": 2})] = {"id": 3}
    assert any("does not fit its row" in each for each in compared(state, [{"id": 1}, {"id": 2}]))


def test_a_column_added_later_may_be_missing_only_where_it_is_null(
    compared: Callable[..., list[str]],
) -> None:
    assert compared(keyed({"id": 1}), [{"id": 1, "new": None}]) == []
    (reported,) = compared(keyed({"id": 1}), [{"id": 1, "new": 0}])
    assert "differ in column new" in reported


def test_keyless_rows_are_compared_as_a_multiset(compared: Callable[..., list[str]]) -> None:
    row = {"url": "/"}
    assert compared(keyless(row, row), [row, row], ()) == []
    (reported,) = compared(keyless(row), [row, row], ())
    assert "1 rows of the database are missing from the log" in reported


def test_of_a_table_past_the_log_what_is_there_must_be_right(
    compared: Callable[..., list[str]],
) -> None:
    """Rows and columns that are in no change may be missing; a wrong value is an error."""
    state, rest = keyed({"id": 1, "n": "a"}), keyless({"url": "/"})
    state.complete = rest.complete = False
    stored = [{"id": 1, "n": "a", "bio": "long"}, {"id": 2, "n": "b", "bio": None}]
    assert compared(state, stored) == []
    assert compared(rest, [{"url": "/"}, {"url": "/"}], ()) == []
    (reported,) = compared(state, [{"id": 1, "n": "c"}])
    assert "1 rows differ in column n" in reported
    (reported,) = compared(state, [{"id": 2, "n": "b"}])
    assert "1 rows of the log are not in the database" in reported


def test_findings_hold_no_values(compared: Callable[..., list[str]]) -> None:
    reported = compared(keyed({"id": 1, "n": "secret"}), [{"id": 1, "n": "hidden"}])
    assert not any("secret" in each or "hidden" in each for each in reported)
