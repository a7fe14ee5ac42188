"""Upkeep between batches: join small files, and delete files that no version needs.

The writer itself does it, so that nothing competes with its commits. Mirrors that are written with
deletion vectors join their own files (`sinks.delta.vectors`); for them only old files are deleted
here. Files are deleted if no frontier within `vacuum_hours` needs them; none while an older
generation is kept, because that is in old versions.
"""

from __future__ import annotations

import math
import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import UUID

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow.fs import FileSelector

from lockstep.sinks.delta import actions, lake, log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.sinks.delta.table import Mirror

_SMALL_BYTES: Final = 16 << 20
_SMALL_FILES: Final = 8
# Between two runs of upkeep a mirror may have this many more small files than after it.
MORE_SMALL_FILES: Final = 64
# A frontier may name versions that were replaced some time before the next frontier was written.
_MORE_HOURS: Final = 1
# The log keeps removed files longer than the storage does, so that it shows when they are due.
_LOG_HOURS: Final = 7 * 24
_ALWAYS_HOURS: Final = 100 * 365 * 24
_VECTOR: Final = re.compile(r"deletion_vector_(.{36})\.bin")


class MirrorUpkeep:
    """When upkeep is due, and its steps."""

    def __init__(self, minutes: float, hours: float, storage: Mapping[str, str]) -> None:
        self._seconds, self._hours, self._storage = minutes * 60, hours, storage
        kept = f"interval {math.ceil(hours) + _LOG_HOURS if hours else _ALWAYS_HOURS} hours"
        self._properties = {
            "delta.logRetentionDuration": kept,
            "delta.deletedFileRetentionDuration": kept,
            # Otherwise any writer of a checkpoint would clean up, even while an older generation is
            # kept.
            "delta.enableExpiredLogCleanup": "false",
        }
        # How many small files each mirror had when they were last joined: partitions keep theirs.
        self._joined: dict[str, int] = {}

    def is_due(self, last: float) -> bool:
        """Return whether it is due since the `last` run of any process: many end earlier."""
        return bool(self._seconds) and time.time() - last >= self._seconds

    def retain(self, mirror: Mirror) -> None:
        """Set how long the table keeps its log and removed files, for all who maintain it."""
        if self._properties.items() <= mirror.table.metadata().configuration.items():
            return
        try:
            mirror.set_properties(self._properties)
        except lake.ConflictError:
            mirror.find()  # the next batch retries

    def maintain(
        self, mirror: Mirror, cluster: Sequence[str], *, joins: bool, deletes: bool
    ) -> None:
        """Join small files if `joins`, or to cluster; delete what no version needs if `deletes`."""
        if (spark := mirror.spark) is not None:
            hours = math.ceil(self._hours) + _MORE_HOURS if deletes and self._hours else None
            spark.maintain(mirror.table, cluster, hours)
            return
        if joins or cluster:
            self.optimize(mirror, cluster)
        if deletes:
            self.vacuum(mirror)

    def optimize(self, mirror: Mirror, cluster: Sequence[str]) -> None:
        """Join a mirror's small files, clustered by its columns; the first of two commits wins."""
        if _small_files(mirror) < _SMALL_FILES:
            return
        table, properties = mirror.table, lake.unmoved(mirror.facts)
        try:
            with lake.translated(mirror.path):
                if cluster:
                    table.optimize.z_order(list(cluster), commit_properties=properties)
                else:
                    table.optimize.compact(commit_properties=properties)
        except lake.ConflictError:
            table.update_incremental()

    def bound(self, mirror: Mirror) -> None:
        """Join a mirror's small files if there are many more than after the last time.

        For appliers that add a file for each batch: it may be hours until `optimize`.
        """
        if not self._seconds:
            return
        if _small_files(mirror) >= self._joined.get(mirror.path, 0) + MORE_SMALL_FILES:
            self.maintain(mirror, (), joins=True, deletes=False)
            self._joined[mirror.path] = _small_files(mirror)

    def vacuum(self, mirror: Mirror) -> None:
        """Delete files that no version within the retention needs."""
        if not self._hours:
            return
        table = mirror.table
        with lake.translated(mirror.path):
            table.vacuum(
                retention_hours=math.ceil(self._hours) + _MORE_HOURS,
                dry_run=False,
                enforce_retention_duration=False,
            )
            table.cleanup_metadata()
        self._sweep(table)

    def _sweep(self, table: DeltaTable) -> None:
        """Delete deletion vectors that no such version needs; delta-rs does not."""
        oldest = datetime.now(UTC) - timedelta(hours=self._hours + _MORE_HOURS)
        files = log.files(table)
        old = {
            found[1]: each.path
            for each in files.get_file_info(FileSelector(""))
            if (found := _VECTOR.fullmatch(each.base_name)) and each.mtime < oldest
        }
        if not old:
            return
        then = DeltaTable(table.table_uri, storage_options=dict(self._storage))
        try:
            then.load_as_version(oldest)
        except DeltaError:
            return  # all of its versions are within the retention
        # Vectors from between the two versions are younger than `oldest`, so not in `old`.
        needed = {
            str(UUID(bytes=actions.z85_decoded(vector["pathOrInlineDv"][-20:])))
            for each in (then, table)
            for vector in log.vectors(each).values()
            if vector["storageType"] == "u"
        }
        for name in old.keys() - needed:
            files.delete_file(old[name])


def _small_files(mirror: Mirror) -> int:
    sizes = pa.table(mirror.table.get_add_actions())["size_bytes"].to_pylist()
    return sum(size < _SMALL_BYTES for size in sizes)
