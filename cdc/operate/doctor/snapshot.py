"""The doctor's checks of an initial snapshot that is due: what it needs, and what it costs.

The facts are gathered first; the checks are pure. Estimates use the tables' files and statistics,
and the rate at which the server has written WAL since its statistics were reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import CDCError
from cdc.log import reader
from cdc.operate.findings import Finding, error, listed, note, ok, size, warning
from cdc.operate.parameters import change
from cdc.operate.retention import spell
from cdc.snapshot.initial import due
from cdc.source import server as inspection
from cdc.source.abilities import Abilities
from cdc.source.connection import connect
from cdc.source.export import STANDBY_MAJOR, where_read
from cdc.source.volumes import Volume, quoted, volumes, wal_bytes_per_second

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.source.server import Server, Slot, Table

# A conservative rate for one task on a present-day core: into Kafka, exactly once.
_BYTES_PER_SECOND: Final = 12e6


class Facts(NamedTuple):
    """All facts that the checks use."""

    server: Server
    slot: Slot | None
    volumes: list[Volume]
    wal_bytes_per_second: float | None
    standby: Server | None
    able: Abilities = Abilities()


def gather(
    config: Config, server: Server, slot: Slot | None, tables: list[Table], able: Abilities
) -> Facts | None:
    """Return the facts for an initial snapshot; None where none is due."""
    if config.snapshot.mode == "never" or _is_done(config):
        return None
    with connect(config) as connection:
        wanted = [
            each.oid
            for each in tables
            if each.publishable and config.selection.of((each.schema, each.name)).snapshot != "none"
        ]
        found = volumes(connection, wanted)
        rate = wal_bytes_per_second(connection)
    standby = None
    if config.snapshot.dsn:
        with connect(where_read(config)) as connection:
            standby = inspection.server(connection)
    return Facts(server, slot, found, rate, standby, able)


def judge(config: Config, facts: Facts) -> list[Finding]:
    """Return the findings."""
    return [
        *_room(config, facts),
        *_readable(facts),
        *_standby(facts),
        *_cost(config, facts),
    ]


def seconds(config: Config, rows: int, bytes_: int) -> float:
    """Return the snapshot's estimated duration in seconds."""
    pace = config.snapshot
    paced = [bytes_ / (_BYTES_PER_SECOND * pace.max_parallel)]
    if pace.rows_per_second:
        paced.append(rows / pace.rows_per_second)
    if pace.bytes_per_second:
        paced.append(bytes_ / pace.bytes_per_second)
    return max(paced)


def _is_done(config: Config) -> bool:
    """Whether the log shows that nothing is left to copy; an old log has no such state."""
    try:
        state = due.state(config)
        if state is not None:
            return state.stage == "done"
        return reader.read_resume(config) is not None
    except CDCError:
        return False  # the log's own checks report it


def _room(config: Config, facts: Facts) -> Iterator[Finding]:
    """Check that one more slot and walsender than the stream's are available."""
    server = facts.standby or facts.server
    of_stream = 0 if facts.slot or facts.standby else 1
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


def _readable(facts: Facts) -> Iterator[Finding]:
    refused = [each for each in facts.volumes if not each.may_select]
    if refused:
        names = ", ".join(each.quoted for each in refused)
        role = quoted(facts.server.role)
        schemas = sorted({each.schema for each in refused})
        usage = " ".join(f"GRANT USAGE ON SCHEMA {quoted(each)} TO {role};" for each in schemas)
        yield error(
            "snapshot",
            f"may not be read: {listed([str(each) for each in refused])}",
            f"{usage} GRANT SELECT ON {names} TO {role};  -- partitions are read one by one",
        )
    hidden = [each for each in facts.volumes if each.hidden]
    if hidden:
        yield error(
            "snapshot",
            f"row security would hide rows of {listed([str(each) for each in hidden])}",
            f"ALTER ROLE {quoted(facts.server.role)} BYPASSRLS;"
            "  -- or snapshot: none for these tables",
        )


def _standby(facts: Facts) -> Iterator[Finding]:
    standby = facts.standby
    if standby is None:
        return
    if standby.in_recovery and standby.major < STANDBY_MAJOR:
        yield error(
            "snapshot.dsn",
            f"standbys make logical slots from {STANDBY_MAJOR} on; this is {standby.major}",
            "remove snapshot.dsn",
        )
    elif standby.system_identifier != facts.server.system_identifier:
        yield error(
            "snapshot.dsn", "leads to another cluster than source.dsn", "name a standby of it"
        )
    elif standby.in_recovery and standby.settings.get("hot_standby_feedback") != "on":
        yield error(
            "snapshot.dsn",
            "hot_standby_feedback is off: the primary's vacuum ends the snapshot",
            "on the standby: ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf();",
        )
    else:
        yield ok("snapshot.dsn", f"Postgres {standby.version_text}, a server of the same cluster")


def _cost(config: Config, facts: Facts) -> Iterator[Finding]:
    rows = sum(each.rows for each in facts.volumes)
    total = sum(each.bytes for each in facts.volumes)
    lasts = seconds(config, rows, total)
    # Postgres counts rows when it analyzes a table, and not before.
    counted = f"about {rows:,} rows, " if rows else ""
    about = (
        f"{counted}{size(total)}, in about {spell(lasts)} with {config.snapshot.max_parallel} tasks"
    )
    rate = facts.wal_bytes_per_second
    grows = None if rate is None else rate * lasts
    if grows is not None:
        about += f"; WAL grows by about {size(grows)} meanwhile, which the slot keeps"
    idle = int(facts.server.settings.get("idle_replication_slot_timeout", "0"))
    if 0 < idle < 2 * lasts:
        yield warning(
            "snapshot",
            f"nobody reads from the slot for about {spell(lasts)}, and Postgres invalidates it"
            f" after {spell(idle)}",
            change(facts.able, "idle_replication_slot_timeout", "0"),
        )
    limit_mb = int(facts.server.settings["max_slot_wal_keep_size"])
    if grows is not None and limit_mb >= 0 and grows > 0.9 * (limit_mb << 20):
        yield warning(
            "snapshot",
            f"{about}: more than max_slot_wal_keep_size ({size(limit_mb << 20)}) allows",
            "raise max_slot_wal_keep_size; or let it take less time: snapshot.max_parallel",
        )
    else:
        yield note("snapshot", f"`cdc run` copies first what is there: {about}")
