"""Transactions in Postgres or SQLite, and translation of their errors.

Every error of the database is raised as ours, wherever it arises: the engine translates it.
Statements on rows are plain SQL in the driver's own style, because values are bound as Postgres'
text and cast by the statement (`sinks.sql.types`). Messages have an error's class, code and
constraint, never its text, which may hold values.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import create_engine, event, inspect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from cdc.errors import (
    CDCError,
    ConfigError,
    PermissionDeniedError,
    StoreLostError,
    UnavailableError,
    gist,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext

_POSTGRES: Final = "postgresql+psycopg"
_DRIVERS: Final = {"postgresql": _POSTGRES, "postgres": _POSTGRES, "sqlite": "sqlite+pysqlite"}
_LOCK_SECONDS: Final = 30
# Of who creates what several followers share, such as the table of frontiers; any number.
_CREATING: Final = 0x10C5_7E9
# The server notices within half a minute that the follower's machine is down, and this process that
# the server is: otherwise a cut's locks would be held for the kernel's two hours. Other connections
# than TCP have none of these.
_DEAD_PEER: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
# Values are read and written in Postgres' own forms, whatever the server's settings are.
_BEGIN_POSTGRES: Final = (
    f"SET LOCAL lock_timeout = {1_000 * _LOCK_SECONDS}; SET LOCAL DateStyle = ISO; SET LOCAL"
    " IntervalStyle = postgres; SET LOCAL TimeZone = UTC; SET LOCAL bytea_output = hex; SET LOCAL"
    " extra_float_digits = 1; SET CONSTRAINTS ALL DEFERRED; "
    + "; ".join(f"SET LOCAL tcp_{name} = {value}" for name, value in _DEAD_PEER.items())
)
# The first characters of SQLSTATEs, and SQLite's names of errors.
_TEMPORARY: Final = (
    *("08", "25006", "40", "53", "55P03", "57", "58"),
    *("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN"),
)
_REFUSED: Final = ("28", "42501", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")
_MISSING: Final = ("42P01", "3F000")
_DATA: Final = ("22", "42846")
_IN_USE: Final = "55006"  # object_in_use


class Database:
    """One database; connections are opened when they are needed."""

    def __init__(self, url: str) -> None:
        """Raise ConfigError for a URL of another kind of database."""
        try:
            parsed = make_url(url)
        except ArgumentError:
            parsed = make_url("x://")
        driver = _DRIVERS.get(parsed.get_backend_name())
        if driver is None or not parsed.database:
            raise ConfigError(
                "`sql.url` names no database in Postgres or SQLite",
                hint="postgresql://user:password@host/database, or sqlite:////path/of/a/file.db",
            )
        self.is_postgres = driver == _POSTGRES
        self.mark = "%s" if self.is_postgres else "?"  # the sign of a parameter
        self._url = parsed.set(drivername=driver)

    def quoted(self, *names: str) -> str:
        """Return a name for a statement, in which `%` is psycopg's sign."""
        text = ".".join('"' + name.replace('"', '""') + '"' for name in names if name)
        return text.replace("%", "%%") if self.is_postgres else text

    def connect(self) -> Connection:
        """Return a connection, whose first statement begins a transaction."""
        return self._engine.connect()

    def transaction(self) -> AbstractContextManager[Connection]:
        """Run the block in a transaction of its own."""
        return self._engine.begin()

    def create_alone(self, connection: Connection) -> None:
        """Wait until no other follower creates anything, and let none until the transaction ends.

        `IF NOT EXISTS` is no help: of two that create the same table at once one gets an error.
        """
        if self.is_postgres:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_CREATING})")

    def columns(self, connection: Connection, place: str) -> dict[str, str]:
        """Return the types of a table's columns; none where there is no such table."""
        query = f"SELECT name, type FROM pragma_table_info({place})"  # noqa: S608 - a quoted name
        if self.is_postgres:
            name = place.replace("%%", "%").replace("'", "''")
            query = (
                "SELECT attname, typname FROM pg_attribute JOIN pg_type t ON t.oid = atttypid"  # noqa: S608 - as above
                f" WHERE attrelid = to_regclass('{name}') AND attnum > 0 AND NOT attisdropped"
            ).replace("%", "%%")
        return {name: kind for name, kind in connection.exec_driver_sql(query)}  # noqa: C416 - rows

    def close(self) -> None:
        """Close connections; the next call opens new ones."""
        engine = self.__dict__.pop("_engine", None)
        if engine is not None:
            engine.dispose()

    @cached_property
    def _engine(self) -> Engine:
        if self.is_postgres:
            given = {k: v for k, v in _DEAD_PEER.items() if k not in self._url.query}
            engine = create_engine(self._url, pool_pre_ping=True, connect_args=given)
        else:
            # A deleted file must be noticed, so no connection outlives its transaction.
            waiting = {"timeout": _LOCK_SECONDS}
            engine = create_engine(self._url, poolclass=NullPool, connect_args=waiting)
            event.listen(engine, "connect", _set_up)
        event.listen(engine, "begin", _begin_in_postgres if self.is_postgres else _begin_in_sqlite)
        event.listen(engine, "handle_error", _translate)
        return engine


def _begin_in_postgres(connection: Connection) -> None:
    connection.exec_driver_sql(_BEGIN_POSTGRES)


def _begin_in_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")


def _set_up(connection: Any, _: object) -> None:  # noqa: ANN401 - sqlite3's
    # Transactions begin where we begin them; readers and the writer do not wait for each other.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")


def key_of(connection: Connection, schema: str, table: str) -> tuple[str, ...]:
    """Return the columns of a table's primary key."""
    found = inspect(connection).get_pk_constraint(table, schema=schema or None)
    return tuple(found["constrained_columns"])


def is_data_error(error: CDCError) -> bool:
    """Return whether a value does not fit its type, or a type has no cast to another."""
    return _code(error.__cause__).startswith(_DATA)


def is_in_use(error: CDCError) -> bool:
    """Return whether a table can't be altered because constraints of its rows are not checked."""
    return _code(error.__cause__) == _IN_USE


def _translate(context: ExceptionContext) -> None:
    # A connection that is lost while it is unused is replaced: no error.
    if isinstance(context.sqlalchemy_exception, DBAPIError) and not context.is_pre_ping:
        raise _translated(context.sqlalchemy_exception)


def _translated(error: DBAPIError) -> CDCError:
    code, what = _code(error.orig), gist(error.orig or error)
    if code.startswith(_MISSING) or "no such table" in str(error.orig):
        return StoreLostError("a table of the follower is missing in the database")
    if code.startswith(_REFUSED):
        hint = "check the login in `url`, and its rights to create and to write tables"
        return PermissionDeniedError(f"the database refuses the follower ({code})", hint=hint)
    if error.connection_invalidated or not code or code.startswith(_TEMPORARY):
        what = f"the database does not answer, or refuses for now: {what} {code}".rstrip()
        return UnavailableError(what, hint="is it running, and reachable?")
    if isinstance(error, IntegrityError):
        named = getattr(getattr(error.orig, "diag", None), "constraint_name", None)
        return ConfigError(
            f"a cut violates the constraint {named or code} of the database",
            hint="follow each table that a foreign key names, and make that key DEFERRABLE; drop"
            " a constraint that the source does not have",
        )
    return ConfigError(
        f"the database refuses a statement: {what} {code}",
        hint="see its log; if a view or a constraint of yours prevents a table's change, drop it,"
        " and create it again afterwards",
    )


def _code(error: BaseException | None) -> str:
    """Return the SQLSTATE, or SQLite's name of a driver's error; "" without one."""
    names = ("sqlstate", "sqlite_errorname")
    return next((code for name in names if (code := getattr(error, name, None))), "")
