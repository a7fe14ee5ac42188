"""Create and drop what the pipeline needs in the source: a publication and a logical slot.

Only what is missing is created, and nothing is ever recreated: a slot that is gone took its changes
with it, and making it anew would hide that. The publication comes first, since the slot decodes
with the catalogs of its own past and a publication younger than the slot would be missing there.

The publication names tables one by one, also for `schema.*`: FOR TABLES IN SCHEMA needs a
superuser and Postgres 15, and would publish later tables before anybody has looked at them. It
publishes partitioned tables through their root, so that a table is one topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg import errors, sql

from cdc.errors import ConfigError, GapError, PermissionDeniedError, SlotBusyError
from cdc.events import LSN
from cdc.source.connection import translated
from cdc.source.inspection import Table, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config import Config

PLUGIN = "pgoutput"


def matched_tables(connection: psycopg.Connection, config: Config) -> list[Table]:
    """Return the tables that `source.tables` names, all of which can be published.

    `schema.*` passes over views, foreign, unlogged and temporary tables; naming one of these, or
    something that does not exist, raises ConfigError.
    """
    found = tables(connection, config.table_patterns)
    for pattern in config.table_patterns:
        matches = [each for each in found if pattern.matches(each.schema, each.name)]
        if pattern.table is None:
            continue
        name = f"{pattern.schema}.{pattern.table}"
        if not matches:
            raise ConfigError(
                f"source.tables names {name}, which does not exist",
                hint="correct the name (its case counts), create the table, or leave it out",
            )
        if not matches[0].publishable:
            raise ConfigError(
                f"source.tables names {name}, which is {describe_kind(matches[0])}",
                hint="only permanent tables write changes to the WAL; leave it out",
            )
    publishable = [each for each in found if each.publishable]
    if not publishable:
        raise ConfigError(
            f"source.tables ({', '.join(config.source.tables)}) matches no table",
            hint="create a table first, or correct source.tables; `cdc doctor` lists what is there",
        )
    return publishable


def describe_kind(table: Table) -> str:
    """Return in words what kind of relation `table` is."""
    kinds = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
    persistences = {"u": "an unlogged table", "t": "a temporary table"}
    return kinds.get(table.kind) or persistences.get(table.persistence) or "a table"


def _names(tables: Sequence[Table]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(each.schema, each.name) for each in tables)


def create_publication_sql(name: str, tables: Sequence[Table]) -> sql.Composed:
    """Return the statement that creates the publication."""
    return sql.SQL(
        "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert, update, delete, truncate', "
        "publish_via_partition_root = true)"
    ).format(sql.Identifier(name), _names(tables))


def add_tables_sql(name: str, tables: Sequence[Table]) -> sql.Composed:
    """Return the statement that adds `tables` to the publication."""
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), _names(tables))


def create_publication(connection: psycopg.Connection, name: str, tables: Sequence[Table]) -> None:
    """Create the publication of `tables`; raise PermissionDeniedError with the SQL to grant."""
    _change_publication(connection, create_publication_sql(name, tables), name, tables)


def add_tables(connection: psycopg.Connection, name: str, tables: Sequence[Table]) -> None:
    """Add `tables` to the publication; their changes are published from here on."""
    _change_publication(connection, add_tables_sql(name, tables), name, tables)


def _change_publication(
    connection: psycopg.Connection, statement: sql.Composed, name: str, tables: Sequence[Table]
) -> None:
    try:
        connection.execute(statement)
    except errors.InsufficientPrivilege as error:
        foreign = [str(each) for each in tables if not each.owned]
        why = f"; our role does not own {', '.join(foreign)}" if foreign else ""
        raise PermissionDeniedError(
            f"cannot create or change the publication {name}: {error.diag.message_primary}{why}",
            hint="it takes CREATE on the database and every table's owner; as an owner or a "
            f"superuser run:\n    {statement.as_string(connection)};\n  then `cdc setup` again",
        ) from error
    except psycopg.Error as error:
        with translated(f"creating or changing the publication {name}"):
            raise error from None


def create_slot(connection: psycopg.Connection, name: str) -> LSN:
    """Create the logical slot and return its consistent point, where its changes begin.

    Waits for every transaction that is writing at this moment.
    """
    try:
        row = connection.execute(
            "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, %s)", (name, PLUGIN)
        ).fetchone()
    except errors.InsufficientPrivilege as error:
        role = connection.info.user
        raise PermissionDeniedError(
            f"the role {role} may not create a replication slot",
            hint=f"as a superuser: ALTER ROLE {sql.Identifier(role).as_string()} REPLICATION",
        ) from error
    except errors.ObjectNotInPrerequisiteState as error:
        raise ConfigError(
            f"cannot create the slot {name}: {error.diag.message_primary}",
            hint="as a superuser: ALTER SYSTEM SET wal_level = 'logical', then restart Postgres",
        ) from error
    except errors.ConfigurationLimitExceeded as error:
        raise ConfigError(
            f"cannot create the slot {name}: {error.diag.message_primary}",
            hint="drop a slot that nobody uses (`cdc slot show --all`), or raise "
            "max_replication_slots and restart Postgres",
        ) from error
    except psycopg.Error as error:
        with translated(f"creating the slot {name}"):
            raise error from None
    assert row is not None
    return LSN.parse(row[0])


def drop_slot(connection: psycopg.Connection, name: str) -> None:
    """Drop the slot; raise SlotBusyError while somebody streams from it."""
    try:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
    except errors.ObjectInUse as error:
        raise SlotBusyError(
            f"cannot drop the slot {name}: {error.diag.message_primary}",
            hint="stop the daemon that streams from it (and its standbys) first",
        ) from error
    except errors.UndefinedObject as error:
        raise GapError(
            f"there is no slot {name}", hint="`cdc slot show --all` lists them"
        ) from error
    except psycopg.Error as error:
        with translated(f"dropping the slot {name}"):
            raise error from None


def drop_publication(connection: psycopg.Connection, name: str) -> None:
    """Drop the publication if it is there."""
    with translated(f"dropping the publication {name}"):
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
