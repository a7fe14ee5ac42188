"""A snapshot that other connections can use: exported by a temporary slot's connection.

Creating a logical slot finds a consistent point: a WAL position, and the snapshot that sees exactly
the transactions that committed before it. The slot is created only for that and is temporary:
Postgres drops it when this connection ends, and the snapshot ends too. Its name is also a lock, as
there is one slot of a name. What must not be lost is kept by the pipeline's own slot, which is not
touched.

The snapshot lasts until this connection's next command, so there is none.

https://www.postgresql.org/docs/current/protocol-replication.html (CREATE_REPLICATION_SLOT)
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace
from psycopg import errors

from cdc.errors import ConfigError, SlotBusyError
from cdc.events import LSN
from cdc.source.connection import connect, translated
from cdc.source.stream import identify

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.connection import Connection
    from cdc.source.timelines import System

STANDBY_MAJOR: Final = 16  # the first whose standbys create logical slots
_MAX_NAME: Final = 63
# A standby has its primary's system identifier; its start time is its own.
_REACHED: Final = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       pg_postmaster_start_time()::text, pg_is_in_recovery()
"""


class ReachedServer(NamedTuple):
    system_identifier: str
    started_at: str
    in_recovery: bool


def slot_name(config: Config) -> str:
    """Return the name of the temporary slot, within Postgres' limit on names."""
    name = f"{config.slot}_snapshot"
    if len(name) > _MAX_NAME:
        mark = hashlib.sha256(config.slot.encode()).hexdigest()[:8]
        name = f"{config.slot[: _MAX_NAME - 18]}_{mark}_snapshot"
    return name


def config_for_rows(config: Config) -> Config:
    """Return the configuration that connects to the server that rows are read from."""
    dsn = config.snapshot.dsn
    return config if dsn is None else replace(config, source=replace(config.source, dsn=dsn))


def reached_server(connection: Connection) -> ReachedServer:
    with translated("reading which server this is"):
        row = connection.execute(_REACHED).fetchone()
    assert row is not None
    return ReachedServer(*row)


class Export:
    """The connection that holds the exported snapshot."""

    def __init__(self, config: Config) -> None:
        """Connect; `create` and in the end `close` follow."""
        self.slot = slot_name(config)
        self._config = config
        self._connection = self._connect()
        self.who = reached_server(self._connection)
        self.system: System = identify(self._connection)
        self.snapshot = ""
        self.lsn = LSN(0)

    def _connect(self) -> Connection:
        return connect(config_for_rows(self._config), replication=True)

    def reopen(self) -> None:
        """Release the snapshot, and connect for another."""
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
        # Before 15 the options had no names; the old keywords are still accepted.
        command = f'CREATE_REPLICATION_SLOT "{self.slot}" TEMPORARY LOGICAL pgoutput'
        with translated(f"creating the temporary slot {self.slot}"):
            try:
                row = self._connection.execute(f"{command} EXPORT_SNAPSHOT".encode()).fetchone()
            except errors.DuplicateObject as error:
                raise _busy(self._config) from error
            except errors.ConfigurationLimitExceeded as error:
                raise ConfigError(
                    f"cannot create the temporary slot {self.slot}: {error.diag.message_primary}",
                    hint="the initial snapshot needs one more of max_replication_slots and of"
                    " max_wal_senders, while it lasts: raise them and restart Postgres, or drop a"
                    " slot that nobody uses (`cdc slot show --all`)",
                ) from error
        assert row is not None
        self.lsn, self.snapshot = LSN.parse(row[1]), str(row[2])

    def cancel(self) -> None:
        """End a `create` on another thread at once."""
        self._connection.cancel_safe(timeout=5.0)

    def check_same_server(self, connection: Connection) -> None:
        """Raise ConfigError where `connection` reached another server than this one did."""
        other = reached_server(connection)
        if other[:2] != self.who[:2]:
            key = "snapshot.dsn" if self._config.snapshot.dsn else "source.dsn"
            raise ConfigError(
                f"two connections through {key} came to two servers: what one of them exports the"
                " other can't see",
                hint=f"{key} leads to a load balancer, or names several hosts: name one server"
                " there, such as one standby in snapshot.dsn",
            )

    def alive(self, connection: Connection) -> bool:
        """Return whether the snapshot can still be used; `connection` is another one."""
        with translated(f"looking for the temporary slot {self.slot}"):
            row = connection.execute(
                "SELECT active_pid = %s FROM pg_replication_slots WHERE slot_name = %s",
                (self._connection.info.backend_pid, self.slot),
            ).fetchone()
        return bool(row and row[0])

    def close(self) -> None:
        """Release the snapshot."""
        self._connection.close()


def is_export_running(connection: Connection, config: Config) -> bool:
    """Return whether some process holds an exported snapshot of this pipeline."""
    with translated("looking for the temporary slot"):
        row = connection.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", (slot_name(config),)
        ).fetchone()
    return bool(row and row[0])


def log_standby_snapshot(primary: Connection) -> None:
    """Have the primary log its running transactions, where the role may: standbys wait for it.

    The primary also does so by itself, every 15 s in which something is written.
    """
    with suppress(errors.InsufficientPrivilege, errors.UndefinedFunction):
        primary.execute("SELECT pg_log_standby_snapshot()")


def raise_if_export_running(config: Config) -> None:
    """Raise SlotBusyError where another process takes the snapshot. Blocks."""
    with connect(config_for_rows(config)) as connection:
        if is_export_running(connection, config):
            raise _busy(config)


def _busy(config: Config) -> SlotBusyError:
    return SlotBusyError(
        f"another process takes the initial snapshot: the slot {slot_name(config)} exists",
        hint="it continues by itself, and this one waits; pg_replication_slots has its pid",
    )
