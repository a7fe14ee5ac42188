"""Make a base: fold what changed, slice by slice, write files, commit once.

The archive's cuts after the base before are folded with the newest runs of the tables that changed
(`runs`), so a compaction costs the change, not the tables. All other files are shared with the base
before. The commit is the only effect that a reader can see: killed anywhere, or run twice, the next
run makes the base from the same input, and files that no commit names are deleted by a later one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cdc import failpoints
from cdc.errors import ConfigError
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import frontiers, layout, runs
from lockstep.jobs.compacting.bases import bases_of
from lockstep.jobs.compacting.layout import BaseRecord
from lockstep.jobs.compacting.past import state
from lockstep.jobs.compacting.runs import BaseFile
from lockstep.jobs.compacting.writing import written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.archiving.table import ArchiveTable
    from lockstep.jobs.compacting.bases import Bases
    from lockstep.jobs.compacting.frontiers import ArchivedFrontier
    from lockstep.jobs.compacting.past import PastState
    from lockstep.jobs.compacting.runs import Merging
    from lockstep.jobs.compacting.slices import Past, Slice
    from lockstep.sinks.delta.actions import Action

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

        Raises ConfigError if there is no archive, nothing in it, or less than in the newest base.
        """
        config = self._config
        archive, bases = opened(config), bases_of(config)
        if not archive.find():
            raise ConfigError(
                f"there is no archive at {archive.path}", hint="`cdc archive run` creates it"
            )
        bases.create()
        # Again, after the bases: an erasure commits to the archive first, then to the bases. So it
        # is either seen here, or makes this compaction's commit a conflict.
        archive.find()
        base = bases.newest()
        frontier = frontiers.newest(config, archive.table, base)
        if base is not None and frontier is None:
            frontier = self._frontier_without(archive, base)
            base = None
        if frontier is None:
            raise ConfigError("the archive has no cut yet", hint="`cdc archive run` writes them")
        if base is not None and frontier.applied.seq == base.seq:
            return base, False
        found = state(config, archive, base, frontier)
        failpoints.reach("compact_planned")
        record = self._write(bases, base, found)
        failpoints.reach("compact_committed")
        bases.vacuum()
        return record, True

    def _frontier_without(self, archive: ArchiveTable, base: BaseRecord) -> ArchivedFrontier:
        """Return the newest frontier of an archive that does not have the base's cut.

        The next base is made from the archive alone. Raises ConfigError if the archive ends before
        the base, which then may hold what is nowhere else.
        """
        found = frontiers.newest(self._config, archive.table, None)
        if found is None or found.applied.seq < base.seq:
            raise ConfigError(
                f"the archive ends at seq {found.applied.seq if found else 0}, before base"
                f" {base.number} at {base.lsn} (seq {base.seq}), which was made of other cuts",
                hint="let `cdc archive run` archive the log up to there, or restore the archive; if"
                " the log has started again, move `_bases` out of the archive's folder",
            )
        return found

    def _write(self, bases: Bases, base: BaseRecord | None, found: PastState) -> BaseRecord:
        """Write a base that continues `base`, or is made of the archive alone, and commit it."""
        keep_us = int(self._config.archive.tombstone_hours * _HOUR_US)
        since = found.frontier.applied.committed_at_us - keep_us
        if base:  # it does not have earlier ones, if they were kept for less time
            since = max(since, base.deletes_since_us)
        # A base that is not continued shares no file with the next one.
        files = [BaseFile.of(add) for add in bases.added().values()] if base else []
        tables, number = base.tables if base else (), bases.table.version() + 1
        own = f"{self._config.prefix}.cdc."
        events = {t: many for t, many in found.frontier.records.items() if not t.startswith(own)}
        merging = runs.merging(files, events, found.past.floors, tables, number)
        past = found.past._replace(deletes_since_us=since, merging=merging)
        actions = self._folded(bases, past, list(_slices(found, merging)))
        failpoints.reach("compact_written")
        kept = [each for each in files if each.path not in merging.files]
        new = [BaseFile.of(action["add"]) for action in actions]
        untouched = [each for each in tables if each.topic not in merging.rows]
        counts = [each for file in [*kept, *new] for each in file.tables or ()]
        changed = [each for each in counts if each.topic in merging.rows]
        applied, frontier = found.frontier.applied, found.frontier
        record = BaseRecord(
            pipeline=self._config.pipeline,
            number=number,
            epoch=applied.epoch,
            lsn=str(applied.lsn),
            seq=applied.seq,
            committed_at_us=applied.committed_at_us,
            place=applied.place,
            chain=frontier.chain,
            cut=frontier.cut,
            tables=layout.total([*untouched, *changed]),
            ends={topic: tuple(each) for topic, each in applied.ends.items()},
            deletes_since_us=since,
            previous=layout.digest(bases.newest()),
            made_at_us=time.time_ns() // 1_000,
            kept_from=bases.oldest_needed(self._config.archive.bases_kept),
        )
        bases.commit(record, actions, {each.path for each in kept})
        return record

    def _folded(self, bases: Bases, past: Past, parts: list[Slice]) -> list[Action]:
        assert past.merging is not None
        if self._spark is None or sum(past.merging.rows.values()) <= LARGE_ROWS:
            return written(past, bases.files, parts)
        from lockstep.jobs.compacting import tasks  # noqa: PLC0415 - of the extra `spark`

        return tasks.compact(self._spark(), past, parts)


def _slices(found: PastState, merging: Merging) -> Iterator[Slice]:
    """Yield the slices to fold; none has tables that are folded completely and others."""
    for topics in (merging.complete, merging.partly):
        rows = {topic: many for topic, many in merging.rows.items() if topic in topics}
        yield from found.slices_of(rows)
