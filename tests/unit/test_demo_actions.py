"""The demo's writers repeat their actions for the same seed, and change only their own rows."""

from __future__ import annotations

from typing import Any, Self, cast

import pytest
from psycopg import Cursor

from cdc.playground.demo.actions import Actor
from cdc.playground.demo.schema import TABLES

ACTORS = 4


class Recorder:
    """A cursor that records its statements; every statement changes one row."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, Any]] = []
        self.rowcount = 1

    def execute(self, query: str, values: object = ()) -> Self:
        self.statements.append((query, repr(values)))
        return self


def statements(number: int, seed: int, actions: int = 400) -> list[tuple[str, Any]]:
    actor = Actor(number, ACTORS, seed)
    recorder = Recorder()
    for _ in range(actions):
        actor.choose()(cast("Cursor[Any]", recorder))
    return recorder.statements


def test_the_same_seed_writes_the_same() -> None:
    assert statements(1, 7) == statements(1, 7)


def test_another_seed_or_another_writer_writes_something_else() -> None:
    assert statements(1, 7) != statements(1, 8)
    assert statements(1, 7) != statements(2, 7)


def test_every_table_and_kind_of_change_occurs_soon() -> None:
    text = "\n".join(query for query, _ in statements(0, 7, actions=1500))
    for table in TABLES:
        assert table in text
    for kind in ("INSERT", "UPDATE", "DELETE", "TRUNCATE", "SAVEPOINT", "SET id = "):
        assert kind in text


@pytest.mark.parametrize("number", range(ACTORS))
def test_new_ids_are_the_writers_own(number: int) -> None:
    actor = Actor(number, ACTORS, 7)
    ids = [actor.new_id() for _ in range(20)]
    assert all(each % ACTORS == number for each in ids)
    assert len(set(ids)) == 20


def test_accounts_are_locked_in_one_order() -> None:
    """Two payments between the same accounts, in opposite directions, do not deadlock."""
    recorder = Recorder()
    actor = Actor(0, ACTORS, 7)
    for _ in range(50):
        recorder.statements.clear()
        actor.pay(cast("Cursor[Any]", recorder))
        first, second = (eval(v)[1] for q, v in recorder.statements if "accounts" in q)  # noqa: S307
        assert first < second
