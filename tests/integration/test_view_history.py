"""The campaign of killed processes finds what it looks for: planted in a state that it compares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.events import LSN
from tests.faults.view_history import ALL, CLOCK, DDL, History, Reading, Replay, answers, declare
from tests.fixtures.servers import Database, fresh_database


@pytest.fixture
def history(database: Database) -> History:
    """Return one of 60 transactions, DDL among them."""
    database.execute(*DDL)
    found = History(database)
    found.draw(5)
    found.write(60)
    assert found.altered > 0
    return found


@pytest.fixture
def reading(database: Database, history: History) -> Reading:
    """Return what a store must have now."""
    declare(database)
    found = {view: rows for view, (_, rows) in answers(database, ALL).items()}
    return Reading("a store", 1, 1, history.transactions[-1].lsn, found)


@pytest.fixture
def replay(database: Database, history: History) -> Iterator[Replay]:
    with fresh_database(database.dsn) as fresh:
        yield Replay(fresh, history)


def test_the_repeated_history_is_the_databases_own(
    database: Database, replay: Replay, reading: Reading
) -> None:
    assert replay.compare([reading]) == []
    assert replay.differs_from(database) == []
    assert sum(bool(rows) for rows in reading.views.values()) > len(ALL) * 3 / 4


def test_a_lost_row_a_changed_value_and_one_too_many_are_found(
    replay: Replay, reading: Reading
) -> None:
    row, *others = reading.views["expressions"]
    planted = (others, [row | {"half": 77}, *others], [row, row, *others])
    for rows in planted:
        found = replay.compare([reading._replace(views={**reading.views, "expressions": rows})])
        assert [each.partition(": Postgres")[0] for each in found] == [
            "a store at seq 1, transaction 60: expressions"
        ]


def test_views_of_two_transactions_are_found(
    database: Database, history: History, replay: Replay, reading: Reading
) -> None:
    """As after a commit of some views only."""
    history.write(20)
    newest = answers(database, [CLOCK])[CLOCK][1]
    mixed = {**reading.views, CLOCK: newest}
    found = replay.compare([Reading("a store", 1, 2, history.transactions[-1].lsn, mixed)])
    assert len(found) > 10


def test_a_frontier_that_is_not_the_rows_own_is_found(replay: Replay, reading: Reading) -> None:
    (found,) = replay.compare([reading._replace(lsn=LSN(1))])
    assert found.endswith("its LSN 0/1 is before its newest transaction")
