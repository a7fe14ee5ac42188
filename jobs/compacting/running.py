"""Make a base: fold the slices of the tables that changed, write files, commit once.

The base before is read together with the archive's cuts after it, so a compaction costs the tables
that changed, not the archive. Files of other tables are shared with the base before. The commit is
the only effect that a reader can see: killed anywhere, or run twice, the next run makes the base
from the same input, and files that no commit names are deleted by a later one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cdc import failpoints
from cdc.errors import ConfigError
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import frontiers, layout
from lockstep.jobs.compacting.bases import bases_of
from lockstep.jobs.compacting.layout import BaseRecord
from lockstep.jobs.compacting.past import state
from lockstep.jobs.compacting.writing import topics_of, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.compacting.bases import Bases
    from lockstep.jobs.compacting.past import State

# With more rows than this, slices are folded by executors.
LARGE_ROWS: Final = 500_000
_HOUR_US: Final = 3_600_000_000


class Compaction:
    """Compacts the archive of a pipeline's log."""

    def __init__(self, config: Config, spark: Callable[[], SparkSession] | None) -> None:
        """`spark` returns the session for large tables; without it this process takes them."""
        self._config, self._spark = config, spark

    def run(self) -> tuple[BaseRecord, bool]:
        """Return the base at the archive's newest frontier, and whether it was made by this call.

        Raises ConfigError if there is no archive, or nothing in it.
        """
        config = self._config
        archive, bases = opened(config), bases_of(config)
        if not archive.find():
            raise ConfigError(
                f"there is no archive at {archive.path}", hint="`cdc archive run` creates it"
            )
        bases.create()
        base = bases.newest()
        frontier = frontiers.newest(config, archive.table, base)
        if frontier is None:
            raise ConfigError("the archive has no cut yet", hint="`cdc archive run` writes them")
        if base is not None and frontier.applied.seq == base.seq:
            return base, False
        found = state(config, archive, base, frontier)
        failpoints.reach("compact_planned")
        record = self._write(bases, base, found)
        failpoints.reach("compact_committed")
        bases.vacuum(config.archive.bases_kept)
        return record, True

    def _write(self, bases: Bases, base: BaseRecord | None, found: State) -> BaseRecord:
        keep_us = int(self._config.archive.tombstone_hours * _HOUR_US)
        since = found.frontier.applied.committed_at_us - keep_us
        past = found.past._replace(deletes_since_us=since)
        own = f"{past.prefix}.cdc."
        changed = {each for each in found.frontier.records if not each.startswith(own)}
        kept, changed = _shared(bases, changed)
        rows = {topic: many for topic, many in found.rows.items() if topic in changed}
        parts = list(found.slices(changed))
        if self._spark is not None and sum(rows.values()) > LARGE_ROWS:
            from lockstep.jobs.compacting import tasks  # noqa: PLC0415 - of the extra `spark`

            counts, actions = tasks.compact(self._spark(), past, parts)
        else:
            counts, actions = written(past, bases.files, parts)
        failpoints.reach("compact_written")
        untouched = [each for each in (base.tables if base else ()) if each.topic not in changed]
        applied, frontier = found.frontier.applied, found.frontier
        record = BaseRecord(
            pipeline=self._config.pipeline,
            number=bases.table.version() + 1,
            epoch=applied.epoch,
            lsn=str(applied.lsn),
            seq=applied.seq,
            committed_at_us=applied.committed_at_us,
            place=applied.place,
            chain=frontier.chain,
            cut=frontier.cut,
            tables=layout.total([*untouched, *counts]),
            ends={topic: tuple(each) for topic, each in applied.ends.items()},
            deletes_since_us=since,
            previous=layout.digest(base),
            made_at_us=time.time_ns() // 1_000,
        )
        bases.commit(record, actions, kept)
        return record


def _shared(bases: Bases, changed: set[str]) -> tuple[set[str], set[str]]:
    """Return the files that stay, and the tables that are written.

    A file of several tables, of which one is written, is written again, and so are these tables.
    """
    files = {path: topics_of(add) for path, add in bases.added().items()}
    while True:
        stale = [topics for topics in files.values() if topics & changed]
        again = changed.union(*stale)
        if again == changed:
            return {path for path, topics in files.items() if not topics & changed}, changed
        changed = again
