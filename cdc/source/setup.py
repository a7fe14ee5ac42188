"""Create and drop what the pipeline needs in the source: a publication and a logical slot.

Only what is missing is created, and nothing is ever recreated: a missing slot took its changes with
it, and creating it again would hide that. The publication (`cdc.source.membership`) comes first,
since the slot decodes with the catalogs of its own past, where a publication newer than the slot is
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg import errors, sql

from cdc.errors import ConfigError, GapError, PermissionDeniedError, SlotBusyError
from cdc.events import LSN
from cdc.source.connection import connect, translated
from cdc.source.server import Table, tables

if TYPE_CHECKING:
    from cdc.config import Config

PLUGIN = "pgoutput"


def matched_tables(connection: psycopg.Connection, config: Config) -> list[Table]:
    """Return the tables that the configuration captures, all of which can be published.

    A pattern for several tables skips views, foreign, unlogged and temporary tables; naming one of
    these, or something that does not exist, raises ConfigError.
    """
    selection = config.selection
    found = tables(connection, selection)
    named = {(each.schema, each.name): each for each in found}
    for pattern in selection.patterns:
        if pattern.exact is None or selection.excludes(*pattern.exact):
            continue
        if pattern.exact not in named:
            raise ConfigError(
                f"source.tables names {pattern.text}, which does not exist",
                hint="correct the name (its case counts), create the table, or leave it out",
            )
        table = named[pattern.exact]
        if not table.publishable:
            raise ConfigError(
                f"source.tables names {pattern.text}, which is {describe_kind(table)}",
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


def create_slot(connection: psycopg.Connection, name: str, *, failover: bool = False) -> LSN:
    """Create the logical slot and return its consistent point, where its changes start.

    Waits for every transaction that is writing at this moment. With `failover` (17 and later)
    standbys may copy it.
    """
    create = "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, %s"
    create += ", failover => true)" if failover else ")"
    try:
        row = connection.execute(create.encode(), (name, PLUGIN)).fetchone()
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


def alter_slot(
    config: Config, name: str, *, failover: bool | None = None, two_phase: bool | None = None
) -> None:
    """Change a slot's options; no daemon may be streaming from it."""
    wanted = {"FAILOVER": failover, "TWO_PHASE": two_phase}
    options = ", ".join(f"{k} {str(v).lower()}" for k, v in wanted.items() if v is not None)
    with connect(config, replication=True) as connection:
        needed = 18 if two_phase is not None else 17
        if connection.info.server_version < needed * 10_000:
            raise ConfigError(
                f"Postgres can change this of a slot from {needed} on",
                hint="docs/OPERATIONS.md tells what can be done before",
            )
        with translated(f"altering the slot {name}"):
            connection.execute(f'ALTER_REPLICATION_SLOT "{name}" ({options})'.encode())


def drop_slot(connection: psycopg.Connection, name: str) -> None:
    """Drop the slot; raise SlotBusyError while a daemon streams from it."""
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
    """Drop the publication if it exists."""
    with translated(f"dropping the publication {name}"):
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
