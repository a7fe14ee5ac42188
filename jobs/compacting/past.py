"""The past as a reader finds it: the newest base at or before a frontier, and the archive after it.

The rows of a table at that frontier are those of its slices, folded. Without a base it is the
archive alone, from its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import ConfigError, GapError
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import fold, frontiers
from lockstep.jobs.compacting.bases import bases_of
from lockstep.jobs.compacting.older import OlderEvents, uncompacted_topics
from lockstep.jobs.compacting.slices import Past, PastTables, RowSizes, floors, planned

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import pyarrow as pa

    from cdc.config import Config
    from lockstep.jobs.archiving.table import ArchiveTable
    from lockstep.jobs.compacting.frontiers import ArchivedFrontier
    from lockstep.jobs.compacting.layout import BaseRecord
    from lockstep.jobs.compacting.slices import Slice
    from lockstep.jobs.cuts.frontiers import Position


class PastState(NamedTuple):
    """The state of all tables at an archived frontier, not read yet."""

    frontier: ArchivedFrontier
    base: BaseRecord | None
    past: Past
    rows: dict[str, int]  # how many rows each table has in base and archive, at most
    sizes: RowSizes

    def slices(self, topics: Collection[str] | None = None) -> Iterator[Slice]:
        """Yield the slices of these tables, or of all."""
        chosen = {
            topic: many for topic, many in self.rows.items() if topics is None or topic in topics
        }
        return self.slices_of(chosen)

    def slices_of(self, rows: Mapping[str, int]) -> Iterator[Slice]:
        """Yield the slices of tables of which so many rows are read."""
        sizes = {topic: self.sizes.of(topic, many) for topic, many in rows.items()}
        return planned(sizes, self.past.uncompacted, self.past.seq)


def find(config: Config, wanted: Position | None = None) -> PastState | None:
    """Return the state at the newest archived frontier not above `wanted`; None if there is none.

    Raises ConfigError if there is no archive.
    """
    archive = opened(config)
    if not archive.find():
        raise ConfigError(
            f"there is no archive at {archive.path}", hint="`cdc archive run` creates it"
        )
    for base in [*kept_bases(config), None]:
        found = frontiers.newest(config, archive.table, base, wanted)
        if found is not None:
            return state(config, archive, base, found)
    return None


def kept_bases(config: Config) -> list[BaseRecord]:
    """Return the bases that the policy keeps, the newest first."""
    bases = bases_of(config)
    return bases.kept(config.archive.bases_kept) if bases.find() else []


def state(
    config: Config, archive: ArchiveTable, base: BaseRecord | None, frontier: ArchivedFrontier
) -> PastState:
    """Return the state at a frontier, from this base on."""
    assert config.archive.path is not None
    past = Past(
        prefix=config.prefix,
        archive=config.archive.path,
        bases=bases_of(config).path,
        storage=dict(config.archive.storage),
        version=archive.table.version(),
        base=base.number if base else None,
        above=base.seq if base else 0,
        cuts=(base.cut if base else 0, frontier.cut),
        seq=frontier.applied.seq,
        lsn=frontier.applied.lsn,
        floors={},
        uncompacted=frozenset(),
    )
    tables = PastTables(past)
    own = f"{config.prefix}.cdc."
    rows = {topic: many for topic, many in frontier.records.items() if not topic.startswith(own)}
    past = past._replace(
        floors=floors(tables, rows),
        uncompacted=uncompacted_topics(OlderEvents(tables).every_version().values()),
    )
    for table in base.tables if base else ():
        rows[table.topic] = rows.get(table.topic, 0) + table.rows
    opened_tables = [tables.archive] if tables.base is None else [tables.archive, tables.base]
    return PastState(frontier, base, past, rows, RowSizes(opened_tables))


def newest_rows(past: Past, tables: PastTables, older: OlderEvents, part: Slice) -> pa.Table:
    """Return a slice's rows at the frontier: the newest event of each key, filled."""
    partly = past.merging.partly if past.merging else {}
    rows = tables.of(part)
    chosen = fold.newest(rows, past.floors, past.uncompacted, past.deletes_since_us, partly)
    rows = fold.remaining(rows, past.floors)
    return fold.with_fills(chosen, rows, older, past.uncompacted, partly)


def missing_frontier(wanted: Position | None) -> GapError:
    """Return the error for a place that the archive does not reach."""
    return GapError(
        "the archive has no frontier" + (f" not above {wanted}" if wanted is not None else ""),
        hint="`cdc archive status` shows up to where the log is archived",
    )
