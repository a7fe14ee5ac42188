"""What our role may do in the source, determined by trying: nothing is created.

Managed servers grant by roles of their own (`rds_replication`, `cloudsqlsuperuser`,
`azure_pg_admin`), which no catalog column shows. So each ability is tried in a way that cannot
succeed or is rolled back: a slot under a name that Postgres refuses after it has checked the
privilege, a replication connection that only identifies the system, a publication in a transaction
that is rolled back (`cdc.publication.change`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import errors

from cdc.errors import CDCError
from cdc.source.connection import connect, translate, translated
from cdc.source.stream import identify

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.connection import Connection
    from cdc.source.server import Server

# No valid slot name: Postgres checks the privilege first, then refuses the name.
_NO_SLOT_NAME: Final = "cdc doctor: may this role create slots?"
# Roles that only a managed service has, with how its parameters are changed.
_MANAGED: Final = {
    "rds_superuser": "the DB parameter group (wal_level: rds.logical_replication = 1)",
    "cloudsqlsuperuser": "the instance's database flags (wal_level: cloudsql.logical_decoding)",
    "alloydbsuperuser": "the instance's database flags (wal_level: alloydb.logical_decoding)",
    "azure_pg_admin": "the server parameters",
}


class PublicationRefusal(NamedTuple):
    """How Postgres refuses a publication, and the statements, for a person who may run them."""

    error: CDCError
    sql: str


class Abilities(NamedTuple):
    """What was refused, each None where it was not; and how parameters are changed."""

    slot: str | None = None
    stream: CDCError | None = None
    publication: PublicationRefusal | None = None
    superusers: frozenset[str] = frozenset()
    settable: frozenset[str] | None = None  # ALTER SYSTEM may set these; None: all
    pending: frozenset[str] = frozenset()  # parameters whose change waits for a restart
    managed: str | None = None  # where a managed service's parameters are changed


def read_abilities(connection: Connection, config: Config, server: Server) -> Abilities:
    """Try everything but the publication, which takes a plan."""
    settable, pending, managed = _parameters(connection, server)
    query = b"SELECT rolname::text FROM pg_roles WHERE rolsuper"
    with translated("reading the superusers"):
        superusers = frozenset(name for (name,) in connection.execute(query).fetchall())
    return Abilities(
        slot=_slot(connection),
        stream=_stream(config),
        superusers=superusers,
        settable=settable,
        pending=pending,
        managed=managed,
    )


def _slot(connection: Connection) -> str | None:
    """Return how Postgres refuses our role a new slot, or None."""
    try:
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (_NO_SLOT_NAME,)
        )
    except errors.InsufficientPrivilege as error:
        return error.diag.message_primary or "permission denied"
    except errors.ObjectNotInPrerequisiteState:
        return None  # wal_level, which is judged by its setting; checked after the privilege
    except psycopg.OperationalError as error:
        raise translate(error, "trying whether a slot may be created") from error
    except psycopg.Error:
        return None  # the name is refused: after the privilege was checked
    raise AssertionError("Postgres takes no such name")


def _stream(config: Config) -> CDCError | None:
    """Return how a replication connection is refused, or None."""
    try:
        with connect(config, replication=True) as connection:
            identify(connection)
    except CDCError as error:
        return error
    return None


_GRANTS_SINCE: Final = 150_000
_GRANTED: Final = """
SELECT name, pending_restart, has_parameter_privilege(name, 'ALTER SYSTEM') FROM pg_settings
WHERE name = ANY(%s)
"""
_UNGRANTED: Final = "SELECT name, pending_restart, false FROM pg_settings WHERE name = ANY(%s)"


def _parameters(
    connection: Connection, server: Server
) -> tuple[frozenset[str] | None, frozenset[str], str | None]:
    """Return which parameters we may set, which wait for a restart, and where else they are set."""
    names = list(server.settings)
    since = connection.info.server_version >= _GRANTS_SINCE
    query = _GRANTED if since else _UNGRANTED
    known = "SELECT rolname::text FROM pg_roles WHERE rolname = ANY(%s)"
    with translated("reading which settings may be changed"):
        rows = connection.execute(query.encode(), (names,)).fetchall()
        roles = connection.execute(known, (list(_MANAGED),)).fetchall()
    pending = frozenset(name for name, waits, _ in rows if waits)
    settable = frozenset(name for name, _, allowed in rows if allowed)
    managed = next((_MANAGED[role] for (role,) in roles), None)
    return None if server.superuser and managed is None else settable, pending, managed
