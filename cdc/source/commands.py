"""Signed commands that are sent into the stream, as logical messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError
from cdc.source import authority
from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.connection import Connection

_NOW: Final = """
SELECT system_identifier::text, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
FROM pg_catalog.pg_control_system()
"""


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
