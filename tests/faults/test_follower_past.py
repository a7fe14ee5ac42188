"""The campaign's checks of histories and of rows marked as deleted find what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from cdc.events import LSN
from lockstep.sinks.delta.layout import (
    COMMIT_LSN,
    COMMITTED_AT,
    CURRENT,
    VALID_TO,
    VALID_TO_LSN,
)
from tests.faults.follower_past import Past, Transactions, triggers
from tests.faults.follower_rows import Row
from tests.fixtures.servers import Database

_CLOCK = "INSERT INTO clock VALUES (1, {0}) ON CONFLICT (id) DO UPDATE SET n = {0}"
_TABLES = """
CREATE TABLE accounts (id bigint PRIMARY KEY, balance numeric(14,2), n int, note text);
CREATE TABLE savings (owner int, balance numeric(14,2), pot text, n int);
CREATE TABLE orders (id uuid, items int, total numeric(12,2), at timestamptz, spec jsonb);
CREATE TABLE lines (order_id uuid, number int, amount numeric(12,2), what text);
CREATE TABLE events (id bigint, kind text, data bytea);
CREATE TABLE blobs (id int, n int, big text, md5 text);
CREATE TABLE shapes (id int);
CREATE TABLE clock (id int PRIMARY KEY, n bigint NOT NULL);
"""
# Transactions 2 to 7, after the snapshot's.
_WRITES = (
    ("INSERT INTO accounts VALUES (2, 5.50, 0, 'b')", "UPDATE accounts SET n = 1 WHERE id = 2"),
    ("UPDATE accounts SET note = 'c' WHERE id = 1",),
    ("UPDATE accounts SET id = 3 WHERE id = 2", "INSERT INTO events VALUES (1, 'a', NULL)"),
    ("INSERT INTO accounts VALUES (4, 0, 0, NULL)", "DELETE FROM accounts WHERE id = 4"),
    ("DELETE FROM accounts WHERE id = 1", "TRUNCATE events"),
    ("INSERT INTO events VALUES (2, 'b', NULL)",),
)


@pytest.fixture
def past(database: Database) -> tuple[Past, list[Row], Transactions]:
    """Return what was noted, the history of `accounts`, and the transactions."""
    noted = Past()
    with database.connect() as connection:
        connection.execute(f"{_TABLES}{triggers()}".encode())
        with connection.transaction():
            connection.execute("INSERT INTO accounts VALUES (1, 10, 0, 'a')")
            connection.execute(_CLOCK.format(1).encode())
        noted.begin(connection)
        for n, statements in enumerate(_WRITES, 2):
            with connection.transaction():
                for statement in statements:
                    connection.execute(statement.encode())
                connection.execute(_CLOCK.format(n).encode())
        noted.read(connection)
        rows = connection.execute("SELECT n, lsn::text, at FROM noted.clock ORDER BY n").fetchall()
    clock = [{"n": n, COMMIT_LSN: LSN.parse(lsn) + 1, COMMITTED_AT: at} for n, lsn, at in rows]
    known, wrong = noted.transactions(clock)
    assert wrong == []

    def version(since: int, until: int | None, *values: object) -> Row:
        row: Row = dict(zip(("id", "balance", "n", "note"), values, strict=True))
        end = clock[until - 1] if until else {COMMIT_LSN: None, COMMITTED_AT: None}
        row |= {name: clock[since - 1][name] for name in (COMMIT_LSN, COMMITTED_AT)}
        row |= {VALID_TO_LSN: end[COMMIT_LSN], VALID_TO: end[COMMITTED_AT], CURRENT: not until}
        return row

    history = [
        version(1, 3, 1, "10.00", 0, "a"),
        version(2, 2, 2, "5.50", 0, "b"),
        version(2, 4, 2, "5.50", 1, "b"),
        version(3, 6, 1, "10.00", 0, "c"),
        version(4, None, 3, "5.50", 1, "b"),
        version(5, 5, 4, "0.00", 0, None),
    ]
    return noted, history, known


def _without(rows: list[Row]) -> None:
    del rows[2]


def _twice(rows: list[Row]) -> None:
    rows.append(rows[1])


def _changed(name: str, *, value: object) -> Callable[[list[Row]], None]:
    def change(rows: list[Row]) -> None:
        rows[3] = rows[3] | {name: value}

    return change


def _later(name: str) -> Callable[[list[Row]], None]:
    def change(rows: list[Row]) -> None:
        rows[3] = rows[3] | {name: rows[3][name] + timedelta(microseconds=1)}

    return change


def test_a_right_history_has_no_finding(past: tuple[Past, list[Row], Transactions]) -> None:
    noted, history, known = past
    assert noted.wrong_history("accounts", history, known) == []


@pytest.mark.parametrize(
    "fault",
    [
        _without,
        _twice,
        _changed("note", value="a"),
        _changed(COMMIT_LSN, value=1),
        _changed(VALID_TO_LSN, value=None),
        _changed(CURRENT, value=True),
        _later(VALID_TO),
        _later(COMMITTED_AT),
    ],
)
def test_each_fault_in_a_history_is_found(
    past: tuple[Past, list[Row], Transactions], fault: Callable[[list[Row]], None]
) -> None:
    noted, history, known = past
    fault(history)
    assert len(noted.wrong_history("accounts", history, known)) == 1


def test_a_clock_without_a_transaction_or_at_another_lsn_is_found(
    past: tuple[Past, list[Row], Transactions],
) -> None:
    noted, _, known = past
    clock: list[dict[str, Any]] = [
        {"n": n, COMMIT_LSN: lsn, COMMITTED_AT: at} for lsn, n, at in zip(*known, strict=True)
    ]
    assert noted.transactions(clock)[1] == []
    assert noted.transactions(clock[:-1])[1]
    assert noted.transactions([*clock, clock[0]])[1]
    assert noted.transactions([clock[0] | {COMMIT_LSN: clock[2][COMMIT_LSN] - 1}, *clock[1:]])[1]
    clock[3][COMMIT_LSN] = clock[4][COMMIT_LSN] - 1
    assert noted.transactions(clock)[1]


def _marked(known: Transactions, n: int, *values: object) -> Row:
    row: Row = dict(zip(("id", "balance", "n", "note"), values, strict=True))
    return row | {COMMIT_LSN: known.lsns[n - 1], COMMITTED_AT: known.times[n - 1]}


def test_faults_in_rows_that_are_marked_as_deleted_are_found(
    past: tuple[Past, list[Row], Transactions],
) -> None:
    """Frontiers after each transaction, then only after some: of others' versions none is due."""
    noted, _, known = past

    def wrong(rows: list[Row], frontiers: list[int]) -> list[str]:
        return noted.wrong_deleted("accounts", rows, known, frontiers)

    first, second = _marked(known, 6, 1, "10.00", 0, "c"), _marked(known, 4, 2, "5.50", 1, "b")
    assert wrong([first, second], known.lsns) == []
    assert wrong([first], known.lsns)
    assert wrong([first, second, _marked(known, 4, 3, "5.50", 1, "b")], known.lsns)
    assert wrong([first | {"note": "a"}, second], known.lsns)
    assert wrong([_marked(known, 5, 1, "10.00", 0, "c"), second], known.lsns)
    some = [known.lsns[0], known.lsns[3], known.lsns[6]]
    assert wrong([first], some) == []
    assert wrong([second], some)
    # What a truncate removed may not be there.
    event = {"id": 1, "kind": "a", "data": None} | _marked(known, 6, 1, None, None, None)
    assert noted.wrong_deleted("events", [], known, known.lsns) == []
    assert noted.wrong_deleted("events", [event], known, known.lsns)
