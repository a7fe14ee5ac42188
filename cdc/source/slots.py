"""Replication slots: their facts, and the one judgement of what can be done with a slot.

Rows are read as JSON, so that what a major lacks is simply absent.

https://www.postgresql.org/docs/current/view-pg-replication-slots.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.events import LSN
from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.source.connection import Connection
    from cdc.source.server import Server

PLUGIN: Final = "pgoutput"
# The cause of each invalidation_reason.
_CAUSES: Final = {
    "wal_removed": "it kept more WAL than max_slot_wal_keep_size allows, which was removed",
    "rows_removed": "rows of the catalog that it needs were vacuumed away",
    "wal_level_insufficient": "wal_level is, or was, below logical",
    "idle_timeout": "no daemon read from it for longer than idle_replication_slot_timeout",
}


class Slot(NamedTuple):
    """A logical replication slot; what its major does not report is None."""

    name: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    restart_lsn: LSN | None
    confirmed_flush_lsn: LSN | None
    wal_status: str | None  # reserved, extended, unreserved, lost
    safe_wal_bytes: int | None  # may still be written before the slot is in danger
    invalidation_reason: str | None
    two_phase: bool
    retained_bytes: int | None  # WAL that the server keeps for it
    failover: bool = False  # to be copied to standbys (17+)
    synced: bool = False  # itself a copy of the primary's slot (17+)
    temporary: bool = False  # a synced slot is, until it has caught up
    inactive_seconds: float | None = None  # since it was last read from (17+)

    @property
    def loss(self) -> str | None:
        """Return why its changes can no longer be streamed; None while they can.

        Before Postgres 17 no reason is given.
        """
        if self.wal_status != "lost" and not self.invalidation_reason:
            return None
        reason = self.invalidation_reason or ""
        return _CAUSES.get(reason, reason or "the WAL it needs was removed")

    @property
    def is_nearly_lost(self) -> bool:
        """Return whether the next checkpoint may remove WAL that it needs."""
        return self.loss is None and self.wal_status == "unreserved"

    def is_foreign(self, database: str) -> bool:
        """Return whether it is no slot of ours, by its plugin and database."""
        return self.plugin != PLUGIN or self.database != database


class StandbySlot(NamedTuple):
    """A physical slot, usually a standby's."""

    name: str
    exists: bool
    active: bool
    named: bool  # in synchronized_standby_slots: failover slots' walsenders wait for it


_SLOTS = """
SELECT to_jsonb(s), pg_wal_lsn_diff(
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
    s.restart_lsn)::bigint,
    extract(epoch FROM clock_timestamp() - (to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8
FROM pg_replication_slots s WHERE slot_type = 'logical' AND (%s::text IS NULL OR slot_name = %s)
ORDER BY slot_name
"""


def read_slots(connection: Connection, name: str | None = None) -> list[Slot]:
    """Return all logical slots of the server, or the one of that name."""
    with translated("reading the replication slots"):
        rows = connection.execute(_SLOTS, (name, name)).fetchall()
    return [_slot(*row) for row in rows]


def read_slot(connection: Connection, name: str) -> Slot | None:
    return next(iter(read_slots(connection, name)), None)


def _slot(fields: dict[str, Any], retained: int | None, inactive: float | None) -> Slot:
    def lsn(name: str) -> LSN | None:
        return None if fields.get(name) is None else LSN.parse(fields[name])

    return Slot(
        name=fields["slot_name"],
        plugin=fields["plugin"],
        database=fields["database"],
        active_pid=fields["active_pid"],
        restart_lsn=lsn("restart_lsn"),
        confirmed_flush_lsn=lsn("confirmed_flush_lsn"),
        wal_status=fields.get("wal_status"),
        safe_wal_bytes=fields.get("safe_wal_size"),
        invalidation_reason=fields.get("invalidation_reason"),
        two_phase=bool(fields.get("two_phase")),
        retained_bytes=retained,
        failover=bool(fields.get("failover")),
        synced=bool(fields.get("synced")),
        temporary=bool(fields["temporary"]),
        inactive_seconds=inactive,
    )


def read_standby_slots(connection: Connection, server: Server) -> list[StandbySlot]:
    """Return the physical slots, and missing ones that `synchronized_standby_slots` names."""
    setting = server.settings.get("synchronized_standby_slots", "").replace('"', "").split(",")
    named = {each.strip() for each in setting if each.strip()}
    with translated("reading the standbys' slots"):
        rows = connection.execute(
            "SELECT slot_name::text, active FROM pg_replication_slots"
            " WHERE slot_type = 'physical' ORDER BY 1"
        ).fetchall()
    found = [StandbySlot(name, True, active, name in named) for name, active in rows]  # noqa: FBT003 - it exists
    missing = sorted(named - {each.name for each in found})
    return [*found, *(StandbySlot(name, False, False, True) for name in missing)]  # noqa: FBT003 - it does not
