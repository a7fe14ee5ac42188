"""What the source must have before anything is created: one list, for `cdc doctor` and `cdc setup`.

A requirement names the step that fails without it and judges the facts (`cdc.operate.facts`); its
findings carry the SQL that fixes it. The doctor shows all of them, and `cdc setup` refuses where
one is not met: so setup never fails on something that the doctor accepted. Abilities were tried
(`cdc.source.abilities`); nothing here connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import CDCError, ConfigError, PermissionDeniedError
from cdc.operate.doctor.failover import FAILOVER_MAJOR
from cdc.operate.doctor.snapshot import check_snapshot
from cdc.operate.facts import SourceFacts, enabled_migrations
from cdc.operate.findings import Finding, Severity, error, ok, warning
from cdc.operate.parameters import change
from cdc.operate.readable import listed
from cdc.runtime import extras
from cdc.source.volumes import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.config import Config

_OLDEST_MAJOR, _NEWEST_MAJOR = 14, 18


class Requirement(NamedTuple):
    """One thing that must hold, the step that needs it, and how its absence is refused."""

    needed_for: str
    kind: type[CDCError]
    judge: Callable[[Config, SourceFacts], Iterator[Finding]]


def check(config: Config, facts: SourceFacts) -> list[Finding]:
    return [found for each in REQUIREMENTS for found in each.judge(config, facts)]


def refuse(config: Config, facts: SourceFacts) -> None:
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
    lines = "\n".join(
        f"  {found.what} (needed for {each.needed_for})\n    fix: {found.fix}"
        for each, found in unmet
    )
    raise kind(
        f"the source lacks what `cdc setup` needs; nothing was created:\n{lines}",
        hint="run the fixes above, then `cdc setup` again; `cdc doctor` shows them, too",
    )


def _version(config: Config, facts: SourceFacts) -> Iterator[Finding]:
    server = facts.server
    version = f"Postgres {server.version_text}"
    if server.major < _OLDEST_MAJOR:
        yield error("version", f"{version}; 14 is the oldest supported", "upgrade Postgres")
    elif server.major > _NEWEST_MAJOR:
        newest = f"{version}; tested up to {_NEWEST_MAJOR}"
        yield warning("version", newest, "use a newer Lockstep")
    else:
        yield ok("version", version)
    if config.source.failover is True and server.major < FAILOVER_MAJOR:
        yield error(
            "failover",
            f"source.failover is true, and the server is Postgres {server.version_text}: slots can"
            f" be copied to standbys from {FAILOVER_MAJOR} on",
            "set source.failover to auto, or upgrade Postgres",
        )


def _primary(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    if facts.server.in_recovery:
        yield error(
            "primary",
            "the server is a standby; publication and slot belong on the primary",
            "name the primary in source.dsn (libpq: target_session_attrs=read-write)",
        )


def _wal_level(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    level, able = facts.server.settings["wal_level"], facts.able
    if level == "logical":
        yield ok("wal_level", "logical")
    elif "wal_level" in able.pending:
        what = f"wal_level is {level}: it was changed, and the change waits for a restart"
        yield error("wal_level", what, "restart Postgres")
    else:
        fix = change(able, "wal_level", "'logical'", restart=True)
        yield error("wal_level", f"wal_level is {level}: changes cannot be decoded", fix)


def _slots(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    needed = 0 if facts.slot else 1
    yield _room(facts, "max_replication_slots", facts.server.slots_in_use, needed)


def _senders(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    slot = facts.slot
    needed = 0 if slot and slot.active_pid else 1
    yield _room(facts, "max_wal_senders", facts.server.senders_in_use, needed)


def _room(facts: SourceFacts, name: str, used: int, needed: int) -> Finding:
    limit = int(facts.server.settings[name])
    if limit - used >= needed:
        return ok(name, f"{limit - used} of {limit} free")
    if name in facts.able.pending:
        what = f"all {limit} are in use: it was raised, and the change waits for a restart"
        return error(name, f"{name}: {what}", "restart Postgres")
    fix = change(facts.able, name, str(limit + 10), restart=True)
    return error(name, f"{name}: all {limit} are in use", fix)


def _replication(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    """Judge by trying: managed services grant this through roles of their own."""
    server, able = facts.server, facts.able
    role = quoted(server.role)
    if able.slot is not None and facts.slot is None:
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


def _replicate(facts: SourceFacts, role: str) -> str:
    """Return the SQL that allows the role to stream, for this kind of server."""
    managed = facts.able.managed or ""
    if "rds." in managed:
        return f"GRANT rds_replication TO {role};"
    return f"ALTER ROLE {role} REPLICATION;"


def _create(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    server = facts.server
    if facts.publication is None and facts.able.publication and not server.may_create:
        role = quoted(server.role)
        database = quoted(server.database)
        yield error(
            "create",
            f"{server.role} may not create a publication in {server.database}",
            f"GRANT CREATE ON DATABASE {database} TO {role};",
        )


_AND_ROWS: Final = "; then `cdc snapshot TABLE`, which reads the rows that it has already"


def _owner(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    """Judge a publication that is refused because a privilege is missing."""
    refused = facts.able.publication
    if refused is None or not isinstance(refused.error, PermissionDeniedError):
        return
    foreign = [each for each in facts.tables if each.publishable and not each.owned]
    published = facts.publication
    if published is not None and published.owner != facts.server.role:
        fix = f"{refused.sql}  -- as {published.owner}, who owns it, or a superuser{_AND_ROWS}"
        yield error("owner", refused.error.what, fix)
    elif foreign:
        role = quoted(facts.server.role)
        owners = sorted({each.owner for each in foreign})
        fix = " ".join(f"GRANT {quoted(each)} TO {role};" for each in owners)
        if facts.able.superusers.intersection(owners):  # must not be granted
            fix = f"{refused.sql}  -- as a superuser, or give the tables to {facts.server.role}"
            fix += _AND_ROWS if published is not None else ""
        yield error(
            "owner",
            "only the owner of a table may publish it, and our role does not own"
            f" {listed([str(each) for each in foreign])}",
            fix,
        )
    elif facts.server.may_create:
        yield error("owner", refused.error.what, f"{refused.sql}  -- as a superuser")


def _publication(_: Config, facts: SourceFacts) -> Iterator[Finding]:
    """Judge a publication that Postgres refuses for every role."""
    refused = facts.able.publication
    if refused is not None and not isinstance(refused.error, PermissionDeniedError):
        yield error("publication", refused.error.what, refused.error.hint)


def _migrations(config: Config, _: SourceFacts) -> Iterator[Finding]:
    if enabled_migrations(config):
        try:
            extras.require("migrations in the configuration", "migrations")
        except extras.MissingExtraError as absent:
            yield error("migrations", absent.what, absent.hint)


_SLOT: Final = "creating the slot"
_PUBLICATION: Final = "creating or changing the publication"
REQUIREMENTS: Final = (
    Requirement("anything", ConfigError, _version),
    Requirement("anything", ConfigError, _primary),
    Requirement(_SLOT, ConfigError, _wal_level),
    Requirement(_SLOT, ConfigError, _slots),
    Requirement("streaming from it", ConfigError, _senders),
    Requirement(_SLOT, PermissionDeniedError, _replication),
    Requirement(_PUBLICATION, PermissionDeniedError, _create),
    Requirement(_PUBLICATION, PermissionDeniedError, _owner),
    Requirement(_PUBLICATION, ConfigError, _publication),
    Requirement("what lives in the database", ConfigError, _migrations),
    Requirement("the initial snapshot", PermissionDeniedError, check_snapshot),
)
