"""What the source must have before anything is created: one list, for `cdc doctor` and `cdc setup`.

A requirement names the step that fails without it and judges the gathered facts; its findings carry
the SQL that fixes it. The doctor shows all of them, and `cdc setup` refuses where one is not met:
so setup never fails on something that the doctor accepted. Abilities were tried
(`cdc.source.abilities`); nothing here connects.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from cdc.errors import CDCError, ConfigError, PermissionDeniedError
from cdc.operate.commands import migrations
from cdc.operate.doctor import snapshot as doctor_snapshot
from cdc.operate.doctor.failover import FAILOVER_MAJOR
from cdc.operate.findings import Finding, Severity, error, listed, ok, warning
from cdc.operate.parameters import change, waits
from cdc.runtime import extras

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.config import Config
    from cdc.operate.doctor.source import SourceFacts

_OLDEST_MAJOR, _NEWEST_MAJOR = 14, 18


class Step(Enum):
    """What cannot be done without a requirement."""

    SERVER = "anything"
    PUBLICATION = "creating or changing the publication"
    SLOT = "creating the slot"
    STREAM = "streaming from it"
    MIGRATIONS = "what lives in the database"
    ROWS = "the initial snapshot"


class Facts(NamedTuple):
    """All facts that the requirements use."""

    source: SourceFacts
    snapshot: doctor_snapshot.Facts | None  # None where none is due


class Requirement(NamedTuple):
    """One thing that must hold, the step that needs it, and how its absence is refused."""

    check: str  # the doctor's name for it
    step: Step
    kind: type[CDCError]
    judge: Callable[[Config, Facts], Iterator[Finding]]


def check(config: Config, facts: Facts) -> list[Finding]:
    """Return the findings of every requirement."""
    return [found for each in REQUIREMENTS for found in each.judge(config, facts)]


def refuse(config: Config, facts: Facts) -> None:
    """Raise with every requirement that is not met, and what fixes it."""
    unmet = [
        (each, found)
        for each in REQUIREMENTS
        for found in each.judge(config, facts)
        if found.severity is Severity.ERROR
    ]
    if not unmet:
        return
    kinds = {each.kind for each, _ in unmet}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    if len(unmet) == 1:
        raise kind(unmet[0][1].what, hint=unmet[0][1].fix)
    told = "\n".join(
        f"  {found.what} (needed for {each.step.value})\n    fix: {found.fix}"
        for each, found in unmet
    )
    raise kind(
        f"the source lacks what `cdc setup` needs; nothing was created:\n{told}",
        hint="run the fixes above, then `cdc setup` again; `cdc doctor` shows them, too",
    )


def _version(config: Config, facts: Facts) -> Iterator[Finding]:
    server = facts.source.server
    version = f"Postgres {server.version_text}"
    if server.major < _OLDEST_MAJOR:
        yield error("version", f"{version}; 14 is the oldest supported", "upgrade Postgres")
    elif server.major > _NEWEST_MAJOR:
        newest = f"{version}; tested up to {_NEWEST_MAJOR}"
        yield warning("version", newest, "look for a newer Lockstep")
    else:
        yield ok("version", version)
    if config.source.failover is True and server.major < FAILOVER_MAJOR:
        yield error(
            "failover",
            f"source.failover is true, and the server is Postgres {server.version_text}: slots can"
            f" be copied to standbys from {FAILOVER_MAJOR} on",
            "set source.failover to auto, or upgrade Postgres",
        )


def _primary(_: Config, facts: Facts) -> Iterator[Finding]:
    if facts.source.server.in_recovery:
        yield error(
            "primary",
            "the server is a standby; publication and slot belong on the primary",
            "let source.dsn name the primary (libpq: target_session_attrs=read-write)",
        )


def _wal_level(_: Config, facts: Facts) -> Iterator[Finding]:
    level, able = facts.source.server.settings["wal_level"], facts.source.able
    if level == "logical":
        yield ok("wal_level", "logical")
    elif waits(able, "wal_level"):
        what = f"wal_level is {level}: it was changed, and the change waits for a restart"
        yield error("wal_level", what, "restart Postgres")
    else:
        fix = change(able, "wal_level", "'logical'", restart=True)
        yield error("wal_level", f"wal_level is {level}: changes cannot be decoded", fix)


def _slots(_: Config, facts: Facts) -> Iterator[Finding]:
    needed = 0 if facts.source.slot else 1
    yield _room(facts, "max_replication_slots", facts.source.server.slots_in_use, needed)


def _senders(_: Config, facts: Facts) -> Iterator[Finding]:
    slot = facts.source.slot
    needed = 0 if slot and slot.active_pid else 1
    yield _room(facts, "max_wal_senders", facts.source.server.senders_in_use, needed)


def _room(facts: Facts, name: str, used: int, needed: int) -> Finding:
    limit = int(facts.source.server.settings[name])
    if limit - used >= needed:
        return ok(name, f"{limit - used} of {limit} free")
    if waits(facts.source.able, name):
        what = f"all {limit} are in use: it was raised, and the change waits for a restart"
        return error(name, f"{name}: {what}", "restart Postgres")
    fix = change(facts.source.able, name, str(limit + 10), restart=True)
    return error(name, f"{name}: all {limit} are in use", fix)


def _replication(_: Config, facts: Facts) -> Iterator[Finding]:
    """Judge by trying: managed services grant this through roles of their own."""
    server, able = facts.source.server, facts.source.able
    role = sql.Identifier(server.role).as_string()
    if able.slot is not None and facts.source.slot is None:
        what = f"{server.role} may not create a replication slot: {able.slot}"
        yield error("replication", what, _replicate(facts, role))
    elif isinstance(able.stream, PermissionDeniedError):
        what = f"{server.role} may not stream: {able.stream.what}"
        privilege = "REPLICATION" in able.stream.what or "privilege" in able.stream.hint
        fix = _replicate(facts, role) if privilege else able.stream.hint
        yield error("replication", what, fix)
    elif able.stream is not None:
        yield error("replication", able.stream.what, able.stream.hint)
    else:
        yield ok("replication", f"{server.role} may stream")


def _replicate(facts: Facts, role: str) -> str:
    """Return the SQL that allows the role to stream, for this kind of server."""
    managed = facts.source.able.managed or ""
    if "rds." in managed:
        return f"GRANT rds_replication TO {role};"
    return f"ALTER ROLE {role} REPLICATION;"


def _create(_: Config, facts: Facts) -> Iterator[Finding]:
    source, server = facts.source, facts.source.server
    if source.publication is None and source.able.publication and not server.may_create:
        role = sql.Identifier(server.role).as_string()
        database = sql.Identifier(server.database).as_string()
        yield error(
            "create",
            f"{server.role} may not create a publication in {server.database}",
            f"GRANT CREATE ON DATABASE {database} TO {role};",
        )


_AND_ROWS: Final = "; then `cdc snapshot TABLE`, which reads the rows that it has already"


def _owner(_: Config, facts: Facts) -> Iterator[Finding]:
    """Judge a publication that is refused because a privilege is missing."""
    source = facts.source
    refused = source.able.publication
    if refused is None or not isinstance(refused.error, PermissionDeniedError):
        return
    foreign = [each for each in source.tables if each.publishable and not each.owned]
    if foreign:
        role = sql.Identifier(source.server.role).as_string()
        owners = sorted({each.owner for each in foreign})
        fix = " ".join(f"GRANT {sql.Identifier(each).as_string()} TO {role};" for each in owners)
        if source.able.superusers.intersection(owners):  # must not be granted
            fix = f"{refused.sql}  -- as a superuser, or give the tables to {source.server.role}"
            fix += _AND_ROWS if source.publication is not None else ""
        yield error(
            "owner",
            "a publication takes the owner of its tables, and our role does not own"
            f" {listed([str(each) for each in foreign])}",
            fix,
        )
    elif source.publication is not None:
        owner = source.publication.owner
        fix = f"{refused.sql}  -- as {owner}, who owns it, or a superuser{_AND_ROWS}"
        yield error("owner", refused.error.what, fix)
    elif source.server.may_create:
        yield error("owner", refused.error.what, f"{refused.sql}  -- as a superuser")


def _publication(_: Config, facts: Facts) -> Iterator[Finding]:
    """Judge a publication that Postgres refuses for every role."""
    refused = facts.source.able.publication
    if refused is not None and not isinstance(refused.error, PermissionDeniedError):
        yield error("publication", refused.error.what, refused.error.hint)


def _migrations(config: Config, _: Facts) -> Iterator[Finding]:
    """Judge whether the configured migrations can be applied."""
    if migrations.asked(config):
        try:
            extras.require("migrations in the configuration", "migrations")
        except extras.MissingExtraError as absent:
            yield error("migrations", absent.what, absent.hint)


def _snapshot(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.snapshot is not None:
        yield from doctor_snapshot.judge(config, facts.snapshot)


REQUIREMENTS: Final = (
    Requirement("version", Step.SERVER, ConfigError, _version),
    Requirement("primary", Step.SERVER, ConfigError, _primary),
    Requirement("wal_level", Step.SLOT, ConfigError, _wal_level),
    Requirement("max_replication_slots", Step.SLOT, ConfigError, _slots),
    Requirement("max_wal_senders", Step.STREAM, ConfigError, _senders),
    Requirement("replication", Step.SLOT, PermissionDeniedError, _replication),
    Requirement("create", Step.PUBLICATION, PermissionDeniedError, _create),
    Requirement("owner", Step.PUBLICATION, PermissionDeniedError, _owner),
    Requirement("publication", Step.PUBLICATION, ConfigError, _publication),
    Requirement("migrations", Step.MIGRATIONS, ConfigError, _migrations),
    Requirement("snapshot", Step.ROWS, PermissionDeniedError, _snapshot),
)
