"""The doctor's checks of an initial snapshot that is due: what it needs, and what it costs.

Pure functions from facts (`cdc.operate.facts`). Estimates use the tables' files and statistics,
and the rate at which the server has written WAL since its statistics were reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.parameters import change
from cdc.operate.readable import duration, listed, size
from cdc.source.export import STANDBY_MAJOR
from cdc.source.volumes import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.operate.facts import SnapshotFacts, SourceFacts
    from cdc.source.server import Server

# A conservative rate for one task on a present-day core: into Kafka, exactly once.
_BYTES_PER_SECOND: Final = 12e6


def check_snapshot(config: Config, facts: SourceFacts) -> Iterator[Finding]:
    """Yield the findings of an initial snapshot; none where none is due."""
    if facts.snapshot is not None:
        yield from _room(config, facts, facts.snapshot)
        yield from _readable(facts.server, facts.snapshot)
        yield from _standby(facts.server, facts.snapshot)
        yield from _cost(config, facts, facts.snapshot)


def seconds(config: Config, rows: int, bytes_: int) -> float:
    """Return the snapshot's estimated duration in seconds."""
    pace = config.snapshot
    paced = [bytes_ / (_BYTES_PER_SECOND * pace.max_parallel)]
    if pace.rows_per_second:
        paced.append(rows / pace.rows_per_second)
    if pace.bytes_per_second:
        paced.append(bytes_ / pace.bytes_per_second)
    return max(paced)


def _room(config: Config, facts: SourceFacts, snapshot: SnapshotFacts) -> Iterator[Finding]:
    """Check that one more slot and walsender than the stream's are available."""
    server = snapshot.standby or facts.server
    of_stream = 0 if facts.slot or snapshot.standby else 1
    for setting, used in (
        ("max_replication_slots", server.slots_in_use),
        ("max_wal_senders", server.senders_in_use),
    ):
        limit = int(server.settings[setting])
        if limit - used < of_stream + 1:
            yield error(
                "snapshot",
                f"{setting} has no room for the temporary slot of the initial snapshot",
                change(facts.able, setting, str(limit + 10), restart=True)
                + "; or snapshot.mode: never",
            )
    if not config.snapshot.dsn and "," in config.source.dsn and "load_balance" in config.source.dsn:
        yield error(
            "snapshot",
            "source.dsn spreads connections over several servers: the exported snapshot is of one",
            "name one server in snapshot.dsn",
        )


def _readable(server: Server, snapshot: SnapshotFacts) -> Iterator[Finding]:
    refused = [each for each in snapshot.volumes if not each.may_select]
    if refused:
        names = ", ".join(each.quoted for each in refused)
        role = quoted(server.role)
        schemas = sorted({each.schema for each in refused})
        usage = " ".join(f"GRANT USAGE ON SCHEMA {quoted(each)} TO {role};" for each in schemas)
        yield error(
            "snapshot",
            f"may not be read: {listed([str(each) for each in refused])}",
            f"{usage} GRANT SELECT ON {names} TO {role};  -- partitions are read one by one",
        )
    hidden = [each for each in snapshot.volumes if each.hidden]
    if hidden:
        yield error(
            "snapshot",
            f"row security would hide rows of {listed([str(each) for each in hidden])}",
            f"ALTER ROLE {quoted(server.role)} BYPASSRLS;  -- or snapshot: none for these tables",
        )


def _standby(server: Server, snapshot: SnapshotFacts) -> Iterator[Finding]:
    standby = snapshot.standby
    if standby is None:
        return
    if standby.in_recovery and standby.major < STANDBY_MAJOR:
        yield error(
            "snapshot.dsn",
            f"standbys support logical slots from {STANDBY_MAJOR} on; this is {standby.major}",
            "remove snapshot.dsn",
        )
    elif standby.system_identifier != server.system_identifier:
        yield error("snapshot.dsn", "names another cluster than source.dsn", "name a standby of it")
    elif standby.in_recovery and standby.settings.get("hot_standby_feedback") != "on":
        yield error(
            "snapshot.dsn",
            "hot_standby_feedback is off: the primary's vacuum ends the snapshot",
            "on the standby: ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf();",
        )
    else:
        yield ok("snapshot.dsn", f"Postgres {standby.version_text}, a server of the same cluster")


def _cost(config: Config, facts: SourceFacts, snapshot: SnapshotFacts) -> Iterator[Finding]:
    rows = sum(each.rows for each in snapshot.volumes)
    total = sum(each.bytes for each in snapshot.volumes)
    lasts = seconds(config, rows, total)
    # Postgres counts rows when it analyzes a table, and not before.
    counted = f"about {rows:,} rows, " if rows else ""
    tasks = config.snapshot.max_parallel
    about = f"{counted}{size(total)}, in about {duration(lasts)} with {tasks} tasks"
    rate = snapshot.wal_bytes_per_second
    grows = None if rate is None else rate * lasts
    if grows is not None:
        about += f"; WAL grows by about {size(grows)} meanwhile, which the slot keeps"
    idle = int(facts.server.settings.get("idle_replication_slot_timeout", "0"))
    if 0 < idle < 2 * lasts:
        yield warning(
            "snapshot",
            f"no daemon reads from the slot for about {duration(lasts)}, and Postgres invalidates"
            f" it after {duration(idle)}",
            change(facts.able, "idle_replication_slot_timeout", "0"),
        )
    limit_mb = int(facts.server.settings["max_slot_wal_keep_size"])
    if grows is not None and limit_mb >= 0 and grows > 0.9 * (limit_mb << 20):
        yield warning(
            "snapshot",
            f"{about}: more than max_slot_wal_keep_size ({size(limit_mb << 20)}) allows",
            "raise max_slot_wal_keep_size; or make it faster: snapshot.max_parallel",
        )
    else:
        yield note("snapshot", f"`cdc run` copies the existing rows first: {about}")
