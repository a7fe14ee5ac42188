"""Apply a batch to a small mirror: write its rows again, as one file.

For up to a megabyte this is less work than to plan a merge, which reads the file again, and less
than a deletion vector, which adds a file. The rows of recent mirrors stay in memory between cuts,
so that a commit reads nothing: one Parquet file, one file of actions. A mirror is always one file,
readable by any reader, and rows that another writer has changed are read again.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta import keys, lake, log
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.actions import Files, removal
from lockstep.sinks.delta.layout import SEQ
from lockstep.sinks.delta.parts import small_file
from lockstep.sinks.delta.rows import only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.sinks.delta.actions import TaggedVersion
    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.table import Mirror
    from lockstep.sinks.delta.work import Work

# Up to this many bytes of Parquet a rewrite takes less than ten milliseconds of CPU: a merge by
# delta-rs takes 20 at least, and 60 here.
MOST_BYTES: Final = 1 << 20
# How many bytes of rows stay in memory, of all mirrors; above, those least recently written leave.
KEPT_BYTES: Final = 128 << 20


class Contents(NamedTuple):
    """A mirror at a version: its rows, and its files as their add actions name them."""

    table_id: str
    version: TaggedVersion
    rows: pa.Table
    files: Sequence[Mapping[str, Any]]


class Rewrites:
    """The applier; it remembers the rows of the mirrors that it has written lately."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage
        self._by_table: OrderedDict[str, Contents] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()  # tables are written concurrently, each by one thread

    def apply(self, mirror: Mirror, work: Work, commit: CommitInfo) -> None:
        """Apply the work in one commit, which the mirror's table does not load."""
        with lake.translated(mirror.path):
            stored = self._contents(mirror)
            files = Files(mirror.path, self._storage)
            rows = _applied(stored.rows, work)
            added = [small_file(files, rows)] if rows.num_rows else []
            actions = [*map(removal, stored.files), *added]
            mirror.put(files, actions, "MERGE", commit)
        adds = [each["add"] for each in added]
        self._keep(mirror.path, Contents(stored.table_id, mirror.tagged, rows, adds))

    def knows(self, mirror: Mirror) -> bool:
        """Return whether the rows of the mirror's version are in memory."""
        return self._known(mirror) is not None

    def _contents(self, mirror: Mirror) -> Contents:
        """Return what is stored, from memory if that is of the mirror's version."""
        if (known := self._known(mirror)) is not None:
            return known
        table, version = mirror.table, mirror.tagged
        rows = lake.read(table, lake.arrow_schema(table).names)
        return Contents(mirror.table_id, version, rows, log.listed(table))

    def _known(self, mirror: Mirror) -> Contents | None:
        known = self._by_table.get(mirror.path)
        return known if known and known[:2] == (mirror.table_id, mirror.tagged) else None

    def _keep(self, path: str, contents: Contents) -> None:
        with self._lock:
            before = self._by_table.pop(path, None)
            self._bytes -= before.rows.nbytes if before else 0
            if sum(each["size"] for each in contents.files) > MOST_BYTES:
                return
            self._bytes += contents.rows.nbytes
            self._by_table[path] = contents
            while self._bytes > KEPT_BYTES:
                _, left = self._by_table.popitem(last=False)
                self._bytes -= left.rows.nbytes


def suits(work: Work) -> bool:
    """Return whether a batch can be applied this way, in a plain table: the newest rows by key."""
    return not work.soft and not work.is_special


def _applied(stored: pa.Table, work: Work) -> pa.Table:
    """Return the stored rows with the batch applied."""
    batch = work.batch
    places = keys.places(batch.rows, stored, work.key)
    if batch.unchanged:
        batch = delta_work.merged(batch, stored, places)
    older = pc.less(stored[SEQ].combine_chunks().take(places), batch.rows[SEQ].combine_chunks())
    if older.false_count:
        # Rows of a direct snapshot or of another writer make a change stale: a mirror skips those
        # up to its own seq.
        counts = pc.fill_null(older, fill_value=True)
        batch, places = only(batch, counts), places.filter(counts)
    replaced = places.drop_null()
    if len(replaced):
        at = pa.arange(0, stored.num_rows).cast(pa.int32())
        stored = stored.filter(pc.invert(pc.is_in(at, value_set=replaced)))
    new = batch.rows
    if batch.deleted.true_count:
        new = new.filter(pc.invert(batch.deleted))
    return pa.concat_tables([stored, new]).combine_chunks()
