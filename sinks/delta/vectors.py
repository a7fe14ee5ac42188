"""Apply a batch to a mirror by deletion vectors: for large tables that change everywhere.

The batch's rows go into a new file, and the rows that they replace are marked as deleted in their
files, at positions that are found in memory (`sinks.delta.positions`): the cost of a batch is what
it changes. It rewrites no file. So are histories written (`sinks.delta.history`), and tables
without a key (`sinks.delta.keyless`). After a batch, files with many deleted rows and small files
are rewritten: only as much as the batch has changed, so that no batch waits long.

The result is the same as with a merge; readers must support deletion vectors, as Spark, delta-rs,
DuckDB and Trino do.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import features, history, keyless, lake, parquet_form
from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.actions import Files, added_file, removed_file
from lockstep.sinks.delta.layout import EXACT, SEQ
from lockstep.sinks.delta.positions import DataFile, Identity, Positions, with_deleted
from lockstep.sinks.delta.rows import ChangeBatch, only
from lockstep.sinks.delta.stats import Stats
from lockstep.sinks.delta.stats import with_deleted as with_deleted_stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.table import Mirror
    from lockstep.sinks.delta.work import Work

# A file with more than this fraction of its rows deleted is rewritten.
_DEAD_MOST: Final = 0.5
# Enough files of one size are joined into one of the next; sizes in bytes.
_SIZES: Final = (1 << 20, 16 << 20)
FILES_OF_A_SIZE: Final = 12
# How many rows are rewritten after a batch for each of its own, but at least one file.
_REWRITTEN_PER_ROW: Final = 2
# How many bytes of keys stay in memory, of all tables of less than so many bytes: there may be
# thousands, and their keys are read again in hundredths of a second.
_SMALL_TABLE_BYTES: Final = 16 << 20
SMALL_KEYS_BYTES: Final = 256 << 20


class Vectors:
    """The applier; it remembers the positions of the rows of tables that it has seen."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage
        # By URI: the table's id, what identifies its rows, and their positions.
        self._by_table: dict[str, tuple[tuple[str, Identity], Positions]] = {}
        # How many bytes the keys of each small table have, least recently written first.
        self._small: OrderedDict[str, int] = OrderedDict()
        self._lock = Lock()

    def knows(self, table: DeltaTable) -> bool:
        """Return whether the table's positions are in memory: then its files are joined here."""
        return table.table_uri in self._by_table

    def suits(self, table: DeltaTable, work: Work) -> bool:
        """Return whether a batch can be applied this way: to plain files, and without a truncate.

        Rows without a key, if all of them are new, are found later, if ever.
        """
        is_blind = not work.key and work.before is None and not self.knows(table)
        return (
            not (work.soft and work.key and not work.history)
            and work.truncated is None
            and not work.truncates
            and not is_blind
            and delta_actions.is_plain(table)
        )

    def apply(self, mirror: Mirror, work: Work, commit: CommitInfo) -> None:
        """Apply the work in one commit; then rewrite some files in another.

        The mirror's table does not load them.
        """
        with lake.translated(mirror.path):
            enabling = delta_actions.enabling(mirror.loaded)
            files = Files(mirror.path, self._storage)
            if enabling:
                # A separate commit: readers without support for vectors fail from here on, not
                # halfway.
                about = commit._replace(upto=None)
                delta_actions.commit(files, mirror.table, enabling, "ADD FEATURE", about)
            positions = self._positions(mirror, files, work)
            writing = _Writing(mirror, positions, files, is_history=work.history)
            writing.apply(work, commit)
            _Tidying(writing, work.batch.rows.num_rows).commit(commit)
            self._limit(mirror.loaded.table_uri, positions)

    def _positions(self, mirror: Mirror, files: Files, work: Work) -> Positions:
        uri, identity = mirror.loaded.table_uri, Identity(work.key, work.history, work.dropped)
        known = mirror.table_id, identity
        # Another table's thread may forget this one meanwhile.
        before, positions = self._by_table.get(uri, (None, Positions(identity)))
        if before != known:
            positions = Positions(identity)
        self._by_table[uri] = known, positions
        as_text = bool(work.key) and delta_keys.needs_text(work.batch.rows, work.key)
        if not positions.are_at(mirror.tagged, as_text=as_text):
            table = mirror.table
            positions.follow(table, mirror.tagged, files, as_text=as_text)
        return positions

    def _limit(self, uri: str, positions: Positions) -> None:
        """Forget small tables that were not written for long, if all have too many keys."""
        files = positions.files.values()
        with self._lock:
            self._small.pop(uri, None)
            if sum(file.bytes for file in files) < _SMALL_TABLE_BYTES:
                self._small[uri] = sum(file.nbytes for file in files)
            while sum(self._small.values()) > SMALL_KEYS_BYTES:
                least, _ = self._small.popitem(last=False)
                self._by_table.pop(least, None)


class _Writing:
    """Commits to one table, and what they change in its positions."""

    def __init__(
        self, mirror: Mirror, positions: Positions, files: Files, *, is_history: bool
    ) -> None:
        self._mirror, self.positions, self._files = mirror, positions, files
        self.table = mirror.loaded
        self._is_history = is_history

    def apply(self, work: Work, commit: CommitInfo) -> None:
        """Commit a batch: deletion vectors for the rows that it replaces, a file of its rows."""
        if work.history:
            found, rows = history.replaced(self.table, work, self.positions)
        elif not work.key:
            found, rows = keyless.replaced(work, self.positions)
        else:
            change = _Change(self.table, work, self.positions)
            found, rows = change.found, change.rows
        actions: list[Action] = []
        deleted = [with_deleted(each.file.deleted, each.rows) for each in found]
        vectors = delta_actions.put_vectors(self._files, deleted) if deleted else []
        marked = list(zip([each.file for each in found], deleted, vectors, strict=True))
        for file, _, vector in marked:
            actions += [_removed(file), _added(file, vector.action)]
        new = [self.written(rows)] if rows.num_rows else []
        actions += map(_added, new)
        self.commit(actions, "MERGE", commit)
        for file, rows_of_it, vector in marked:
            file.mark(rows_of_it, vector.action)
        self.positions.files.update({file.path: file for file in new})

    def commit(self, actions: Sequence[Action], operation: str, commit: CommitInfo) -> None:
        """Commit actions; then the positions are those of their version."""
        features.expect_ours(self.table)
        self._mirror.put(self._files, actions, operation, commit)
        self.positions.version = self._mirror.tagged

    def written(self, rows: pa.Table) -> DataFile:
        """Write rows to a file; return its description."""
        rows = rows.combine_chunks()
        path = f"part-00000-{uuid4()}-c000.parquet"
        form = parquet_form.of_history(rows.schema) if self._is_history else parquet_form.PLAIN
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink, coerce_timestamps="us", **form)
        data = sink.getvalue()
        self._files.put(path, data)
        stats = Stats(rows.schema)
        stats.add(rows)
        return self.positions.indexed(path, data.size, rows, stats.json())


class _Change:
    """One batch of the newest rows by key."""

    def __init__(self, table: DeltaTable, work: Work, positions: Positions) -> None:
        self._table, self._positions = table, positions
        batch = work.batch
        self.found = list(positions.find(positions.identities(batch.rows)))
        stale = self._stale(batch.rows[SEQ].combine_chunks())
        if batch.unchanged:
            batch = self._filled(batch)
        new = only(ChangeBatch(batch.rows, batch.deleted, {}), pc.invert(stale))
        self.rows = new.rows.filter(pc.invert(new.deleted))

    def _stale(self, seqs: pa.Array) -> pa.BooleanArray:
        """Return which rows of the batch are stale; the rows that they would replace stay.

        Only rows from a direct snapshot or another writer make one stale: a mirror skips changes up
        to its own seq.
        """
        stale = pa.repeat(pa.scalar(value=False), len(seqs))
        for place, found in enumerate(self.found):
            assert found.file.seqs is not None, "they are read for rows by key"
            newer = pc.less(found.file.seqs.take(found.rows), seqs.take(found.wanted))
            if newer.false_count:
                old = found.wanted.filter(pc.invert(newer))
                rows = pa.arange(0, len(seqs)).cast(pa.int32())
                stale = pc.or_(stale, pc.is_in(rows, value_set=old))
                self.found[place] = found.only(newer)
        self.found = [found for found in self.found if len(found.rows)]
        return stale

    def _filled(self, batch: ChangeBatch) -> ChangeBatch:
        """Return the batch with values that were not sent filled from the stored rows."""
        names = [*batch.unchanged, EXACT]
        schema = pa.schema([batch.rows.schema.field(name) for name in names])
        parts, wanted = [schema.empty_table()], [pa.array([], pa.int32())]
        keeps = delta_work.any_of(batch.unchanged.values())
        for found in self.found:
            asked = keeps.take(found.wanted)
            if asked.true_count:
                some = found.only(asked)
                parts.append(self._positions.rows(self._table, some, schema))
                wanted.append(some.wanted)
        stored = pa.concat_tables(parts)
        rows = pa.arange(0, batch.rows.num_rows).cast(pa.int32())
        return delta_work.merged(
            batch, stored, pc.index_in(rows, value_set=pa.concat_arrays(wanted))
        )


class _Tidying:
    """Files that are worth rewriting, a few at a time."""

    def __init__(self, writing: _Writing, rows: int) -> None:
        self._writing = writing
        self._groups: list[list[DataFile]] = []
        files = writing.positions.files.values()
        every = sorted(files, key=lambda file: file.dead / max(file.rows, 1))
        budget = rows * _REWRITTEN_PER_ROW
        while every and every[-1].dead > _DEAD_MOST * every[-1].rows:
            file = every.pop()
            if self._groups and file.rows > budget:
                break
            budget -= file.rows
            self._groups.append([file])
        least = 0
        for size in _SIZES:
            small = [file for file in every if least <= file.bytes < size]
            if len(small) >= FILES_OF_A_SIZE:
                # So many at a time: executors may have written hundreds of them for one cut.
                small.sort(key=lambda file: file.bytes)
                self._groups.append(small[:FILES_OF_A_SIZE])
            least = size

    def commit(self, commit: CommitInfo) -> None:
        if not self._groups:
            return
        writing = self._writing
        actions: list[Action] = []
        made = []
        for group in self._groups:
            rows = pa.concat_tables([self._alive(file) for file in group])
            actions += [_removed(file, changes_rows=False) for file in group]
            if rows.num_rows:
                new = writing.written(rows)
                made.append(new)
                actions.append(_added(new, changes_rows=False))
        try:
            writing.commit(actions, "OPTIMIZE", commit)
        except lake.ConflictError:
            return  # retried after a later batch
        files = writing.positions.files
        for group in self._groups:
            for file in group:
                del files[file.path]
        files.update({file.path: file for file in made})

    def _alive(self, file: DataFile) -> pa.Table:
        table = self._writing.table
        rows = self._writing.positions.read(table, file.path, None)
        return lake.under(rows.filter(pc.invert(file.deleted)), lake.arrow_schema(table))


def _added(
    file: DataFile, vector: Mapping[str, object] | None = None, *, changes_rows: bool = True
) -> Action:
    stats = file.stats if vector is None else with_deleted_stats(file.stats, file.rows)
    return added_file(file.path, file.bytes, stats, vector=vector, changes_rows=changes_rows)


def _removed(file: DataFile, *, changes_rows: bool = True) -> Action:
    return removed_file(file.path, file.bytes, vector=file.vector, changes_rows=changes_rows)
