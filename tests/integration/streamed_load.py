"""Large transactions of every shape that Postgres streams, the same in each run.

With `logical_decoding_work_mem` at its minimum, a few hundred rows make Postgres stream a
transaction. `write` writes those that can be published from their stream, `write_doubtful` one
that is read again (docs/adr/0014).
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

# autovacuum: its invalidations can make Postgres describe tables again at any moment.
SETTINGS: Final = {
    "logical_decoding_work_mem": "64kB",
    "max_prepared_transactions": "10",
    "autovacuum": "off",
    # No reconnect is expected, however long a busy machine stops a daemon.
    "wal_sender_timeout": "10min",
}
TABLES: Final = (
    "CREATE TABLE users (id bigint PRIMARY KEY, n int NOT NULL, name text, big text)",
    "CREATE TABLE pairs (b int, n int NOT NULL, a text, PRIMARY KEY (a, b))",
    "CREATE TABLE full_rows (id int PRIMARY KEY, n int NOT NULL, big text)",
    "CREATE TABLE notes (id int, n int NOT NULL)",
    "CREATE TABLE shape (id int PRIMARY KEY, n int NOT NULL)",
    "CREATE TYPE mood AS ENUM ('sad', 'glad')",
    "CREATE TABLE moods (id int PRIMARY KEY, n int, mood mood)",
    "ALTER TABLE full_rows REPLICA IDENTITY FULL",
    "ALTER TABLE notes REPLICA IDENTITY FULL",
    *(f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL" for name in ("users", "full_rows")),
)

Session = psycopg.Connection[tuple[Any, ...]]

_BIG: Final = "repeat(md5(i::text), 90)"


def _users(first: int, last: int, big: str = "NULL") -> str:
    return f"INSERT INTO users SELECT i, 1, 'u' || i, {big} FROM generate_series({first},{last}) i"


# Rows and rollbacks: a third of the iterations is rolled back.
_LOOP: Final = """
DO $$ BEGIN
  INSERT INTO users VALUES (90000, 1, 'loop'); INSERT INTO pairs VALUES (0, 1, 'loop');
  FOR i IN 1..400 LOOP
    BEGIN
      INSERT INTO users VALUES (90000 + i, 1, 'loop' || i);
      BEGIN
        UPDATE users SET n = n + 1 WHERE id = 90000 + i;
        IF i % 5 = 0 THEN RAISE 'inner'; END IF;
      EXCEPTION WHEN raise_exception THEN
        INSERT INTO pairs VALUES (i, 1, 'undone inside');
      END;
      IF i % 3 = 0 THEN RAISE 'outer'; END IF;
    EXCEPTION WHEN raise_exception THEN
      INSERT INTO pairs VALUES (i, 2, 'undone outside');
    END;
  END LOOP;
END $$
"""
_SAVEPOINTS: Final = (
    "INSERT INTO users VALUES (20000, 1, 'top')", "INSERT INTO pairs VALUES (1, 1, 'top')",
    "SAVEPOINT a", _users(20001, 20400),
    "SAVEPOINT b", _users(20401, 20800), "UPDATE users SET n = 7 WHERE id BETWEEN 20001 AND 20300",
    "RELEASE b", _users(20801, 21200), "ROLLBACK TO a",
    _users(21201, 21500), "SAVEPOINT c", "DELETE FROM users WHERE id < 21300 AND id > 20000",
    "ROLLBACK TO c", "SAVEPOINT d", _users(21501, 21900), "RELEASE d",
    "SAVEPOINT e", "INSERT INTO pairs SELECT i, 1, 'e' FROM generate_series(1, 500) i",
    "ROLLBACK TO e", "INSERT INTO pairs SELECT i, 2, 'f' FROM generate_series(1, 500) i",
)  # fmt: skip
_ROW_CHANGES: Final = (
    _users(30000, 30060, _BIG),
    "INSERT INTO full_rows SELECT i, 1, " + _BIG + " FROM generate_series(1, 60) i",
    # Unchanged TOAST in the inserting transaction; changed keys; TOAST added and removed.
    "UPDATE users SET n = n + 1 WHERE id BETWEEN 30000 AND 30060",
    "UPDATE full_rows SET n = n + 1",
    "UPDATE users SET id = id + 5000 WHERE id BETWEEN 30000 AND 30030",
    "UPDATE users SET big = NULL WHERE id = 30050",
    "UPDATE full_rows SET id = id + 1000 WHERE id < 20",
    "DELETE FROM users WHERE id BETWEEN 30031 AND 30045",
    "DELETE FROM full_rows WHERE id < 50",
    "INSERT INTO notes SELECT i % 7, 1 FROM generate_series(1, 300) i",
    "UPDATE notes SET n = 2 WHERE id = 3", "DELETE FROM notes WHERE id = 4",
    "TRUNCATE notes, pairs", "INSERT INTO notes SELECT i, 3 FROM generate_series(1, 400) i",
)  # fmt: skip
_SHAPES: Final = (
    "INSERT INTO shape SELECT i, 1 FROM generate_series(1, 400) i",
    "ALTER TABLE shape ADD COLUMN more text DEFAULT 'm'",
    "INSERT INTO shape SELECT i, 1, 'x' FROM generate_series(401, 800) i",
    "INSERT INTO moods VALUES (1, 1, 'sad')",
    "CREATE TYPE colour AS ENUM ('red')",
    "ALTER TABLE shape ADD COLUMN colour colour, DROP COLUMN n",
    "INSERT INTO shape SELECT i, 'y', 'red' FROM generate_series(801, 1200) i",
    "ALTER TABLE shape RENAME COLUMN more TO most",
    "UPDATE shape SET most = 'z' WHERE id > 1100",
)


def _interleave(dsn: str) -> None:
    """Three large transactions and many small ones; one of the large ones is rolled back."""
    with (
        psycopg.connect(dsn) as a, psycopg.connect(dsn) as b, psycopg.connect(dsn) as c,
        psycopg.connect(dsn, autocommit=True) as small,
    ):  # fmt: skip
        for turn in range(5):
            for number, session in enumerate((a, b, c), 1):
                first = number * 100_000 + turn * 1_000
                session.execute(_users(first, first + 250).encode())
                small.execute("INSERT INTO pairs VALUES (%s, 1, 's')", [first])
                # A non-transactional message belongs to no transaction: it precedes all open ones.
                session.execute(
                    "SELECT pg_logical_emit_message(false, 'app', %s)", [f"{number}/{turn}"]
                )
        b.commit()
        a.execute(b"UPDATE users SET n = 2 WHERE id BETWEEN 101000 AND 101200")
        c.rollback()
        small.execute("INSERT INTO users VALUES (1, 1, 'between two commits')")
        a.commit()


def _in_one(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn) as session:
        for statement in statements:
            session.execute(statement.encode())


def _prepare(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as session:
        for gid, first in (("kept", 40_000), ("dropped", 41_000)):
            for statement in ("BEGIN", _users(first, first + 500), f"PREPARE TRANSACTION '{gid}'"):
                session.execute(statement.encode())
            session.execute("INSERT INTO users VALUES (%s, 1)", [first - 1])
        session.execute(b"ROLLBACK PREPARED 'dropped'")
        session.execute(b"COMMIT PREPARED 'kept'")


def write(dsn: str) -> None:
    """Write the transactions that can be published from their stream."""
    _in_one(dsn, "INSERT INTO users VALUES (0, 1, 'first')")
    _interleave(dsn)
    _in_one(dsn, *_ROW_CHANGES)
    _in_one(dsn, *_SHAPES)
    _in_one(dsn, "INSERT INTO shape VALUES (0, 'full_rows', 'red')")
    _prepare(dsn)
    _in_one(dsn, "INSERT INTO users VALUES (-1, 1, 'last')")


_DOUBTFUL: Final = (
    *_SAVEPOINTS, _LOOP,
    "INSERT INTO shape (id) SELECT i FROM generate_series(5000, 5500) i", "SAVEPOINT shape",
    "ALTER TABLE shape ADD COLUMN never int DEFAULT 4",
    "INSERT INTO shape (id, never) SELECT i, 4 FROM generate_series(6000, 6500) i",
    "ROLLBACK TO shape", "INSERT INTO shape (id) SELECT i FROM generate_series(7000, 7500) i",
    "SELECT pg_logical_emit_message(true, 'app', 'published')",
    "SAVEPOINT a", "SELECT pg_logical_emit_message(true, 'app', 'never')", "ROLLBACK TO a",
    _users(52000, 52500), "SELECT pg_logical_emit_message(true, 'app', 'published too')",
)  # fmt: skip


def write_doubtful(dsn: str) -> None:
    """Write one transaction with everything that makes its stream doubtful."""
    _in_one(dsn, *_DOUBTFUL)
