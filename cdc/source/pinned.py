"""A connection that reads rows as of an exported snapshot, one transaction per range.

Each range has a transaction of its own, so that a session that changes the table waits for one
range at most: a waiting ALTER TABLE, blocked by the ACCESS SHARE lock, blocks every other session
too. So the table may change between two ranges, and an old snapshot does not show all of that: rows
that TRUNCATE, VACUUM FULL, CLUSTER or ALTER TABLE moved to another file are invisible there,
without an error. So each range checks what the parser and the relation cache report now, under the
lock.

https://www.postgresql.org/docs/current/mvcc-caveats.html
https://www.postgresql.org/docs/current/sql-set-transaction.html
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from msgspec.structs import replace
from psycopg import conninfo, pq, sql

from cdc.errors import RewrittenError, SnapshotLostError
from cdc.source.connection import connect, translated
from cdc.source.export import config_for_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config import Config
    from cdc.source.connection import Connection

# A range's query plan must not depend on the role's settings. A policy is an error instead of
# missing rows.
_SESSION: Final = {
    "row_security": "off",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
}
# The errors for a snapshot name that Postgres does not know: they differ by major and by cause.
_UNKNOWN_SNAPSHOT: Final = (
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidParameterValue,
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.UndefinedFile,
)
_MISSING: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.WrongObjectType,
)


class RelationShape(NamedTuple):
    """Identifies a relation's rows: another file or other columns are other rows."""

    filenode: int
    attnums: tuple[int, ...]


def connect_for_rows(config: Config) -> Connection:
    """Return a connection to the server that rows are read from."""
    connection = connect(config_for_rows(config))
    with translated("preparing a connection for a snapshot"):
        connection.execute(
            "SELECT set_config(s.name, to_be.value, false) FROM pg_settings s"
            " JOIN unnest(%s::text[], %s::text[]) AS to_be(name, value) USING (name)",
            (list(_SESSION), list(_SESSION.values())),
        )
    return connection


def portable_dsn(connection: Connection) -> str:
    """Return the connection string that gives another client the same connection settings.

    It holds the password.
    """
    known = "SELECT name FROM pg_settings WHERE name = ANY (%s)"
    with translated("preparing another client's connection"):
        names = connection.execute(known, (list(_SESSION),)).fetchall()
    more = [f"-c {name}={_SESSION[name]}" for (name,) in names]
    given = conninfo.conninfo_to_dict(connection.info.dsn)
    options = " ".join([str(given.get("options") or ""), *more]).strip()
    return conninfo.make_conninfo(
        connection.info.dsn, options=options, password=connection.info.password or None
    )


def portable_config(config: Config, connection: Connection) -> Config:
    """Return the configuration that reads rows the same way where our files are missing."""
    dsn = config.snapshot.dsn or config.source.dsn
    if connection.info.password:
        dsn = conninfo.make_conninfo(dsn, password=connection.info.password)
    return replace(
        config,
        source=replace(config.source, dsn=dsn, password_file=None),
        snapshot=replace(config.snapshot, dsn=None),
    )


@contextmanager
def pinned(connection: Connection, snapshot: str) -> Iterator[None]:
    """Run the block in a transaction that sees what `snapshot` sees.

    Raises SnapshotLostError where it no longer exists.
    """
    with translated("beginning a transaction"):
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        _adopt(connection, snapshot)
        yield
        with translated("ending a transaction"):
            connection.execute("COMMIT")
    except BaseException:
        if not connection.closed and connection.info.transaction_status in (
            pq.TransactionStatus.INTRANS,
            pq.TransactionStatus.INERROR,
        ):
            connection.execute("ROLLBACK")
        raise


def _adopt(connection: Connection, snapshot: str) -> None:
    statement = sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot))
    with translated("adopting the exported snapshot"):
        try:
            connection.execute(statement)
        except _UNKNOWN_SNAPSHOT as error:
            reason = str(error).strip().split("\n")[0]
            raise SnapshotLostError(f"snapshot {snapshot} no longer exists: {reason}") from error


def shape(connection: Connection, relation: str, columns: Sequence[str]) -> RelationShape:
    """Lock the relation against changes of its columns, and return its current shape.

    `relation` is written as SQL. Raises RewrittenError where it or a column is missing.
    """
    table, named = sql.SQL(relation), sql.SQL(", ").join(map(sql.Identifier, columns))
    filenode = "SELECT pg_relation_filenode(%s::regclass)"
    with translated(f"locking {relation}"):
        try:
            connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(table))
            # The parser has the current columns, where pg_attribute would show the snapshot's.
            query = sql.SQL("SELECT {} FROM ONLY {} LIMIT 0").format(named, table)
            result = connection.execute(query).pgresult
            row = connection.execute(filenode, (relation,)).fetchone()
        except _MISSING as error:
            reason = str(error).strip().split("\n")[0]
            raise RewrittenError(f"{relation} has changed: {reason}") from error
    assert result is not None, "it was just executed"
    assert row is not None, "a SELECT without FROM gives a row"
    attnums = tuple(result.ftablecol(i) for i in range(result.nfields))
    return RelationShape(int(row[0] or 0), attnums)
