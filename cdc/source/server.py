"""The server: its version, settings, our role in it, where its WAL ends, and open transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.events import LSN
from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.source.connection import Connection


class Server(NamedTuple):
    """The server, our role in it, and the slots and senders in use."""

    version: int  # 170011 is 17.11
    version_text: str
    in_recovery: bool
    system_identifier: str
    timeline: int
    wal_lsn: LSN  # where the WAL ends
    database: str
    role: str
    superuser: bool
    may_create: bool  # publications in this database
    settings: dict[str, str]  # in each setting's own unit
    slots_in_use: int
    senders_in_use: int

    @property
    def major(self) -> int:
        return self.version // 10_000


class OpenTransaction(NamedTuple):
    """A writing transaction, which holds back every slot: a session's, or a prepared one."""

    pid: int | None
    prepared: str | None
    age_seconds: float


_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'),
       pg_is_in_recovery(), (SELECT system_identifier::text FROM pg_control_system()),
       -- Of a primary the one it writes: the last checkpoint may be older than a promotion.
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END,
       (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
             ELSE pg_current_wal_lsn() END)::text,
       current_database(), current_user::text, r.rolsuper,
       has_database_privilege(current_database(), 'CREATE'),
       (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name = ANY(%s)),
       (SELECT count(*) FROM pg_replication_slots),
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender')
FROM pg_roles r WHERE r.rolname = current_user
"""
_SETTINGS = [
    "wal_level",
    "max_replication_slots",
    "max_wal_senders",
    "max_slot_wal_keep_size",
    "wal_sender_timeout",
    "idle_replication_slot_timeout",
    "wal_segment_size",
    "synchronized_standby_slots",
    "sync_replication_slots",
    "hot_standby_feedback",
    "primary_slot_name",
    "primary_conninfo",  # of the role's reach only where it may read all settings
]


def read_server(connection: Connection) -> Server:
    with translated("reading the server's facts"):
        row = connection.execute(_SERVER, (_SETTINGS,)).fetchone()
    assert row is not None
    fields: list[Any] = list(row)
    fields[5] = LSN.parse(fields[5] or "0/0")
    return Server(*fields)


def setting_bytes(connection: Connection, name: str) -> int | None:
    """Return a setting that is counted in megabytes, in bytes; None where it limits nothing."""
    with translated(f"reading the setting {name}"):
        row = connection.execute(
            "SELECT setting::bigint FROM pg_settings WHERE name = %s", (name,)
        ).fetchone()
    return row[0] << 20 if row is not None and row[0] >= 0 else None


def wal_end(connection: Connection) -> LSN:
    """Return the current WAL end of the server."""
    with translated("reading where the WAL ends"):
        row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
    assert row is not None, "a SELECT without FROM gives a row"
    return LSN.parse(row[0])


# Sessions of other roles show their times only to superusers and members of pg_monitor.
_OPEN_TRANSACTIONS = """
SELECT pid, NULL, extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_stat_activity
WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_xid IS NOT NULL
UNION ALL
SELECT NULL, gid, extract(epoch FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts
ORDER BY 3 DESC LIMIT 20
"""


def open_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return the writing transactions that are open or prepared, oldest first."""
    with translated("reading the open transactions"):
        return [OpenTransaction(*row) for row in connection.execute(_OPEN_TRANSACTIONS).fetchall()]
