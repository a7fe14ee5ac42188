"""The publication's tables by name, and commands that are sent into the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import ConfigError
from cdc.source import authority
from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.catalog import Connection

# A published table, or a partition that is published by its root or itself.
_MEMBERS: Final = """
SELECT n.nspname::text, c.relname::text, greatest(c.reltuples, 0)::bigint,
       CASE WHEN c.relkind = 'p' THEN
           (SELECT coalesce(sum(pg_relation_size(t.relid)), 0) FROM pg_partition_tree(c.oid) t)
       ELSE pg_relation_size(c.oid) END::bigint,
       (SELECT rn.nspname || '.' || rc.relname FROM pg_class rc
        JOIN pg_namespace rn ON rn.oid = rc.relnamespace
        WHERE rc.oid = pg_partition_root(c.oid) AND rc.oid <> c.oid)
FROM pg_publication_tables t
JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
WHERE t.pubname = %s ORDER BY 1, 2
"""

_NOW: Final = """
SELECT system_identifier::text, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
FROM pg_catalog.pg_control_system()
"""


class Member(NamedTuple):
    """A published table."""

    schema: str
    table: str
    rows: int  # estimated
    bytes: int
    root: str | None  # the partitioned table that it is a partition of

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


def members(connection: Connection, publication: str) -> list[Member]:
    """Return every table that the publication publishes under a name of its own."""
    with translated(f"reading the tables of {publication}"):
        return [Member(*row) for row in connection.execute(_MEMBERS, (publication,)).fetchall()]


def require_secret(config: Config) -> bytes:
    """Return the secret that commands are signed with; ConfigError where there is none."""
    secret = authority.secret_of(config)
    if secret is None:
        raise ConfigError(
            "control.secret is not set, and the daemon obeys no command that is not signed with it",
            hint="set control.secret in the configuration (`openssl rand -hex 32` makes one), the"
            " same for the daemon, then restart the daemon",
        )
    return secret


def send_command(connection: Connection, config: Config, prefix: str, content: bytes) -> str:
    """Write a command, signed, as a transactional logical message; return its LSN.

    Raises ConfigError where there is no secret to sign it with. The time is the server's own, like
    the time of the commit, with which the daemon compares it.
    """
    secret = require_secret(config)
    with translated(f"writing a message {prefix}"):
        now = connection.execute(_NOW).fetchone()
        assert now is not None
        scope, at_us = authority.Scope(config.pipeline, now[0]), int(now[1])
        content = authority.sign(secret, authority.COMMAND_PURPOSE, scope, at_us, content)
        row = connection.execute(
            "SELECT pg_logical_emit_message(true, %s, %s::bytea)::text", (prefix, content)
        ).fetchone()
    assert row is not None
    return str(row[0])
