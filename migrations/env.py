"""Run the revisions: on the connection that `cdc` passes, on a separate one, or as SQL.

The applied revisions are in `lockstep.alembic_version`, never in a table of the user's. One process
runs at a time: two that set up the same database wait for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from sqlalchemy import Connection

SCHEMA: Final = "lockstep"
_MARK: Final = "made by cdc setup"
# Any number that no other program is likely to lock.
_LOCK: Final = 7_231_873_550_412


def _on(connection: Connection) -> None:
    """Run them in one transaction: all requested revisions, or none."""
    connection.execute(text(f"SELECT pg_catalog.pg_advisory_xact_lock({_LOCK})"))
    # IF NOT EXISTS needs the CREATE privilege even if the schema exists.
    there = connection.execute(text(f"SELECT pg_catalog.to_regnamespace('{SCHEMA}') IS NOT NULL"))
    if not there.scalar():
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        connection.execute(text(f"COMMENT ON SCHEMA {SCHEMA} IS '{_MARK}'"))
    context.configure(connection=connection, version_table_schema=SCHEMA)
    with context.begin_transaction():
        context.run_migrations()


def _as_sql() -> None:
    """Print them as SQL, to be run by another role."""
    context.configure(dialect_name="postgresql", version_table_schema=SCHEMA, literal_binds=True)
    with context.begin_transaction():
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        context.run_migrations()


def _run() -> None:
    if context.is_offline_mode():
        _as_sql()
        return
    given = context.config.attributes.get("connection")
    if given is not None:
        _on(given)
        return
    dsn = context.get_x_argument(as_dictionary=True)["dsn"]
    with create_engine(dsn, poolclass=NullPool).begin() as connection:
        _on(connection)


_run()
