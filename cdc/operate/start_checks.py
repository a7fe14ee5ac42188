"""Gather what the requirements check: for `cdc doctor` and `cdc setup`, by the same queries.

Changes nothing: what is tried is refused or rolled back (`cdc.source.abilities`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.operate.commands import setup_publication
from cdc.operate.doctor import snapshot as doctor_snapshot
from cdc.operate.doctor.requirements import Facts
from cdc.operate.doctor.source import SourceFacts
from cdc.publication.plan import plan
from cdc.source import abilities, membership
from cdc.source import server as inspection
from cdc.source.columns import columns

if TYPE_CHECKING:
    import psycopg

    from cdc.config import Config
    from cdc.source.abilities import Refusal
    from cdc.source.server import Server, Table


def gather(connection: psycopg.Connection, config: Config, *, set_up: bool) -> SourceFacts:
    """Return the source's facts, including abilities."""
    server = inspection.server(connection)
    tables = inspection.tables(connection, config.selection)
    able = abilities.abilities(connection, config, server)
    if not server.in_recovery:
        refused = _publication(connection, config, server, tables)
        able = able._replace(publication=refused)
    return SourceFacts(
        server=server,
        slot=inspection.slot(connection, config.slot),
        publication=inspection.publication(connection, config.publication),
        tables=tables,
        holders=inspection.holders(connection),
        set_up=set_up,
        able=able,
    )


def with_snapshot(config: Config, source: SourceFacts) -> Facts:
    """Return the facts with those of an initial snapshot, where one is due."""
    snapshot = doctor_snapshot.gather(
        config, source.server, source.slot, source.tables, source.able
    )
    return Facts(source, snapshot)


def _publication(
    connection: psycopg.Connection, config: Config, server: Server, tables: list[Table]
) -> Refusal | None:
    """Return how the publication is refused; None where other checks report why it is not tried."""
    some = [each for each in tables if each.publishable]
    wanted = plan(config, server, some, columns(connection, [each.oid for each in some]))
    if not wanted.members or wanted.problems:
        return None
    state = membership.state(connection, config.publication)
    return setup_publication.refusal(connection, config, wanted, state)
