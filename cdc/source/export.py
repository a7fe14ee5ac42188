"""A snapshot that other connections can take: exported by a temporary slot, alive with its maker.

Creating a logical slot finds a consistent point: a WAL position, and the snapshot that sees exactly
the transactions that committed before it. The slot is made for that alone and is temporary: it goes
away with this connection, and so does the snapshot. Its name is a lock besides, as there is one
slot of a name. What must not be lost is kept by the pipeline's own slot, which is not touched.

The snapshot lasts until this connection's next command, so there is none.

https://www.postgresql.org/docs/current/protocol-replication.html (CREATE_REPLICATION_SLOT)
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from msgspec.structs import replace
from psycopg import errors

from cdc.errors import ConfigError, SlotBusyError
from cdc.events import LSN
from cdc.source.connection import connect, translated
from cdc.source.stream import identify

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.catalog import Connection
    from cdc.source.timelines import System

STANDBY_MAJOR: Final = 16  # the first whose standbys make logical slots
_MAX_NAME: Final = 63
# A session that waits inside a transaction is what these end; ours waits for a reason.
_TIMEOUTS: Final = """
SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN (
    'idle_in_transaction_session_timeout', 'idle_session_timeout', 'statement_timeout',
    'transaction_timeout', 'lock_timeout')
"""
# A standby has its primary's system identifier; when it was started is its own.
_WHO: Final = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       pg_postmaster_start_time()::text, pg_is_in_recovery()
"""


class Who(NamedTuple):
    """Which server answers."""

    system_identifier: str
    started_at: str
    in_recovery: bool


def slot_name(config: Config) -> str:
    """Return the name of the temporary slot, which fits into Postgres' names."""
    name = f"{config.slot}_snapshot"
    if len(name) > _MAX_NAME:
        mark = hashlib.sha256(config.slot.encode()).hexdigest()[:8]
        name = f"{config.slot[: _MAX_NAME - 18]}_{mark}_snapshot"
    return name


def where_read(config: Config) -> Config:
    """Return the configuration that connects to where rows are read."""
    dsn = config.snapshot.dsn
    return config if dsn is None else replace(config, source=replace(config.source, dsn=dsn))


def who(connection: Connection) -> Who:
    """Return which server it is."""
    with translated("asking the server who it is"):
        row = connection.execute(_WHO).fetchone()
    assert row is not None
    return Who(*row)


class Export:
    """The connection that holds the exported snapshot."""

    def __init__(self, config: Config) -> None:
        """Connect; `create` and in the end `close` follow."""
        self.slot = slot_name(config)
        self._config = config
        self._connection = self._connect()
        self.who = who(self._connection)
        self.system: System = identify(self._connection)
        self.snapshot = ""
        self.lsn = LSN(0)

    def _connect(self) -> Connection:
        connection = connect(where_read(self._config), replication=True)
        with translated("setting timeouts"):
            connection.execute(_TIMEOUTS)
        return connection

    def reopen(self) -> None:
        """Let the snapshot go, and connect for another."""
        self._connection.close()
        self._connection = self._connect()

    @property
    def major(self) -> int:
        """The major of the server that rows are read from."""
        return self._connection.info.server_version // 10_000

    def create(self) -> None:
        """Export the snapshot. Blocks while transactions that write are open; see `cancel`.

        Raises SlotBusyError where another coordinator has one.
        """
        # Before 15 the options had no names; the old words are understood ever since.
        command = f'CREATE_REPLICATION_SLOT "{self.slot}" TEMPORARY LOGICAL pgoutput'
        try:
            row = self._connection.execute(f"{command} EXPORT_SNAPSHOT".encode()).fetchone()
        except errors.DuplicateObject as error:
            raise _busy(self._config) from error
        except errors.ConfigurationLimitExceeded as error:
            raise ConfigError(
                f"cannot create the temporary slot {self.slot}: {error.diag.message_primary}",
                hint="the initial snapshot needs one more of max_replication_slots and of"
                " max_wal_senders, while it lasts: raise them and restart Postgres, or drop a slot"
                " that nobody uses (`cdc slot show --all`)",
            ) from error
        except psycopg.Error as error:
            with translated(f"creating the temporary slot {self.slot}"):
                raise error from None
        assert row is not None
        self.lsn, self.snapshot = LSN.parse(row[1]), str(row[2])

    def cancel(self) -> None:
        """Let a `create` on another thread end at once."""
        self._connection.cancel_safe(timeout=5.0)

    def check_same_server(self, connection: Connection) -> None:
        """Raise ConfigError where `connection` came to another server than this one did."""
        other = who(connection)
        if other[:2] != self.who[:2]:
            key = "snapshot.dsn" if self._config.snapshot.dsn else "source.dsn"
            raise ConfigError(
                f"two connections through {key} came to two servers: what one of them exports the"
                " other can't see",
                hint=f"{key} leads to a load balancer, or names several hosts: name one server"
                " there, such as one standby in snapshot.dsn",
            )

    def alive(self, connection: Connection) -> bool:
        """Return whether the snapshot can still be taken; asked of another connection."""
        with translated(f"looking for the temporary slot {self.slot}"):
            row = connection.execute(
                "SELECT active_pid = %s FROM pg_replication_slots WHERE slot_name = %s",
                (self._connection.info.backend_pid, self.slot),
            ).fetchone()
        return bool(row and row[0])

    def close(self) -> None:
        """Let the snapshot go."""
        self._connection.close()


def held(connection: Connection, config: Config) -> bool:
    """Return whether some process holds an exported snapshot of this pipeline."""
    with translated("looking for the temporary slot"):
        row = connection.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", (slot_name(config),)
        ).fetchone()
    return bool(row and row[0])


def log_standby_snapshot(primary: Connection) -> None:
    """Have the primary note its running transactions, where the role may: standbys wait for it.

    It does so by itself too, every quarter of a minute in which something is written.
    """
    with suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFunction):
        primary.execute("SELECT pg_log_standby_snapshot()")


def raise_if_held(config: Config) -> None:
    """Raise SlotBusyError where some process takes the snapshot. Blocks."""
    with connect(where_read(config)) as connection:
        if held(connection, config):
            raise _busy(config)


def _busy(config: Config) -> SlotBusyError:
    return SlotBusyError(
        f"another process takes the initial snapshot: the slot {slot_name(config)} exists",
        hint="it goes on by itself, and this one waits; pg_replication_slots has its pid",
    )
