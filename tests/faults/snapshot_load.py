"""The load of a snapshot: filled tables of every shape, and writers that never stop.

`Load` writes to its own tables; this adds others (many pages, partitions, large rows, none at all),
rows that exist before, and writers whose transactions are open for seconds, so that one spans any
consistent point: some of their rows belong to the snapshot's past, some to its future.
"""

from __future__ import annotations

import random
from typing import Final

import psycopg

from tests.fixtures.load import TABLES as LOADED
from tests.fixtures.writing import Writing

_TRUNCATE_SHARE: Final = 0.02
_ROWS: Final = 6_000
_WIDE: Final = 12
_PARTS: Final = (
    "CREATE TABLE parts (id int, day int, n int NOT NULL, note text, PRIMARY KEY (id, day))"
    " PARTITION BY RANGE (day)"
)
# Out of line in some rows, so that an update of another column does not send it.
_BIG: Final = "CASE WHEN i % 3 < 2 THEN repeat(md5(i::text), 90) END"

TABLES: Final = (
    *LOADED,
    "CREATE TABLE many (id int PRIMARY KEY, n int NOT NULL, a text, at timestamptz)",
    _PARTS,
    *(
        f"CREATE TABLE parts_{day} PARTITION OF parts FOR VALUES FROM ({day}) TO ({day + 10})"
        for day in (0, 10, 20)
    ),
    "CREATE TABLE parts_rest PARTITION OF parts DEFAULT",
    "CREATE TABLE wide (id int PRIMARY KEY, n int NOT NULL, body text)",
    "ALTER TABLE wide ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE void (id int PRIMARY KEY, n int NOT NULL)",
    "CREATE TABLE never (id int PRIMARY KEY, n int NOT NULL)",
    # Pages with few rows, or none.
    "CREATE TABLE holes (id int PRIMARY KEY, n int NOT NULL, a text)",
)
FILL: Final = (
    f"INSERT INTO many SELECT i, 1, md5(i::text), now() FROM generate_series(1, {_ROWS}) i",
    f"INSERT INTO parts SELECT i, i % 40, 1, 'p' FROM generate_series(1, {_ROWS // 4}) i",
    f"INSERT INTO wide SELECT i, 1, repeat(md5(i::text), 2000) FROM generate_series(1, {_WIDE}) i",
    f"INSERT INTO holes SELECT i, 1, md5(i::text) FROM generate_series(1, {_ROWS // 3}) i",
    "DELETE FROM holes WHERE id % 7 <> 0",
    f"INSERT INTO users SELECT i, 1, 'old', {_BIG} FROM generate_series(5000, 5600) i",
    f"INSERT INTO users SELECT i, 1, 'old', {_BIG} FROM generate_series(1, 60) i",
    "INSERT INTO full_rows SELECT i, 1, repeat(md5(i::text), 90) FROM generate_series(1, 90) i",
    "INSERT INTO pairs SELECT i, 1, 'a' || i, 1.5 FROM generate_series(100, 400) i",
    "INSERT INTO named SELECT i, 1, 'x' || i, now() FROM generate_series(100, 300) i",
    "INSERT INTO lines SELECT i % 50, 1, 'l', NULL FROM generate_series(1, 500) i",
)

# {k} is a key that is likely to exist, {o} another.
_WRITES: Final = (
    "UPDATE many SET n = n + 1 WHERE id = {k}",
    "UPDATE many SET n = n + 1, a = a || 'x' WHERE id BETWEEN {k} AND {k} + 5",
    "UPDATE many SET n = n + 1, id = {o} + 100000 WHERE id = {k}",
    "DELETE FROM many WHERE id = {k}",
    "INSERT INTO many VALUES ({k}, 1, 'again', now()) ON CONFLICT DO NOTHING",
    "INSERT INTO many VALUES ({o} + 200000, 1, 'new', now()) ON CONFLICT DO NOTHING",
    # From one partition into another: a delete and an insert for Postgres.
    "UPDATE parts SET n = n + 1, day = (day + 10) % 50 WHERE id = {k} % 1500",
    "UPDATE parts SET n = n + 1, note = 'q' WHERE id = {k} % 1500",
    "DELETE FROM parts WHERE id = {k} % 1500",
    "INSERT INTO parts VALUES ({k} % 1500, {o} % 50, 1, 'r') ON CONFLICT DO NOTHING",
    "UPDATE wide SET n = n + 1 WHERE id = {k} % 14",
    "UPDATE wide SET n = n + 1, id = 1000 + {o} WHERE id = {k} % 14",
    "UPDATE wide SET n = n + 1, body = repeat(md5('{o}'), 1500) WHERE id = {k} % 14",
    "INSERT INTO wide VALUES ({k} % 14, 1, repeat('w', 30000)) ON CONFLICT DO NOTHING",
    "DELETE FROM wide WHERE id = {k} % 14",
    "UPDATE holes SET n = n + 1 WHERE id = {k}",
    "INSERT INTO holes VALUES ({k}, 1, 'filled') ON CONFLICT DO NOTHING",
    "UPDATE users SET n = n + 1 WHERE id = 5000 + {k} % 600",
    "UPDATE users SET n = n + 1, id = 9000 + {o} WHERE id = 5000 + {k} % 600",
    "DELETE FROM users WHERE id = 5000 + {k} % 600",
    "UPDATE lines SET n = n + 1 WHERE id = {k} % 50 AND n < 4",
    "INSERT INTO lines VALUES ({k} % 50, 1, 'm', NULL)",
)
_EMPTY: Final = "INSERT INTO void VALUES ({k}, 1) ON CONFLICT DO NOTHING"


class Hands(Writing):
    """A writer with transactions of a given length, until `stop`; `truncates` some tables too."""

    def __init__(
        self, dsn: str, seed: str, *, open_seconds: tuple[float, float], truncates: int = 0
    ) -> None:
        """`open_seconds` is how long transactions are open, at least and at most."""
        super().__init__(f"hands {seed}")
        self._dsn = dsn
        self._chance = random.Random(seed)
        self._open_seconds = open_seconds
        self._truncates = truncates

    def _write(self) -> None:
        with psycopg.connect(self._dsn, connect_timeout=2) as connection:
            connection.execute("SET lock_timeout = '100ms'")
            connection.commit()
            while not self._over.is_set():
                self._transaction(connection)

    def _transaction(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        chance = self._chance
        statements = chance.randint(1, 8)
        pause = chance.uniform(*self._open_seconds) / statements
        try:
            for number in range(statements):
                if chance.random() < 0.15:
                    connection.execute(f"SAVEPOINT s{number}".encode())
                    self._statement(connection)
                    connection.execute(f"ROLLBACK TO SAVEPOINT s{number}".encode())
                self._statement(connection)
                self._over.wait(pause)
            if chance.random() < 0.1:
                connection.rollback()
            else:
                connection.commit()
        except (
            psycopg.errors.LockNotAvailable,
            psycopg.errors.IntegrityError,
            psycopg.errors.DeadlockDetected,
        ):
            connection.rollback()

    def _statement(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        chance = self._chance
        if self._truncates and chance.random() < _TRUNCATE_SHARE:
            connection.execute(chance.choice((b"TRUNCATE pairs", b"TRUNCATE parts, void")))
            self._truncates -= 1
            return
        write = chance.choice((*_WRITES, _EMPTY))
        keys = {"k": chance.randint(1, _ROWS // 3), "o": chance.randint(1, _ROWS)}
        connection.execute(write.format(**keys).encode())
