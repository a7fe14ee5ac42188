"""What the slot keeps, how long that lasts, and which transactions hold it back. Pure.

Postgres keeps WAL from the slot's restart LSN on, and invalidates the slot once that is more than
`max_slot_wal_keep_size`. The restart LSN follows the daemon, and does not move while a transaction
that writes is open or prepared, in any database. The forecast is how long the slot would last if
its restart LSN did not move from now on, at the current WAL rate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from cdc.operate.findings import Finding, error, warning
from cdc.operate.readable import duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.source.server import OpenTransaction, Server
    from cdc.source.slots import Slot, StandbySlot


START_OVER: Final = "cdc teardown --topics, then cdc setup, which starts a new log"
# The rate is smoothed over this time: a bulk load shows, a single burst does not alarm.
_SMOOTHING_SECONDS: Final = 60.0
# The restart LSN moves in steps of about 15 s: the interval at which the server logs running
# transactions.
_STALLED_SECONDS: Final = 60.0
# Enough time for a person to act.
_SOON_SECONDS: Final = 3_600.0
# Where no rate was measured, less room than this is too little.
_LITTLE_BYTES: Final = 2**30
# A transaction that is open for longer holds the restart LSN back visibly.
LONG_TRANSACTION_SECONDS: Final = 300.0


class Retention(NamedTuple):
    """The slot's share of the server's disk; what its server does not report or limit is None."""

    slot: Slot
    wal_bytes_per_second: float | None = None  # None until it was measured
    stalled_seconds: float = 0.0  # since the restart LSN moved, while WAL was written

    @property
    def lost_in_seconds(self) -> float | None:
        """Return when the slot is lost if its restart LSN stays; None where it never is."""
        if self.slot.safe_wal_bytes is None or not self.wal_bytes_per_second:
            return None
        return max(0, self.slot.safe_wal_bytes) / self.wal_bytes_per_second


class Gauge:
    """Follows a slot over repeated looks, at monotonic times, and returns its `Retention`."""

    def __init__(self) -> None:
        self._seen: tuple[float, int] | None = None
        self._rate: float | None = None
        self._restart_lsn: int | None = None
        self._moved_at = 0.0

    def observe(self, at: float, wal_lsn: int, slot: Slot) -> Retention:
        if self._seen and at > self._seen[0] and wal_lsn >= self._seen[1]:
            seconds = at - self._seen[0]
            rate = (wal_lsn - self._seen[1]) / seconds
            share = 1 - math.exp(-seconds / _SMOOTHING_SECONDS)
            self._rate = rate if self._rate is None else self._rate + share * (rate - self._rate)
        if slot.restart_lsn != self._restart_lsn or (self._seen and wal_lsn == self._seen[1]):
            self._restart_lsn, self._moved_at = slot.restart_lsn, at
        self._seen = at, wal_lsn
        return Retention(slot, self._rate, at - self._moved_at)


def judge(
    server: Server | None, retention: Retention | None, holders: list[OpenTransaction]
) -> Iterator[Finding]:
    """Yield what threatens the slot: what it keeps, that nothing reads it, what holds it back."""
    if retention is not None:
        yield from judge_slot(retention)
        if server is not None:
            yield from judge_idle(server, retention.slot)
    yield from judge_holders(holders)


def judge_slot(retention: Retention) -> Iterator[Finding]:
    """Yield what threatens the slot, or that it is lost."""
    slot = retention.slot
    if slot.loss:
        yield error("slot", f"{slot.name} is lost: {slot.loss}", START_OVER)
        return
    retained = size(slot.retained_bytes or 0)
    if slot.is_nearly_lost:
        yield error(
            "slot",
            f"{slot.name} is about to be lost: it keeps {retained}, more than it may",
            "start the daemon now (cdc run); raise max_slot_wal_keep_size",
        )
        return
    seconds, safe = retention.lost_in_seconds, slot.safe_wal_bytes
    stalled = slot.active_pid is None or retention.stalled_seconds >= _STALLED_SECONDS
    if seconds is not None:
        near = stalled and seconds < _SOON_SECONDS
    else:
        near = stalled and safe is not None and safe < _LITTLE_BYTES
    if near:
        room = size(max(0, safe or 0))
        when = f", in about {duration(seconds)} at the present rate" if seconds is not None else ""
        yield warning(
            "slot",
            f"{slot.name} keeps {retained} and is lost after {room} more of WAL{when}",
            "cdc run, and end the transactions that hold it back (cdc doctor names them); raise "
            "max_slot_wal_keep_size (it needs no restart)",
        )


def judge_idle(server: Server, slot: Slot) -> Iterator[Finding]:
    """Yield how long a slot without a reader will still be kept (Postgres 18)."""
    limit = int(server.settings.get("idle_replication_slot_timeout", "0"))
    if limit and slot.active_pid is None and slot.inactive_seconds is not None:
        left = max(0.0, limit - slot.inactive_seconds)
        yield warning(
            "idle_slot",
            f"{slot.name} has no reader and is invalidated in {duration(left)}, at the next"
            " checkpoint after that",
            "cdc run, or set idle_replication_slot_timeout to 0 on the server",
        )


def judge_holders(holders: list[OpenTransaction]) -> Iterator[Finding]:
    """Yield the transactions that have held the slot back for a long time."""
    for each in holders:
        if (each.age_seconds or 0) < LONG_TRANSACTION_SECONDS:
            continue
        age = duration(each.age_seconds)
        if each.prepared is not None:
            gid = sql.Literal(each.prepared).as_string()
            what = f"the prepared transaction {gid} is {age} old and keeps WAL"
            fix = f"COMMIT PREPARED {gid};  -- or ROLLBACK PREPARED {gid};"
            yield warning("prepared", what, fix)
        else:
            what = f"pid {each.pid} writes in a transaction of {age}: it keeps WAL"
            fix = f"end it, or: SELECT pg_terminate_backend({each.pid});"
            yield warning("open_transaction", what, fix)


def judge_standbys(standbys: list[StandbySlot]) -> Iterator[Finding]:
    """Yield disconnected standbys that a failover slot's walsender waits for."""
    for each in standbys:
        if each.named and not each.active:
            state = "is not connected" if each.exists else "has no such slot"
            yield warning(
                "standby",
                f"synchronized_standby_slots names {each.name}, which {state}: no change is sent"
                " before it has it",
                "bring that standby back, or remove its slot from synchronized_standby_slots; "
                "SELECT pg_reload_conf();",
            )
