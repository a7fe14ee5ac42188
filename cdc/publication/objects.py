"""Create and drop what the pipeline needs in the source: a publication and a logical slot.

Only what is missing is created, and nothing is ever recreated: a missing slot took its changes with
it, and creating it again would hide that. The publication (`cdc.publication.change`) comes first,
since the slot decodes with the catalogs of its own past, where a publication newer than the slot is
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import errors, sql

from cdc.errors import ConfigError, GapError, PermissionDeniedError, SlotBusyError
from cdc.events import LSN
from cdc.runtime.waiting import after
from cdc.source.connection import connect, translated
from cdc.source.slots import PLUGIN, read_slot

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.connection import Connection
    from cdc.source.tables import SourceTable

_ALTER_SECONDS: Final = 10.0
_LISTED: Final = "`cdc slot show --all` lists them"


def matched_tables(config: Config, found: list[SourceTable]) -> list[SourceTable]:
    """Return those of `found` that the configuration captures, all of which can be published.

    A pattern for several tables skips views, foreign, unlogged and temporary tables; naming one of
    these, or something that does not exist, raises ConfigError.
    """
    selection = config.selection
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
                f"source.tables names {pattern.text}, which is {table.description}",
                hint="only permanent tables write changes to the WAL; leave it out",
            )
    publishable = [each for each in found if each.publishable]
    if not publishable:
        raise ConfigError(
            f"source.tables ({', '.join(config.source.tables)}) matches no table",
            hint="create a table first, or correct source.tables; `cdc doctor` lists what is there",
        )
    return publishable


def create_slot(connection: Connection, name: str, *, failover: bool = False) -> LSN:
    """Create the logical slot and return its consistent point, where its changes start.

    Waits for every transaction that is writing at this moment. With `failover` (17 and later)
    standbys may copy it.
    """
    create = "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, %s"
    create += ", failover => true)" if failover else ")"
    with translated(f"creating the slot {name}"):
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
                hint="as a superuser: ALTER SYSTEM SET wal_level = 'logical', then restart"
                " Postgres",
            ) from error
        except errors.ConfigurationLimitExceeded as error:
            raise ConfigError(
                f"cannot create the slot {name}: {error.diag.message_primary}",
                hint="drop a slot that nobody uses (`cdc slot show --all`), or raise "
                "max_replication_slots and restart Postgres",
            ) from error
    assert row is not None
    return LSN.parse(row[0])


def alter_slot(
    config: Config, name: str, *, failover: bool | None = None, two_phase: bool | None = None
) -> None:
    """Change a slot's options; raise SlotBusyError while a daemon streams from it."""
    with connect(config) as connection:
        slot = read_slot(connection, name)
    if slot is None:
        raise GapError(f"there is no slot {name}", hint=_LISTED)
    busy = SlotBusyError(
        f"cannot alter the slot {name}: the walsender {slot.active_pid or ''} streams from it",
        hint="stop the daemon and its standbys first",
    )
    if slot.active_pid is not None:
        raise busy
    wanted = {"FAILOVER": failover, "TWO_PHASE": two_phase}
    options = ", ".join(f"{k} {str(v).lower()}" for k, v in wanted.items() if v is not None)
    with connect(config, replication=True) as connection:
        needed = 18 if two_phase is not None else 17
        if connection.info.server_version < needed * 10_000:
            raise ConfigError(
                f"Postgres can change this of a slot from {needed} on",
                hint="docs/OPERATIONS.md describes what can be done before",
            )
        # Postgres would wait without limit for a daemon that has just taken the slot.
        cancelling = after(_ALTER_SECONDS, connection.cancel_safe)
        with cancelling, translated(f"altering the slot {name}"):
            try:
                connection.execute(f'ALTER_REPLICATION_SLOT "{name}" ({options})'.encode())
            except errors.QueryCanceled as error:
                raise busy from error


def drop_slot(connection: Connection, name: str) -> None:
    """Drop the slot; raise SlotBusyError while a daemon streams from it."""
    with translated(f"dropping the slot {name}"):
        try:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
        except errors.ObjectInUse as error:
            raise SlotBusyError(
                f"cannot drop the slot {name}: {error.diag.message_primary}",
                hint="stop the daemon that streams from it (and its standbys) first",
            ) from error
        except errors.UndefinedObject as error:
            raise GapError(f"there is no slot {name}", hint=_LISTED) from error


def drop_publication(connection: Connection, name: str) -> None:
    """Drop the publication if it exists; raise PermissionDeniedError unless our role owns it."""
    drop = sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name))
    with translated(f"dropping the publication {name}"):
        try:
            connection.execute(drop)
        except errors.InsufficientPrivilege as error:
            raise PermissionDeniedError(
                f"dropping the publication {name}: {error.diag.message_primary}",
                hint=f"{drop.as_string()};  -- as its owner or a superuser, then `cdc teardown`",
            ) from error
