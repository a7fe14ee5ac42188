"""A history of transactions that one writer commits, and the views' rows at any point of it.

Each transaction counts in the row of `clock`, which is a view too: so a state of all views names
the transaction whose state it must be. The history is repeated in another database, up to there,
and Postgres asked.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import psycopg

from cdc.config.views import View
from cdc.events import LSN
from tests.fixtures.view_list import VIEWS
from tests.fixtures.viewed import TABLES, Workload, differing

if TYPE_CHECKING:
    from tests.fixtures.servers import Database

Rows = list[dict[str, Any]]

CLOCK: Final = "clock_now"
ALL: Final[Mapping[str, View]] = {
    **VIEWS,
    CLOCK: View(sql="SELECT id, n FROM clock", key=("id",)),
}
DDL: Final = (
    *(f"CREATE TABLE {name} ({what})" for name, what in TABLES.items()),
    "CREATE TABLE clock (id int PRIMARY KEY, n bigint NOT NULL)",
)
_TICK: Final = "INSERT INTO clock VALUES (1, 1) ON CONFLICT (id) DO UPDATE SET n = clock.n + 1"
# Seconds between two transactions: cuts of one, and cuts of many.
_PAUSES: Final = (0.0, 0.0, 0.05, 0.3, 1.5)


class Reading(NamedTuple):
    """All views of a store at one frontier."""

    store: str
    generation: int
    seq: int
    lsn: LSN
    views: Mapping[str, Rows]

    @property
    def transaction(self) -> int:
        """The newest transaction that it has; 0 before the first."""
        rows = self.views[CLOCK]
        return int(rows[0]["n"]) if rows else 0


class Committed(NamedTuple):
    """A transaction, and an LSN that is not before its commit's and before the next one's."""

    statements: tuple[str, ...]
    lsn: LSN


class History:
    """The transactions so far; `write` adds some, `load` does it in the background."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._workload = Workload(database, 0, altering=True)
        self.transactions: list[Committed] = []

    def draw(self, seed: int) -> None:
        """Continue with the changes that a seed chooses."""
        self._workload.draw(seed)

    @property
    def altered(self) -> int:
        """How many statements were DDL."""
        return self._workload.altered

    def write(self, count: int) -> None:
        """Commit that many transactions."""
        with self._database.connect() as connection:
            for _ in range(count):
                self._commit(connection)

    def _commit(self, connection: psycopg.Connection[Any]) -> None:
        statements = (*self._workload.transaction(), _TICK)
        with connection.transaction():
            for statement in statements:
                connection.execute(statement.encode())
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        self.transactions.append(Committed(statements, LSN.parse(row[0])))

    def load(self, seed: int) -> Load:
        return Load(self, seed)


class Load:
    """Commits without an end, in the background of a block."""

    def __init__(self, history: History, seed: int) -> None:
        self._history, self._chance = history, random.Random(f"{seed}/load")
        self._over, self._error = threading.Event(), list[Exception]()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._history.write(self._chance.choice((1, 1, 2, 10)))
                time.sleep(self._chance.choice(_PAUSES))
        except Exception as error:  # noqa: BLE001 - raised where the block ends
            self._error.append(error)


class Replay:
    """The same history in an empty database, whose own views are asked."""

    def __init__(self, database: Database, history: History) -> None:
        self._database, self._history = database, history
        self._done = 0
        self.states = 0
        database.execute(*DDL)
        declare(database)

    def compare(self, readings: list[Reading]) -> list[str]:
        """Return how states differ from Postgres' own; none may be older than those before."""
        wrong = []
        for reading in sorted(readings, key=lambda each: each.transaction):
            self._advance(reading.transaction)
            wrong += [
                f"{reading.store} at seq {reading.seq}, transaction {reading.transaction}: {each}"
                for each in (*self._bounds(reading), *self._differences(reading))
            ]
        return wrong

    def _advance(self, until: int) -> None:
        assert until >= self._done, "states are compared in their order"
        if until > self._done:
            self.states += 1
        with self._database.connect() as connection:
            for committed in self._history.transactions[self._done : until]:
                with connection.transaction():
                    for statement in committed.statements:
                        connection.execute(statement.encode())
        self._done = until

    def _bounds(self, reading: Reading) -> list[str]:
        """Return whether the frontier's LSN is not one of that transaction's."""
        at, known = reading.transaction, self._history.transactions
        if at > 1 and reading.lsn < known[at - 2].lsn:
            return [f"its LSN {reading.lsn} is before its newest transaction"]
        if at < len(known) and reading.lsn > known[at].lsn:
            return [f"its LSN {reading.lsn} is after a transaction that it lacks"]
        return []

    def _differences(self, reading: Reading) -> list[str]:
        found = []
        for view, (names, wanted) in answers(self._database, reading.views).items():
            own = [
                {name: row.get(name, "missing") for name in names} for row in reading.views[view]
            ]
            if different := differing(wanted, own):
                found.append(f"{view}: {different}")
        return found

    def differs_from(self, database: Database) -> list[str]:
        """Return the tables in which the database itself differs: the history would be wrong."""
        return [
            table
            for table in (*TABLES, "clock")
            if _texts(self._database, table) != _texts(database, table)
        ]


def declare(database: Database) -> None:
    """Make the views as views of Postgres, in a schema of their own."""
    database.execute(
        "CREATE SCHEMA views",
        "SET search_path = public, views",
        *(f"CREATE VIEW views.{name} AS {view.sql}" for name, view in ALL.items()),
    )


def answers(database: Database, views: Iterable[str]) -> dict[str, tuple[list[str], Rows]]:
    """Return by view its columns, and what Postgres answers."""
    found = {}
    with database.connect() as connection:
        for view in views:
            answer = connection.execute(f"SELECT * FROM views.{view}".encode())
            names = [each.name for each in answer.description or ()]
            found[view] = names, [dict(zip(names, row, strict=True)) for row in answer]
    return found


def _texts(database: Database, table: str) -> list[str]:
    with database.connect() as connection:
        return sorted(
            text for (text,) in connection.execute(f"SELECT t::text FROM {table} t".encode())
        )
