"""The facts that the doctor and `cdc setup` judge, gathered once and by the same queries.

Changes nothing: what is tried is refused or rolled back (`cdc.source.abilities`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import CDCError
from cdc.log import reader, topics
from cdc.publication import change as change_publication
from cdc.publication import migrations
from cdc.publication.plan import (
    COLUMN_LISTS,
    Plan,
    filter_problems,
    has_topic,
    partition_problems,
    plan,
)
from cdc.snapshot.initial import due
from cdc.source.abilities import Abilities, PublicationRefusal, read_abilities
from cdc.source.connection import connect
from cdc.source.export import config_for_rows
from cdc.source.publications import Publication, read_publication
from cdc.source.server import OpenTransaction, Server, open_transactions, read_server
from cdc.source.slots import Slot, read_slot
from cdc.source.tables import (
    Partition,
    SourceTable,
    TableColumn,
    read_columns,
    read_partitions,
    read_tables,
)
from cdc.source.volumes import Volume, volumes, wal_bytes_per_second

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.connection import Connection


class SnapshotFacts(NamedTuple):
    """What an initial snapshot that is due would read, and where."""

    volumes: list[Volume]
    wal_bytes_per_second: float | None
    standby: Server | None  # where it reads, if that is not the primary


class SourceFacts(NamedTuple):
    """The server, what the pipeline has there, and what our role may do."""

    server: Server
    slot: Slot | None
    publication: Publication | None
    tables: list[SourceTable]  # what source.tables matches
    holders: list[OpenTransaction]
    set_up: bool  # whether the log holds a resume record: what is missing then has been lost
    able: Abilities = Abilities()
    snapshot: SnapshotFacts | None = None  # None where none is due


class TablesFacts(NamedTuple):
    """What should be published, and what is."""

    server: Server
    tables: list[SourceTable]  # what the configuration captures by name, publishable or not
    columns: dict[int, list[TableColumn]]
    wanted: Plan  # with every problem
    state: Publication | None  # the publication, where there is one
    partitions: list[Partition]


def source_facts(connection: Connection, config: Config) -> SourceFacts:
    """Return the source's facts, but for the publication's and the snapshot's."""
    server = read_server(connection)
    return SourceFacts(
        server=server,
        slot=read_slot(connection, config.slot),
        publication=read_publication(connection, config.publication),
        tables=read_tables(connection, config.selection),
        holders=open_transactions(connection),
        set_up=False,
        able=read_abilities(connection, config, server),
    )


def tables_facts(
    connection: Connection,
    config: Config,
    server: Server,
    tables: list[SourceTable],
    state: Publication | None,
) -> TablesFacts:
    """Return what should be published of `tables`, and what is: `state`, the publication."""
    columns = read_columns(connection, [each.oid for each in tables])
    wanted = plan(config, server, tables, columns)
    if server.major >= COLUMN_LISTS:
        wanted.problems.extend(filter_problems(connection, wanted))
    split = [each.oid for each in tables if each.kind == "p"]
    partitions = read_partitions(connection, split)
    wanted.problems.extend(partition_problems(config, partitions))
    return TablesFacts(server, tables, columns, wanted, state, partitions)


def publication_refusal(
    connection: Connection, config: Config, facts: TablesFacts
) -> PublicationRefusal | None:
    """Return how Postgres refuses to create or change the publication: tried, and rolled back.

    None also where other checks report why it is not tried.
    """
    wanted, state = facts.wanted, facts.state
    if facts.server.in_recovery or not wanted.members or wanted.problems:
        return None
    return change_publication.refusal(
        connection, config.publication, wanted, state, config.selection
    )


def snapshot_facts(
    connection: Connection, config: Config, tables: list[SourceTable], *, started: bool = True
) -> SnapshotFacts | None:
    """Return the facts for an initial snapshot; None where none is due.

    `started`: whether the log may have been started.
    """
    if config.snapshot.mode == "never" or (started and _is_copied(config)):
        return None
    wanted = [
        each.oid
        for each in tables
        if each.publishable and config.selection.of((each.schema, each.name)).snapshot != "none"
    ]
    found, rate = volumes(connection, wanted), wal_bytes_per_second(connection)
    standby = None
    if config.snapshot.dsn:
        with connect(config_for_rows(config)) as reading:
            standby = read_server(reading)
    return SnapshotFacts(found, rate, standby)


def _is_copied(config: Config) -> bool:
    """Whether the log shows that nothing is left to copy; an old log has no such state."""
    try:
        state = due.state(config)
        if state is not None:
            return state.stage == "done"
        return reader.read_resume(config) is not None
    except CDCError:
        return False  # the log's own checks report it


def wanted_topics(config: Config, tables: list[SourceTable]) -> list[topics.Topic]:
    """Return the topics that the pipeline should have: internal ones, and one for each table."""
    return topics.internal_topics(config) + [
        topics.data_topic(config, each.schema, each.name)
        for each in tables
        if has_topic(config, each)
    ]


def enabled_migrations(config: Config) -> list[str]:
    return [name for name in migrations.NAMES if getattr(config.migrations, name)]
