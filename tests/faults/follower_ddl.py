"""DDL in the followers' load: the columns of `shapes` change, and its rows with them.

Each statement shows other values in rows that get no event. A row of the table follows in the same
transaction, so the statement has its place in the log there. The next one waits until the daemon
has confirmed that: a catalog with two changes does not prove which column is which, and a topic
that is incomplete by right is not what the campaign is about.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import psycopg

from tests.faults.follower_rows import Row

_NAMES: Final = ("a", "b", "c", "d", "e")
_WIDER: Final = {"int": "bigint", "varchar(12)": "text"}
_TYPES: Final = ("int", "bigint", "varchar(12)", "text")
_KEYS: Final = 30
# Of how many changes of the columns a truncate is before or after it, or one that is rolled back.
_EMPTYING: Final = 0.1
_UNDOING: Final = 0.1
_COLUMNS: Final = """
SELECT attname, replace(format_type(atttypid, atttypmod), 'character varying', 'varchar')
FROM pg_attribute WHERE attrelid = 'shapes'::regclass AND attnum > 1 AND NOT attisdropped
"""
_CONFIRMED: Final = """
SELECT bool_and(confirmed_flush_lsn >= %s::pg_lsn) FROM pg_replication_slots
WHERE database = current_database()
"""


class Shapes:
    """The table's columns and rows, as the database has them within a transaction."""

    def __init__(self, rows: list[Row], columns: dict[str, str]) -> None:
        self.rows = {row["id"]: row for row in rows}
        self.columns = columns  # by name, without the key, the type of each

    @classmethod
    def read(cls, connection: psycopg.Connection[Any], rows: list[Row]) -> Shapes:
        types = {name: "int" if kind == "integer" else kind for name, kind in
                 connection.execute(_COLUMNS.encode())}  # fmt: skip
        return cls(rows, types)


class Alterations:
    """Changes the table of a load's model, with the load's connection."""

    def __init__(self, chance: random.Random, run: Callable[..., None]) -> None:
        self._chance, self._run = chance, run
        self._after: str | None = None  # the LSN that the last DDL is below; None: not known yet

    def forget(self) -> None:
        """Take the last DDL as not confirmed: it may have been in a lost transaction."""
        self._after = None

    def may_follow(self, cursor: psycopg.Cursor[Any]) -> bool:
        """Return whether the log has the last DDL."""
        if self._after is None:
            row = cursor.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            self._after = row[0]
            return False
        row = cursor.execute(_CONFIRMED.encode(), (self._after,)).fetchone()
        return row is not None and bool(row[0])

    def alter(self, shapes: Shapes) -> str:
        """Make one change, and write a row after it; return what was done."""
        deeds = [self._add, self._add, self._rename, self._exchange, self._drop, self._again]
        before, after = self._chance.random() < _EMPTYING, self._chance.random() < _EMPTYING
        if before:
            self._empty(shapes)
        if self._chance.random() < _UNDOING:
            self._undo(shapes)
        done = self._chance.choice([*deeds, self._widen])(shapes)
        if after:
            self._empty(shapes)
        self.forget()
        self.write(shapes)
        return f"truncate, {done}" if before else f"{done}, truncate" if after else done

    def write(self, shapes: Shapes) -> None:
        """Insert a row; or update some of its columns, or delete it, if its key is there."""
        key = self._chance.randrange(_KEYS)
        old = shapes.rows.get(key)
        given = {name: self._value(kind) for name, kind in shapes.columns.items()}
        if old is None:
            names = ", ".join(["id", *given])
            places = ", ".join(["%s"] * (1 + len(given)))
            self._run(f"INSERT INTO shapes ({names}) VALUES ({places})", key, *given.values())
            shapes.rows[key] = {"id": key, **given}
            return
        given = {name: value for name, value in given.items() if self._chance.random() < 0.5}
        if given:
            sets = ", ".join(f"{name} = %s" for name in given)
            self._run(f"UPDATE shapes SET {sets} WHERE id = %s", *given.values(), key)
            shapes.rows[key] = old | given
        else:
            self._run("DELETE FROM shapes WHERE id = %s", key)
            del shapes.rows[key]

    def _value(self, kind: str) -> object:
        if self._chance.random() < 0.2:
            return None
        if "int" in kind:
            return self._chance.randrange(2**40 if kind == "bigint" else 2**31)
        return self._chance.choice(["", "x'ü\"", "7", "{}", "another"])

    def _empty(self, shapes: Shapes) -> None:
        """Truncate the table, and write some rows again."""
        self._run("TRUNCATE shapes")
        shapes.rows.clear()
        for _ in range(self._chance.randrange(3)):
            self.write(shapes)

    def _undo(self, shapes: Shapes) -> None:
        """Change columns and rows in a subtransaction that is rolled back."""
        self._run("SAVEPOINT altering")
        self._run("ALTER TABLE shapes ADD undone int DEFAULT 1")
        self._run("UPDATE shapes SET undone = 2")
        for name in list(shapes.columns)[:1]:
            self._run(f"ALTER TABLE shapes DROP {name}")
        self._run("ROLLBACK TO SAVEPOINT altering")

    # -- deeds, each one statement or a few that belong together ------------------------------

    def _add(self, shapes: Shapes) -> str:
        free = [name for name in _NAMES if name not in shapes.columns]
        if not free:
            return self._drop(shapes)
        self._add_column(shapes, self._chance.choice(free))
        return "add"

    def _add_column(self, shapes: Shapes, name: str) -> None:
        kind = self._chance.choice(_TYPES)
        default = self._value(kind)
        literal = (
            default
            if isinstance(default, int)
            else f"'{str(default).replace(chr(39), 2 * chr(39))}'"
        )
        with_default = "" if default is None else f" DEFAULT {literal}"
        self._run(f"ALTER TABLE shapes ADD {name} {kind}{with_default}")
        shapes.columns[name] = kind
        for row in shapes.rows.values():
            row[name] = default

    def _rename(self, shapes: Shapes) -> str:
        free = [name for name in _NAMES if name not in shapes.columns]
        if not free or not shapes.columns:
            return self._add(shapes)
        self._rename_column(
            shapes, self._chance.choice(list(shapes.columns)), self._chance.choice(free)
        )
        return "rename"

    def _rename_column(self, shapes: Shapes, old: str, new: str) -> None:
        self._run(f"ALTER TABLE shapes RENAME {old} TO {new}")
        shapes.columns[new] = shapes.columns.pop(old)
        for row in shapes.rows.values():
            row[new] = row.pop(old)

    def _exchange(self, shapes: Shapes) -> str:
        """Give two columns each other's name."""
        if len(shapes.columns) < 2:
            return self._add(shapes)
        one, other = self._chance.sample(list(shapes.columns), 2)
        self._rename_column(shapes, one, "between")
        self._rename_column(shapes, other, one)
        self._rename_column(shapes, "between", other)
        return "exchange"

    def _drop(self, shapes: Shapes) -> str:
        if not shapes.columns:
            return self._add(shapes)
        self._drop_column(shapes, self._chance.choice(list(shapes.columns)))
        return "drop"

    def _drop_column(self, shapes: Shapes, name: str) -> None:
        self._run(f"ALTER TABLE shapes DROP {name}")
        del shapes.columns[name]
        for row in shapes.rows.values():
            del row[name]

    def _again(self, shapes: Shapes) -> str:
        """Drop a column and add one of its name."""
        if not shapes.columns:
            return self._add(shapes)
        name = self._chance.choice(list(shapes.columns))
        self._drop_column(shapes, name)
        self._add_column(shapes, name)
        return "again"

    def _widen(self, shapes: Shapes) -> str:
        narrow = [name for name, kind in shapes.columns.items() if kind in _WIDER]
        if not narrow:
            return self._add(shapes)
        name = self._chance.choice(narrow)
        shapes.columns[name] = _WIDER[shapes.columns[name]]
        self._run(f"ALTER TABLE shapes ALTER {name} TYPE {shapes.columns[name]}")
        return "widen"
