"""The applier of a batch: the configured one, or with `auto` the one that costs least.

Up to a megabyte a mirror is rewritten from memory, above that its replaced rows are marked by
deletion vectors, and above `spark_above_bytes` Spark merges. What these do not do, delta-rs does:
histories, soft deletes, tables without a key, truncates, partitions, features of other writers.
"""

from __future__ import annotations

from threading import Semaphore
from typing import TYPE_CHECKING, Final

from lockstep.sinks.delta import actions, lake, merge, rewrites, vectors

if TYPE_CHECKING:
    from lockstep.sinks.delta.lake import Commit
    from lockstep.sinks.delta.settings import Settings
    from lockstep.sinks.delta.table import Mirror
    from lockstep.sinks.delta.upkeep import Upkeep
    from lockstep.sinks.delta.work import Work

# How many mirrors above a megabyte are written concurrently: they hold more in memory.
_LARGE_AT_ONCE: Final = 4


class Appliers:
    """The appliers of one follower, with what they keep in memory."""

    def __init__(self, settings: Settings, upkeep: Upkeep) -> None:
        self._settings, self._upkeep = settings, upkeep
        self._vectors = vectors.Vectors(settings.storage)
        self._rewrites = rewrites.Rewrites(settings.storage)
        self._large = Semaphore(_LARGE_AT_ONCE)

    def joins_files(self, mirror: Mirror) -> bool:
        """Return whether the mirror's applier joins its small files."""
        return self._vectors.knows(mirror.table)

    def apply(self, mirror: Mirror, work: Work, commit: Commit) -> None:
        """Apply the work in one commit; raise ConflictError if another one was first."""
        mine = self._settings
        how = self._cheapest(mirror, work) if mine.applier == "auto" else mine.applier
        if how == "rewrite":
            self._rewrites.apply(mirror, work, commit)
            return
        with self._large:
            if how == "vectors" and vectors.suits(mirror.table, work):
                self._vectors.apply(mirror.table, work, commit)
                return
            if how == "spark" and mine.large and not work.is_special:
                mine.large.apply(mirror.table, work, commit)
            else:
                merge.apply(mirror.table, work, commit)
            self._upkeep.bound(mirror)

    def _cheapest(self, mirror: Mirror, work: Work) -> str:
        """Return the applier that costs least for the mirror."""
        fits = rewrites.suits(work)
        if fits and self._rewrites.knows(mirror):
            return "rewrite"
        size = lake.size(mirror.table)
        if fits and size <= rewrites.MOST_BYTES and actions.is_plain(mirror.table):
            return "rewrite"
        return "spark" if size > self._settings.spark_above_bytes else "vectors"
