"""A cut's changes, and the rows of the topics that were needed, in a temporary file of SQLite.

Kafka finds no record by its key. So a table's topic is read when a row or all keys are needed, and
from then on each cut is added to its rows. The file has no name, and holds what SQLite's cache does
not.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lockstep.sinks.contract import Altered

# With 64 MiB of cache.
_TABLES: Final = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;
CREATE TABLE stored (place TEXT, key BLOB, seq INT, value BLOB, PRIMARY KEY (place, key));
CREATE TABLE cut (place TEXT, key BLOB, seq INT, lsn INT, value BLOB, PRIMARY KEY (place, key));
CREATE TABLE older (key BLOB, value BLOB);
CREATE VIEW every AS
  SELECT place, key, seq, value FROM cut WHERE value IS NOT NULL
  UNION ALL
  SELECT place, key, seq, value FROM stored WHERE NOT EXISTS (
    SELECT 1 FROM cut WHERE cut.place = stored.place AND cut.key = stored.key);
"""
_PUT: Final = """
INSERT INTO cut VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
SET seq = excluded.seq, lsn = excluded.lsn, value = excluded.value WHERE excluded.seq >= cut.seq
"""


class TopicRow(NamedTuple):
    """A row of a topic, or its tombstone."""

    table: str
    key: bytes
    seq: int
    lsn: int | None
    value: bytes | None


class TopicRows:
    """Rows by table and key: those of the cut, in front of the stored ones."""

    def __init__(self) -> None:
        # Made in one thread and used in another, never in two at once.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.executescript(_TABLES)

    def close(self) -> None:
        self._db.close()

    # --- what topics hold ---

    def load(self, table: str, found: Iterable[tuple[bytes, int, bytes | None]]) -> None:
        """Take records of a table's topic, in their order."""
        self._db.execute("BEGIN")
        for key, seq, value in found:
            if value is None:
                self._db.execute("DELETE FROM stored WHERE place = ? AND key = ?", (table, key))
            else:
                row = (table, key, seq, value)
                self._db.execute("INSERT OR REPLACE INTO stored VALUES (?, ?, ?, ?)", row)
        self._db.execute("COMMIT")

    def unload(self, table: str) -> None:
        """Forget a table's stored rows."""
        self._db.execute("DELETE FROM stored WHERE place = ?", (table,))

    def keep(self, table: str) -> None:
        """Store the cut's rows of a table, and delete those that it deletes."""
        self._db.execute(
            "INSERT OR REPLACE INTO stored SELECT place, key, seq, value FROM cut WHERE place = ?",
            (table,),
        )
        self._db.execute("DELETE FROM stored WHERE place = ? AND value IS NULL", (table,))

    # --- the cut ---

    def put(self, changes: Iterable[TopicRow]) -> None:
        """Take changes of the cut; of one key, those with the highest seq."""
        self._db.execute("BEGIN")
        self._db.executemany(_PUT, changes)
        self._db.execute("COMMIT")

    def clear(self, table: str, seq: int, below: int | None = None) -> None:
        """Delete a table's rows with a lower seq than `below`, or all, as of `seq`."""
        bound = (1 << 63) - 1 if below is None else below
        self._db.execute(
            "UPDATE cut SET seq = ?, lsn = NULL, value = NULL WHERE place = ? AND seq < ?",
            (seq, table, bound),
        )
        self._db.execute(
            "INSERT OR IGNORE INTO cut SELECT place, key, ?, NULL, NULL FROM stored"
            " WHERE place = ? AND seq < ?",
            (seq, table, bound),
        )

    def alter(self, altered: Altered) -> None:
        """Change a table's older rows as DDL has changed the table's."""
        table, seq = altered.version.name, altered.seq
        self._db.create_function("altered_key", 1, altered.key)
        self._db.create_function("altered_row", 1, altered.row)
        self._db.execute("DELETE FROM older")
        self._db.execute(
            "INSERT INTO older SELECT altered_key(key), altered_row(value) FROM every"
            " WHERE place = ? AND seq < ?",
            (table, seq),
        )
        self.clear(table, seq, seq)
        self._db.execute(
            "INSERT INTO cut SELECT ?, key, ?, NULL, value FROM older WHERE true ON CONFLICT DO"
            " UPDATE SET value = excluded.value WHERE cut.seq = excluded.seq",
            (table, seq),
        )
        self._db.execute("DELETE FROM older")

    def applied_up_to(self, seq: int) -> None:
        """Forget what of the cut another copy has written."""
        self._db.execute("DELETE FROM cut WHERE seq <= ?", (seq,))

    def end_cut(self) -> None:
        self._db.execute("DELETE FROM cut")

    def changes(self) -> Iterator[TopicRow]:
        """Yield the cut's result, one record for each key, by seq."""
        for row in self._db.execute("SELECT place, key, seq, lsn, value FROM cut ORDER BY seq"):
            yield TopicRow(*row)

    # --- both ---

    def has(self, table: str) -> bool:
        """Return whether a table has rows."""
        found = self._db.execute("SELECT 1 FROM every WHERE place = ? LIMIT 1", (table,))
        return found.fetchone() is not None

    def rows(self, table: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the rows of keys."""
        found = {}
        for key in keys:
            query = "SELECT value FROM every WHERE place = ? AND key = ?"
            row = self._db.execute(query, (table, key)).fetchone()
            if row is not None:
                found[key] = row[0]
        return found

    def all(self, table: str) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield each row's key, its seq and the row."""
        yield from self._db.execute("SELECT key, seq, value FROM every WHERE place = ?", (table,))
