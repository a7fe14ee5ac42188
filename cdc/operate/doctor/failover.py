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
from cdc.operate.retention import START_OVER, judge_standbys
from cdc.source.connection import connect, hosts
from cdc.source.server import Server, read_server
from cdc.source.slots import Slot, StandbySlot, read_slot, read_standby_slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.operate.facts import SourceFacts
    from cdc.source.connection import Connection

FAILOVER_MAJOR = 17
_RELOAD = " SELECT pg_reload_conf();"


class SourceHost(NamedTuple):
    """One of the hosts that source.dsn names; `server` is None where it does not answer."""

    place: str
    server: Server | None
    slot: Slot | None
    failure: CDCError | None = None


class FailoverFacts(NamedTuple):
    server: Server
    slot: Slot | None
    standbys: list[StandbySlot]
    hosts: list[SourceHost]


def examine(connection: Connection, config: Config, source: SourceFacts) -> Iterator[Finding]:
    # A pooler does not pass a replication connection on to a walsender.
    if (refused := source.able.stream) is not None:
        yield error("walsender", refused.what, refused.hint)
    else:
        yield ok("walsender", "a replication connection is answered")
    standbys = read_standby_slots(connection, source.server)
    facts = FailoverFacts(source.server, source.slot, standbys, ask_hosts(config))
    yield from check_failover(config, facts)


def ask_hosts(config: Config) -> list[SourceHost]:
    """Return what each host reports; none where source.dsn names only one."""
    return [_ask(config, place, own) for place, own in hosts(config).items()]


def _ask(config: Config, place: str, own: Config) -> SourceHost:
    try:
        with connect(own) as connection:
            server = read_server(connection)
            return SourceHost(place, server, read_slot(connection, config.slot))
    except CDCError as failure:
        return SourceHost(place, None, None, failure)


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
            f"upgrade to Postgres 17 or later; or after a promotion: {START_OVER}",
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
            "the new primary never had, and is refused",
            f"ALTER SYSTEM SET synchronized_standby_slots = '{names}';{_RELOAD}",
        )
    waiting = list(judge_standbys(facts.standbys))
    yield from waiting
    if named and not waiting:
        yield ok("failover", f"no change is sent before {', '.join(e.name for e in named)} has it")
    for each in others:
        yield from _standby(config, each)


def _standby(config: Config, host: SourceHost) -> Iterator[Finding]:
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
            "it is, once the standby has replayed what the slot needs: keep the daemon running",
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
