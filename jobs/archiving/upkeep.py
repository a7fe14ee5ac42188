"""Join the archive's small files, and delete files that no commit names any more.

Joined files have the same rows, sorted together: a commit removes the small files and adds the
joined ones, at the archive's own position. Readers, and the Merkle trees, see no difference.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cdc import failpoints
from lockstep.jobs.archiving import layout
from lockstep.jobs.archiving.writing import removed, write
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config.archive import Archive as Settings
    from lockstep.jobs.archiving.layout import ArchivePosition
    from lockstep.jobs.archiving.table import ArchiveTable

# Files above this size stay as they are.
SMALL_BYTES: Final = 32 << 20
# The size of small files, as Parquet, that become one file.
_JOINED_BYTES: Final = 64 << 20
FEWEST: Final = 8  # small files that are worth joining
# So that a reader that has just opened an old version can read it.
MORE_HOURS: Final = 1


class ArchiveUpkeep:
    """Does what is due, between two cuts."""

    def __init__(self, archive: ArchiveTable, settings: Settings) -> None:
        self._archive, self._settings = archive, settings
        self._done_at = time.monotonic()

    def tick(self, position: ArchivePosition) -> bool:
        """Join and delete files if the time has come; return whether it has."""
        minutes = self._settings.optimize_minutes
        if not minutes or time.monotonic() - self._done_at < 60 * minutes:
            return False
        self.join(position)
        self.vacuum()
        self._done_at = time.monotonic()
        return True

    def join(self, position: ArchivePosition) -> int:
        """Join small files; return how many were."""
        if position.newest is None:
            return 0
        small = [add for add in self._archive.added().values() if add["size"] < SMALL_BYTES]
        many = 0
        for group in _groups(small):
            rows = pa.concat_tables(self._rows(add) for add in group)
            joined = write(self._archive.files, rows, is_new=False)
            failpoints.reach("archive_joined")
            self._archive.commit([*map(removed, group), joined], position, "OPTIMIZE")
            many += len(group)
        return many

    def _rows(self, add: dict[str, Any]) -> pa.Table:
        data = pa.BufferReader(self._archive.read_named(add["path"]))
        return pq.read_table(data, page_checksum_verification=True).cast(layout.SCHEMA)

    def vacuum(self) -> int:
        """Delete files that no version within the retention names, and old commits; count them."""
        if not self._settings.vacuum_hours:
            return 0
        archive = self._archive
        oldest = datetime.now(UTC) - timedelta(hours=self._settings.vacuum_hours + MORE_HOURS)
        needed = archive.added().keys() | archive.removed_since(oldest)
        deleted = archive.delete_unnamed(needed, oldest)
        with lake.translated(archive.path):
            archive.table.cleanup_metadata()
        return deleted


def _groups(small: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield files that become one; those written one after another, so of adjacent cuts."""
    group: list[dict[str, Any]] = []
    size = 0
    for add in sorted(small, key=lambda add: add["modificationTime"]):
        group.append(add)
        size += add["size"]
        if size >= _JOINED_BYTES:
            yield group
            group, size = [], 0
    if len(group) >= FEWEST:
        yield group
