"""The applier of a batch: the configured one, or with `auto` the one that costs least.

Up to a megabyte a mirror is rewritten from memory, above that its replaced rows are marked by
deletion vectors, and above `spark_above_bytes` Spark merges. What these do not do, delta-rs does:
soft deletes, truncates, partitions, and up to a megabyte histories and tables without a key. A
table with features that only delta-spark supports is for Spark, whatever is configured.
"""

from __future__ import annotations

from threading import Semaphore
from typing import TYPE_CHECKING, Final

from lockstep.sinks.delta import actions, features, lake, merge, rewrites, vectors

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.settings import DeltaSettings
    from lockstep.sinks.delta.table import Mirror
    from lockstep.sinks.delta.upkeep import MirrorUpkeep
    from lockstep.sinks.delta.work import Work

# How many mirrors above a megabyte are written concurrently: they hold more in memory.
_LARGE_AT_ONCE: Final = 4


class Appliers:
    """The appliers of one follower, with what they keep in memory."""

    def __init__(self, settings: DeltaSettings, upkeep: MirrorUpkeep) -> None:
        self._settings, self._upkeep = settings, upkeep
        self._vectors = vectors.Vectors(settings.storage)
        self._rewrites = rewrites.Rewrites(settings.storage)
        self._large = Semaphore(_LARGE_AT_ONCE)

    def joins_files(self, mirror: Mirror) -> bool:
        """Return whether the mirror's applier joins its small files."""
        return self._vectors.knows(mirror.loaded)

    def apply(self, mirror: Mirror, work: Work, commit: CommitInfo) -> None:
        """Apply the work in one commit; raise ConflictError if another one was first."""
        how = self._how(mirror, work)
        if how == "rewrite":
            self._rewrites.apply(mirror, work, commit)
            return
        with self._large:
            if how == "vectors":
                self._vectors.apply(mirror, work, commit)
                return
            if how == "spark":
                assert self._settings.large is not None, "it is expected"
                self._settings.large.apply(mirror.table, work, commit)
            else:
                merge.apply(mirror.table, work, commit)
            self._upkeep.bound(mirror)

    def _how(self, mirror: Mirror, work: Work) -> str:
        """Return the applier; raise ConfigError if the table's features leave none."""
        mine = self._settings
        is_auto = mine.applier == "auto"
        # With the features that it had at our last commit, or else ours will conflict.
        if is_auto and rewrites.suits(work) and self._rewrites.knows(mirror):
            return "rewrite"
        table = mirror.loaded
        if features.needs_spark(table):
            features.expect_writable(table, mine.large if work.by_spark else None)
            return "spark"
        how = self._cheapest(table, work) if is_auto else mine.applier
        if how == "spark" and (mine.large is None or work.is_special):
            how = "vectors"
        return "delta-rs" if how == "vectors" and not self._vectors.suits(table, work) else how

    def _cheapest(self, table: DeltaTable, work: Work) -> str:
        """Return the applier that costs least for the table, if it supports the work."""
        size = lake.size(table)
        if size > rewrites.MOST_BYTES:
            return "spark" if size > self._settings.spark_above_bytes else "vectors"
        return "rewrite" if rewrites.suits(work) and actions.is_plain(table) else "delta-rs"
