"""The doctor's checks for a promotion: the slot is on every standby, and the log is not ahead.

Asks every host in source.dsn: which of them is the primary, and whether the others have the
slot. With a DSN of one host only the primary's facts are known: whether the slot may be copied, and
whether the walsender waits for the standbys. The checks are pure; `examine` gathers the facts.

https://www.postgresql.org/docs/current/logicaldecoding-explanation.html#LOGICALDECODING-REPLICATION-SLOTS-SYNCHRONIZATION
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import CDCError
from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.retention import judge_standbys
from cdc.source import server as inspection
from cdc.source.connection import connect, hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.source.server import Server, Slot, StandbySlot

FAILOVER_MAJOR = 17
_RELOAD = " SELECT pg_reload_conf();"


class Host(NamedTuple):
    """One of the hosts that source.dsn names; `server` is None where it does not answer."""

    place: str
    server: Server | None
    slot: Slot | None
    failure: CDCError | None = None


class FailoverFacts(NamedTuple):
    """All facts that the checks use."""

    server: Server
    slot: Slot | None
    standbys: list[StandbySlot]
    hosts: list[Host]


def examine(config: Config, server: Server, slot: Slot | None) -> list[Finding]:
    """Gather the facts and return the findings."""
    findings = [_walsender(config)]
    try:
        with connect(config) as connection:
            standbys = inspection.standby_slots(connection, server)
        facts = FailoverFacts(server, slot, standbys, ask_hosts(config))
    except CDCError as failure:
        return [*findings, error("failover", failure.what, failure.hint)]
    return [*findings, *check_failover(config, facts)]


def ask_hosts(config: Config) -> list[Host]:
    """Return what each host reports; none where source.dsn names only one."""
    return [_ask(config, place, own) for place, own in hosts(config).items()]


def _ask(config: Config, place: str, own: Config) -> Host:
    try:
        with connect(own) as connection:
            server = inspection.server(connection)
            return Host(place, server, inspection.slot(connection, config.slot))
    except CDCError as failure:
        return Host(place, None, None, failure)


def _walsender(config: Config) -> Finding:
    """Return whether source.dsn reaches a walsender, which it does not through a pooler."""
    try:
        connect(config, replication=True).close()
    except CDCError as failure:
        return error("walsender", failure.what, failure.hint)
    return ok("walsender", "a replication connection is answered")


def check_failover(config: Config, facts: FailoverFacts) -> Iterator[Finding]:
    """Yield what would be missing after a promotion."""
    server, slot = facts.server, facts.slot
    others = [each for each in facts.hosts if each.server is None or each.server.in_recovery]
    if slot is None or not (facts.standbys or others):
        return
    if server.major < FAILOVER_MAJOR:
        yield note(
            "failover",
            f"Postgres {server.version_text} copies no slots to standbys: a promotion ends the log",
            "upgrade to Postgres 17 or later, or begin anew after a promotion",
        )
        return
    if not slot.failover:
        yield warning(
            "failover",
            f"the slot {slot.name} is copied to no standby: a promotion ends the log",
            "cdc slot alter --failover, with no daemon running",
        )
        return
    named = [each for each in facts.standbys if each.named]
    if not named:
        names = ", ".join(each.name for each in facts.standbys) or "the standby's slot"
        yield warning(
            "synchronized_standby_slots",
            "the log may run ahead of the standbys; after a promotion it then holds changes that "
            "never happened, and is refused",
            f"ALTER SYSTEM SET synchronized_standby_slots = '{names}';{_RELOAD}",
        )
    waiting = list(judge_standbys(facts.standbys))
    yield from waiting
    if named and not waiting:
        yield ok("failover", f"no change is sent before {', '.join(e.name for e in named)} has it")
    for each in others:
        yield from _standby(config, each)


def _standby(config: Config, host: Host) -> Iterator[Finding]:
    """Yield whether this standby could be promoted without ending the log."""
    check, server, slot = f"standby {host.place}", host.server, host.slot
    if server is None:
        assert host.failure is not None
        yield warning(check, host.failure.what, host.failure.hint)
    elif slot is not None and slot.synced and not slot.temporary:
        yield ok(check, f"has the slot, up to {slot.confirmed_flush_lsn}")
    elif slot is not None and slot.synced:
        yield note(
            check,
            "is copying the slot, which is not yet good for a promotion",
            "it is, once the standby has replayed what the slot needs: let the daemon run",
        )
    elif slot is not None:
        yield warning(
            check,
            f"has a slot {config.slot} of its own, so the primary's cannot be copied",
            f"there: SELECT pg_drop_replication_slot('{config.slot}');",
        )
    else:
        lacking = list(_lacking(server))
        fixes = " ".join(f"ALTER SYSTEM SET {each};" for each in lacking)
        yield warning(
            check,
            f"has no copy of the slot {config.slot}: its promotion would end the log",
            f"there: {fixes}{_RELOAD}" if lacking else "wait a minute; then see its log",
        )


def _lacking(server: Server) -> Iterator[str]:
    """Yield the settings, as they should be, whose absence keeps a standby from copying slots."""
    settings = server.settings
    if settings.get("sync_replication_slots") != "on":
        yield "sync_replication_slots = on"
    if settings.get("hot_standby_feedback") != "on":
        yield "hot_standby_feedback = on"
    if not settings.get("primary_slot_name"):
        yield "primary_slot_name = '…'"
    # Hidden from a role that may not read all settings.
    conninfo = settings.get("primary_conninfo")
    if conninfo is not None and "dbname" not in conninfo:
        yield "primary_conninfo = '… dbname=postgres'"
