"""Writes to a database, one operation after another; some fail, as in any application.

Column and table names are never used twice for different things, so that a reader knows what a name
means; a table that is dropped and recreated keeps its name on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

_SESSIONS: Final = 3
_KEYS: Final = 12
_BULK: Final = 400  # rows: more than fit into logical_decoding_work_mem
# Stored out of line, and never sent again if unchanged.
_BIG: Final = "repeat(md5(random()::text), 90)"

SCHEMAS: Final = ("app", "moved")
SETUP: Final = (
    "CREATE SCHEMA app",
    "CREATE SCHEMA moved",
    "CREATE SEQUENCE app.rows",
    "CREATE TABLE app.marker (id int PRIMARY KEY, rid int, n int)",
    "CREATE TABLE app.part (id int, rid int, n int, region int) PARTITION BY LIST (region)",
    "ALTER TABLE app.part ADD PRIMARY KEY (id, region)",
    "CREATE TABLE app.part_0 PARTITION OF app.part FOR VALUES IN (0)",
    "CREATE TABLE app.part_1 PARTITION OF app.part FOR VALUES IN (1)",
)
# Each gets the columns of `_CREATE`; the statements here make the difference.
_TABLES: Final = {
    "plain": (),
    "other": (),
    "whole": ("ALTER TABLE {} REPLICA IDENTITY FULL",),
    "pair": ("ALTER TABLE {} DROP CONSTRAINT {}", "ALTER TABLE {} ADD PRIMARY KEY (n, id)"),
}
_CREATE: Final = (
    "CREATE TABLE {} (id int, rid int NOT NULL, n int NOT NULL DEFAULT 0, note text, big text)",
    "ALTER TABLE {} ADD CONSTRAINT {} PRIMARY KEY (id)",
    "ALTER TABLE {} ALTER big SET STORAGE EXTERNAL",
)
# A column's type, and those that it may be changed to: its text stays the same.
_WIDER: Final = {"integer": ("bigint",), "bigint": ("text",), "text": ("varchar(200)",)}


@dataclass
class Table:
    """A table as the model knows it; after a rollback it may differ in Postgres."""

    schema: str
    name: str
    extra: dict[str, str] = field(default_factory=dict)  # types of columns that come and go

    @property
    def quoted(self) -> str:
        return sql.Identifier(self.schema, self.name).as_string()


class Source:
    """Several sessions on one database, and every operation that they can do."""

    def __init__(self, dsn: str, chance: Random) -> None:
        self._dsn = dsn
        self._chance = chance
        self._sessions = [self._connect() for _ in range(_SESSIONS)]
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._admin.execute("SET lock_timeout = '20ms'")
        self._numbers = 0
        self._prepared: list[str] = []
        self.tables: list[Table] = []
        self.done: dict[str, int] = {}
        for name in _TABLES:
            self.tables.append(Table("app", name))
            self._create(self.tables[-1])

    def _connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self._dsn)
        # Another session of this thread holds the lock: waiting would never end.
        connection.execute("SET lock_timeout = '20ms'")
        connection.commit()
        return connection

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _create(self, table: Table) -> None:
        key = sql.Identifier(f"key_{self._number()}").as_string()
        further = _TABLES.get(table.name, ())
        with self._admin.transaction():
            for statement in (*_CREATE, *further):
                self._admin.execute(statement.format(table.quoted, key).encode())

    # -- one operation -----------------------------------------------------------------------------

    def step(self) -> None:
        """Do one operation; if Postgres refuses it, it is rolled back and not counted."""
        chance = self._chance
        kinds: list[tuple[int, Callable[[psycopg.Connection[Any]], None]]] = [
            (30, self._insert), (26, self._update), (9, self._change_key), (10, self._delete),
            (3, self._copy), (2, self._bulk), (6, self._savepoint), (14, self._commit),
            (3, self._roll_back), (2, self._prepare), (3, self._end_prepared), (3, self._truncate),
            (3, self._say), (9, self._alter), (3, self._partition),
        ]  # fmt: skip
        operation = chance.choices([o for _, o in kinds], [w for w, _ in kinds])[0]
        session = chance.choice(self._sessions)
        try:
            operation(session)
        except psycopg.Error:
            self._undo(session)
        else:
            name = operation.__name__.strip("_")
            self.done[name] = self.done.get(name, 0) + 1

    def _undo(self, session: psycopg.Connection[Any]) -> None:
        try:
            if self._chance.random() < 0.5:
                session.execute("ROLLBACK TO SAVEPOINT s")
                return
        except psycopg.Error:
            pass
        session.rollback()

    def rest(self) -> None:
        """End every transaction, including prepared ones: they may hold tables locked."""
        for session in self._sessions:
            if session.info.transaction_status is not TransactionStatus.IDLE:
                (session.rollback if self._chance.random() < 0.3 else session.commit)()
        for name in list(self._prepared):
            self._finish(name)

    def close(self) -> None:
        """Leave nothing open, in any case."""
        for session in self._sessions:
            session.close()
        for name in list(self._prepared):
            self._finish(name)
        self._admin.close()

    # -- rows --------------------------------------------------------------------------------------

    def _table(self) -> Table:
        return self._chance.choice(self.tables)

    def _key(self) -> int:
        return self._chance.randint(1, _KEYS)

    def _extra(self, table: Table) -> tuple[str, str]:
        """Return columns that not every version of the table has, and values for them."""
        values = {"integer": "7", "bigint": "8000000000", "text": "E'a''b\\\\c\\nü'"}
        some = {
            name: values.get(kind, "'v'")
            for name, kind in table.extra.items()
            if self._chance.random() < 0.7
        }
        return "".join(f", {name}" for name in some), "".join(f", {v}" for v in some.values())

    def _insert(self, session: psycopg.Connection[Any]) -> None:
        table = self._table()
        columns, values = self._extra(table)
        big = self._chance.choice(("NULL", "'small'", _BIG))
        session.execute(
            f"INSERT INTO {table.quoted} (id, rid, n, note, big{columns})"
            f" VALUES (%s, nextval('app.rows'), %s, %s, {big}{values})".encode(),
            (self._key(), self._chance.randint(0, 3), self._chance.choice((None, "", "x'\\y\n"))),
        )

    def _update(self, session: psycopg.Connection[Any]) -> None:
        table = self._table()
        change = self._chance.choice(("note = note || '+'", "note = 'n'", f"big = {_BIG}"))
        if table.extra and self._chance.random() < 0.4:
            name = self._chance.choice(list(table.extra))
            change = f"{name} = NULL"
        session.execute(
            f"UPDATE {table.quoted} SET {change} WHERE id = %s".encode(), (self._key(),)
        )

    def _change_key(self, session: psycopg.Connection[Any]) -> None:
        change = self._chance.choice(("id = %s", "n = n + 1, id = %s"))
        session.execute(
            f"UPDATE {self._table().quoted} SET {change} WHERE id = %s".encode(),
            (self._key(), self._key()),
        )

    def _delete(self, session: psycopg.Connection[Any]) -> None:
        session.execute(
            f"DELETE FROM {self._table().quoted} WHERE id = %s".encode(), (self._key(),)
        )

    def _copy(self, session: psycopg.Connection[Any]) -> None:
        table = self._table()
        (first,) = session.execute("SELECT nextval('app.rows')").fetchone() or (0,)
        copy = f"COPY {table.quoted} (id, rid, n, note) FROM STDIN"
        with session.cursor().copy(copy.encode()) as rows:
            for index in range(3):
                rows.write_row((1_000 + first * 3 + index, -(first * 3 + index), 1, "copied"))

    def _bulk(self, session: psycopg.Connection[Any]) -> None:
        """Write more than the walsender keeps in memory, with some of it rolled back."""
        table, first = self._table(), 100_000 + self._number() * _BULK
        for half, kept in ((0, True), (1, False), (2, True)):
            session.execute("SAVEPOINT bulk")
            session.execute(
                f"INSERT INTO {table.quoted} (id, rid, n, note)"
                " SELECT i, nextval('app.rows'), 2, repeat('b', 100)"
                " FROM generate_series(%s::int, %s::int) i".encode(),
                (first + half * _BULK // 4, first + (half + 1) * _BULK // 4 - 1),
            )
            session.execute(f"{'RELEASE' if kept else 'ROLLBACK TO'} SAVEPOINT bulk".encode())
        session.execute(f"DELETE FROM {table.quoted} WHERE id > %s".encode(), (first + 20,))

    def _partition(self, session: psycopg.Connection[Any]) -> None:
        """Insert into, move between, or delete from the partitions; or truncate all of them."""
        statement = self._chance.choice((
            "INSERT INTO app.part VALUES (%(id)s, nextval('app.rows'), 0, %(id)s %% 2)",
            "UPDATE app.part SET region = 1 - region, n = n + 1 WHERE id = %(id)s",
            "UPDATE app.part SET n = n + 1 WHERE id = %(id)s",
            "DELETE FROM app.part WHERE id = %(id)s",
            "TRUNCATE app.part",
        ))  # fmt: skip
        session.execute(statement.encode(), {"id": self._key()})

    def _truncate(self, session: psycopg.Connection[Any]) -> None:
        some = self._chance.sample(self.tables, self._chance.randint(1, 2))
        cascade = self._chance.choice(("", " CASCADE", " RESTART IDENTITY"))
        names = ", ".join(table.quoted for table in some)
        session.execute(f"TRUNCATE {names}{cascade}".encode())

    def _say(self, session: psycopg.Connection[Any]) -> None:
        session.execute(
            "SELECT pg_logical_emit_message(%s, %s, %s)",
            (self._chance.random() < 0.6, "app", f"sent {self._number()}"),
        )

    # -- transactions ------------------------------------------------------------------------------

    def _commit(self, session: psycopg.Connection[Any]) -> None:
        session.commit()

    def _roll_back(self, session: psycopg.Connection[Any]) -> None:
        session.rollback()

    def _savepoint(self, session: psycopg.Connection[Any]) -> None:
        session.execute(self._chance.choice((b"SAVEPOINT s", b"SAVEPOINT s", b"ROLLBACK TO s")))

    def _prepare(self, session: psycopg.Connection[Any]) -> None:
        if session.info.transaction_status is TransactionStatus.INTRANS:
            name = f"{session.info.dbname}-{self._number()}"
            session.execute(sql.SQL("PREPARE TRANSACTION {}").format(name))
            self._prepared.append(name)
            session.rollback()  # psycopg does not know that the transaction has ended

    def _end_prepared(self, _: psycopg.Connection[Any]) -> None:
        if self._prepared:
            self._finish(self._chance.choice(self._prepared))

    def _finish(self, name: str) -> None:
        how = self._chance.choice(("COMMIT", "COMMIT", "ROLLBACK"))
        self._admin.execute(sql.SQL(f"{how} PREPARED {{}}").format(name))
        self._prepared.remove(name)

    # -- definitions -------------------------------------------------------------------------------

    def _alter(self, session: psycopg.Connection[Any]) -> None:
        """Change a definition, in a separate transaction or in one that has written."""
        table = self._table()
        connection = self._admin if self._chance.random() < 0.6 else session
        change = self._chance.choice((
            self._add_column, self._add_column, self._drop_column, self._rename_column,
            self._retype, self._rename, self._move, self._make_again, self._key_of,
            self._identity, self._identity,
        ))  # fmt: skip
        if connection is session and change in {self._make_again, self._rename, self._move}:
            connection = self._admin  # after a rollback the model's name could be another table's
        change(connection, table)

    @staticmethod
    def _run(connection: psycopg.Connection[Any], table: Table, change: str) -> None:
        connection.execute(f"ALTER TABLE {table.quoted} {change}".encode())

    def _add_column(self, connection: psycopg.Connection[Any], table: Table) -> None:
        name, kind = f"c{self._number()}", self._chance.choice(("integer", "bigint", "text"))
        default = self._chance.choice(("", " NOT NULL DEFAULT '5'"))
        self._run(connection, table, f"ADD COLUMN {name} {kind}{default}")
        table.extra[name] = kind

    def _drop_column(self, connection: psycopg.Connection[Any], table: Table) -> None:
        if table.extra:
            name = self._chance.choice(list(table.extra))
            self._run(connection, table, f"DROP COLUMN {name}")
            del table.extra[name]

    def _rename_column(self, connection: psycopg.Connection[Any], table: Table) -> None:
        if table.extra:
            old, new = self._chance.choice(list(table.extra)), f"c{self._number()}"
            self._run(connection, table, f"RENAME COLUMN {old} TO {new}")
            table.extra[new] = table.extra.pop(old)

    def _retype(self, connection: psycopg.Connection[Any], table: Table) -> None:
        wider = [name for name, kind in table.extra.items() if kind in _WIDER]
        if wider:
            name = self._chance.choice(wider)
            kind = _WIDER[table.extra[name]][0]
            self._run(connection, table, f"ALTER COLUMN {name} TYPE {kind}")
            table.extra[name] = kind

    def _rename(self, connection: psycopg.Connection[Any], table: Table) -> None:
        new = f"t{self._number()}"
        self._run(connection, table, f"RENAME TO {new}")
        table.name = new

    def _move(self, connection: psycopg.Connection[Any], table: Table) -> None:
        (schema,) = set(SCHEMAS) - {table.schema}
        self._run(connection, table, f"SET SCHEMA {schema}")
        table.schema = schema

    def _make_again(self, connection: psycopg.Connection[Any], table: Table) -> None:
        connection.execute(f"DROP TABLE {table.quoted}".encode())
        table.extra.clear()
        self._create(table)

    def _key_of(self, connection: psycopg.Connection[Any], table: Table) -> None:
        key = self._chance.choice(("(id)", "(n, id)", "(id, rid)", None))
        with connection.transaction():
            found = connection.execute(
                "SELECT conname FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'p'",
                (table.quoted,),
            ).fetchone()
            if found is not None:
                self._run(connection, table, f"DROP CONSTRAINT {found[0]}")
            if key is not None:
                self._run(connection, table, f"ADD PRIMARY KEY {key}")

    def _identity(self, connection: psycopg.Connection[Any], table: Table) -> None:
        kind = self._chance.choice(("DEFAULT", "DEFAULT", "FULL", "FULL", "NOTHING", "INDEX"))
        with connection.transaction():
            if kind == "INDEX":
                index = f"i{self._number()}"
                connection.execute(f"CREATE UNIQUE INDEX {index} ON {table.quoted} (rid)".encode())
                kind = f"USING INDEX {index}"
            self._run(connection, table, f"REPLICA IDENTITY {kind}")
