"""The source's state at one look: what the continuity check compares with the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.events import LSN
from cdc.source.connection import translated
from cdc.source.publications import read_publication_with_tables
from cdc.source.server import wal_end
from cdc.source.slots import read_slot

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import PinnedPublication
    from cdc.source.connection import Connection
    from cdc.source.slots import Slot


class SourceState(NamedTuple):
    """What the continuity check needs to know; None is something that is missing."""

    database: str
    databases: frozenset[str]
    wal_end: LSN
    slot: Slot | None
    publication: PinnedPublication | None
    tables: frozenset[str]  # those of the known publication that exist, by their names there


_DATABASES = """
SELECT current_database()::text, array_agg(datname::text) FROM pg_database WHERE datallowconn
"""


def read_state(connection: Connection, config: Config, known: PinnedPublication) -> SourceState:
    """Return the source's state; `known` is the publication as the log pins it."""
    publication, existing = read_publication_with_tables(connection, config.publication, known)
    with translated("reading the names of the databases"):
        row = connection.execute(_DATABASES).fetchone()
    assert row is not None, "an aggregate gives one row"
    return SourceState(
        row[0],
        frozenset(row[1]),
        wal_end(connection),
        read_slot(connection, config.slot),
        publication and publication.pinned,
        existing,
    )
