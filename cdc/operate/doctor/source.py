"""The doctor's checks of the source: pure functions from facts to findings.

The facts are gathered once (`cdc.operate.facts`); nothing here connects, so that each check can
be tested with facts made for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.parameters import change
from cdc.operate.readable import listed, size
from cdc.operate.retention import START_OVER, Retention, judge_holders, judge_idle, judge_slot
from cdc.source.volumes import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.operate.facts import SourceFacts
    from cdc.source.tables import SourceTable

# Below it, an ordinary pause, such as a broker's restart, disconnects walsenders.
_SHORT_SENDER_TIMEOUT_MS = 30_000


def check_source(config: Config, facts: SourceFacts) -> list[Finding]:
    """Return the findings of every check of the source except its requirements."""
    return [
        *_settings(facts),
        *_unread(facts),
        *_tables(config, facts),
        *_publication(config, facts),
        *_slot(config, facts),
        *judge_holders(facts.holders),
    ]


def _settings(facts: SourceFacts) -> Iterator[Finding]:
    """Check settings that cause trouble later; what is needed at once is a requirement."""
    settings, able = facts.server.settings, facts.able
    timeout = int(settings["wal_sender_timeout"])
    if 0 < timeout < _SHORT_SENDER_TIMEOUT_MS:
        yield warning(
            "wal_sender_timeout",
            f"{timeout} ms: a short pause of the daemon costs the connection",
            change(able, "wal_sender_timeout", "'60s'"),
        )
    else:
        yield ok("wal_sender_timeout", f"{timeout} ms" if timeout else "off")
    limit_mb = int(settings["max_slot_wal_keep_size"])
    if limit_mb < 0:
        yield warning(
            "max_slot_wal_keep_size",
            "unlimited: while the daemon is away, its slot can fill the server's disk",
            change(able, "max_slot_wal_keep_size", "'50GB'")
            + "  -- as much as the disk can spare; beyond it the slot is lost",
        )
    else:
        yield ok("max_slot_wal_keep_size", size(limit_mb * 1024 * 1024))
    idle = settings.get("idle_replication_slot_timeout", "0")
    if idle != "0":
        yield warning(
            "idle_replication_slot_timeout",
            f"{idle} s: a daemon that is away for longer finds its slot invalidated",
            change(able, "idle_replication_slot_timeout", "0"),
        )


def _unread(facts: SourceFacts) -> Iterator[Finding]:
    server = facts.server
    role = quoted(server.role)
    unread = [each for each in facts.tables if each.publishable and not each.may_select]
    if unread:
        schemas = sorted({each.schema for each in unread})
        grants = [f"GRANT USAGE ON SCHEMA {quoted(each)} TO {role};" for each in schemas]
        grants.append(f"GRANT SELECT ON {listed([t.quoted for t in unread], 50)} TO {role};")
        yield warning(
            "select",
            f"{server.role} may not read {listed([str(each) for each in unread])}: their changes "
            "flow, but rows cannot be counted or snapshotted",
            " ".join(grants),
        )
    elif facts.tables:
        yield ok("select", f"{server.role} may read every table")


def _tables(config: Config, facts: SourceFacts) -> Iterator[Finding]:
    named = ", ".join(config.source.tables)
    good = [each for each in facts.tables if each.publishable]
    if good:
        yield ok("tables", f"{len(good)} match {named}")
    else:
        yield error("tables", f"no table matches {named}", "create one, or correct source.tables")
    unlogged = [each for each in facts.tables if each.persistence == "u"]
    if unlogged:
        what = f"not captured, since they write no WAL: {listed([str(each) for each in unlogged])}"
        fixes = (f"ALTER TABLE {each.quoted} SET LOGGED;" for each in unlogged)
        yield note("unlogged", what, " ".join(fixes))
    blind = [each for each in good if not each.identifies_rows]
    if blind:
        yield warning(
            "replica_identity",
            f"without a key: {listed([str(each) for each in blind])}; once published, Postgres "
            "refuses every UPDATE and DELETE on them",
            " ".join(_give_identity(each) for each in blind[:20]),
        )
    elif good:
        yield ok("replica_identity", "every table can publish updates and deletes")
    full = [str(each) for each in good if each.replica_identity == "f"]
    if full:
        yield note(
            "replica_identity_full", f"complete old rows are written to the WAL: {listed(full)}"
        )


def _give_identity(table: SourceTable) -> str:
    if table.has_primary_key:
        return f"ALTER TABLE {table.quoted} REPLICA IDENTITY DEFAULT;"
    return f"ALTER TABLE {table.quoted} REPLICA IDENTITY FULL;  -- or better, add a primary key;"


def _publication(config: Config, facts: SourceFacts) -> Iterator[Finding]:
    name, publication = config.publication, facts.publication
    if publication is None:
        if facts.set_up:
            yield error(
                "publication",
                f"{name} was dropped: changes since then are not streamed",
                START_OVER,
            )
        else:
            yield note("publication", f"{name} does not exist yet", "cdc setup")
        return
    lacking = publication.unpublished_operations
    if lacking:
        yield error(
            "publish",
            f"{name} does not publish {', '.join(lacking)}: they would be lost",
            f"ALTER PUBLICATION {quoted(name)} SET (publish = 'insert, update, delete, truncate');",
        )


def _slot(config: Config, facts: SourceFacts) -> Iterator[Finding]:
    name, slot = config.slot, facts.slot
    if slot is None:
        if facts.set_up:
            yield error("slot", f"{name} is missing: the changes since then are lost", START_OVER)
        else:
            yield note("slot", f"{name} does not exist yet", "cdc setup")
        return
    if slot.plugin != "pgoutput":
        fix = f"another source.slot, or: SELECT pg_drop_replication_slot('{name}');"
        yield error("slot", f"{name} uses the plugin {slot.plugin} instead of pgoutput", fix)
        return
    if slot.database != facts.server.database:
        what = f"{name} belongs to the database {slot.database}, not {facts.server.database}"
        yield error("slot", what, "another source.slot, or the database's name in source.dsn")
        return
    threats = list(judge_slot(Retention(slot)))
    yield from threats
    if not threats:
        use = f"streamed from by pid {slot.active_pid}" if slot.active_pid else "not in use"
        yield ok("slot", f"{name} is {use}, keeps {size(slot.retained_bytes or 0)} of WAL")
    yield from judge_idle(facts.server, slot)
    if slot.two_phase:
        yield error(
            "slot_two_phase",
            f"{name} decodes prepared transactions before they are decided",
            "cdc slot alter --no-two-phase (Postgres 18, no daemon running); before 18 "
            + START_OVER,
        )
