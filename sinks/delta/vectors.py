"""Apply a batch to a mirror by deletion vectors: for large tables that change everywhere.

The batch's rows go into a new file, and the rows that they replace are marked as deleted in their
files: the cost of a batch is what it changes, and one pass over the keys in memory
(`sinks.delta.positions`). It rewrites no file. After a batch, files with many deleted rows and
small files are rewritten: only as much as the batch has changed, so that no batch waits long.

The result is the same as with a merge; readers must support deletion vectors, as Spark, delta-rs,
DuckDB and Trino do.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import lake
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.layout import EXACT, SEQ
from lockstep.sinks.delta.positions import DataFile, Positions, RowsOfFile
from lockstep.sinks.delta.rows import Batch, only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.lake import Commit
    from lockstep.sinks.delta.work import Work

_MAPPED: Final = "delta.columnMapping.mode"
# A file with more than this fraction of its rows deleted is rewritten.
_DEAD_MOST: Final = 0.5
# Enough files of one size are joined into one of the next; sizes in bytes.
_SIZES: Final = (1 << 20, 16 << 20)
_FILES_OF_A_SIZE: Final = 12
# How many rows are rewritten after a batch for each of its own, but at least one file.
_REWRITTEN_PER_ROW: Final = 2
_CHECKPOINT_EVERY: Final = 100
# How many bytes of keys stay in memory, of all tables of less than so many bytes: there may be
# thousands, and their keys are read again in hundredths of a second.
_SMALL_TABLE_BYTES: Final = 16 << 20
_SMALL_KEYS_BYTES: Final = 256 << 20
_INTEGERS: Final = (pa.int16(), pa.int32(), pa.int64(), pa.date32())


class Vectors:
    """The applier; it remembers the keys of the tables that it has seen."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage
        # By URI: the table's id, the key of its rows, and their positions.
        self._by_table: dict[str, tuple[tuple[str, tuple[str, ...]], Positions]] = {}
        # How many bytes the keys of each small table have, least recently written first.
        self._small: OrderedDict[str, int] = OrderedDict()
        self._lock = Lock()

    def knows(self, table: DeltaTable) -> bool:
        """Return whether the table's keys are in memory: then its files are joined here."""
        return table.table_uri in self._by_table

    def apply(self, table: DeltaTable, work: Work, commit: Commit) -> None:
        """Apply the work in one commit; then rewrite some files in another."""
        with lake.translated(table.table_uri):
            began = table.version()
            positions = self._positions(table, work)
            files = Files(table.table_uri, self._storage)
            enabling = delta_actions.enabling(table)
            if enabling:
                # A separate commit: readers without support for vectors fail from here on, not
                # halfway.
                delta_actions.commit(
                    files, table, enabling, "ADD FEATURE", commit._replace(upto=None)
                )
                positions.version = table.version()
            _Change(table, work, positions, files).commit(commit)
            _Tidying(table, positions, files, work.batch.rows.num_rows).commit(commit)
            # A batch has two or three commits, which may skip the round number.
            if table.version() // _CHECKPOINT_EVERY > began // _CHECKPOINT_EVERY:
                table.create_checkpoint()
            self._limit(table.table_uri, positions)

    def _positions(self, table: DeltaTable, work: Work) -> Positions:
        uri, known = table.table_uri, (str(table.metadata().id), work.key)
        if uri not in self._by_table or self._by_table[uri][0] != known:
            self._by_table[uri] = known, Positions(work.key)
        positions = self._by_table[uri][1]
        as_text = delta_keys.needs_text(work.batch.rows, work.key)
        positions.follow(table, as_text=as_text)
        return positions

    def _limit(self, uri: str, positions: Positions) -> None:
        """Forget small tables that were not written for long, if all have too many keys."""
        files = positions.files.values()
        with self._lock:
            self._small.pop(uri, None)
            if sum(file.bytes for file in files) < _SMALL_TABLE_BYTES:
                self._small[uri] = sum(file.keys.nbytes + file.seqs.nbytes for file in files)
            while sum(self._small.values()) > _SMALL_KEYS_BYTES:
                least, _ = self._small.popitem(last=False)
                self._by_table.pop(least, None)


def suits(table: DeltaTable, work: Work) -> bool:
    """Return whether a batch can be applied this way: the newest rows, by key, in plain files."""
    about = table.metadata()
    return (
        not work.soft
        and not work.is_special
        and not about.partition_columns
        and about.configuration.get(_MAPPED, "none") == "none"
    )


class _Change:
    """One batch."""

    def __init__(self, table: DeltaTable, work: Work, positions: Positions, files: Files) -> None:
        self._table, self._positions, self._files = table, positions, files
        batch = work.batch
        seqs = batch.rows[SEQ].combine_chunks()
        self._found = list(positions.find(positions.identities(batch.rows)))
        stale = self._stale(seqs)
        if batch.unchanged:
            batch = self._filled(batch)
        new = only(Batch(batch.rows, batch.deleted, {}), pc.invert(stale))
        self._rows = new.rows.filter(pc.invert(new.deleted))

    def _stale(self, seqs: pa.Array) -> pa.BooleanArray:
        """Return which rows of the batch are stale; the rows that they would replace stay.

        Only rows from a direct snapshot or another writer make one stale: a mirror skips changes up
        to its own seq.
        """
        stale = pa.repeat(pa.scalar(value=False), len(seqs))
        for place, found in enumerate(self._found):
            newer = pc.less(found.file.seqs.filter(found.hits), seqs.take(found.wanted))
            if newer.false_count:
                old = found.wanted.filter(pc.invert(newer))
                rows = pa.arange(0, len(seqs)).cast(pa.int32())
                stale = pc.or_(stale, pc.is_in(rows, value_set=old))
                self._found[place] = found.only(newer)
        return stale

    def _filled(self, batch: Batch) -> Batch:
        """Return the batch with values that were not sent filled from the stored rows."""
        names = [*batch.unchanged, EXACT]
        schema = pa.schema([batch.rows.schema.field(name) for name in names])
        parts, wanted = [schema.empty_table()], [pa.array([], pa.int32())]
        keeps = delta_work.any_of(batch.unchanged.values())
        for found in self._found:
            asked = keeps.take(found.wanted)
            if asked.true_count:
                parts.append(self._read(found.only(asked), names, schema))
                wanted.append(found.wanted.filter(asked))
        stored = pa.concat_tables(parts)
        rows = pa.arange(0, batch.rows.num_rows).cast(pa.int32())
        return delta_work.merged(
            batch, stored, pc.index_in(rows, value_set=pa.concat_arrays(wanted))
        )

    def _read(self, found: RowsOfFile, names: Sequence[str], schema: pa.Schema) -> pa.Table:
        rows = self._positions.read(self._table, found.file.path, names)
        return lake.under(rows.filter(found.hits), schema)

    def commit(self, commit: Commit) -> None:
        actions: list[Action] = []
        hit = [found for found in self._found if len(found.wanted)]
        deleted = [pc.or_(found.file.deleted, found.hits) for found in hit]
        touched = [found.file for found in hit]
        vectors = delta_actions.put_vectors(self._files, deleted) if deleted else []
        for file, vector in zip(touched, vectors, strict=True):
            actions += [_removed(file), _added(file, vector.action)]
        new = None
        if self._rows.num_rows:
            new = _written(self._files, self._rows, self._positions)
            actions.append(_added(new))
        delta_actions.commit(self._files, self._table, actions, "MERGE", commit)
        for file, rows, vector in zip(touched, deleted, vectors, strict=True):
            file.deleted, file.vector = rows, vector.action
        if new is not None:
            self._positions.files[new.path] = new
        self._positions.version = self._table.version()


class _Tidying:
    """Files that are worth rewriting, a few at a time."""

    def __init__(self, table: DeltaTable, positions: Positions, files: Files, rows: int) -> None:
        self._table, self._positions, self._files = table, positions, files
        self._groups: list[list[DataFile]] = []
        every = sorted(positions.files.values(), key=lambda file: file.dead / max(file.rows, 1))
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
            if len(small) >= _FILES_OF_A_SIZE:
                self._groups.append(small)
            least = size

    def commit(self, commit: Commit) -> None:
        if not self._groups:
            return
        actions: list[Action] = []
        made = []
        for group in self._groups:
            rows = pa.concat_tables([self._alive(file) for file in group])
            actions += [
                {"remove": _removed(file)["remove"] | {"dataChange": False}} for file in group
            ]
            if rows.num_rows:
                new = _written(self._files, rows, self._positions)
                made.append(new)
                actions.append(_added(new, changes=False))
        try:
            delta_actions.commit(self._files, self._table, actions, "OPTIMIZE", commit)
        except lake.ConflictError:
            return  # retried after a later batch
        for group in self._groups:
            for file in group:
                del self._positions.files[file.path]
        self._positions.files.update({file.path: file for file in made})
        self._positions.version = self._table.version()

    def _alive(self, file: DataFile) -> pa.Table:
        rows = self._positions.read(self._table, file.path, None)
        return lake.under(rows.filter(pc.invert(file.deleted)), lake.arrow_schema(self._table))


def _written(files: Files, rows: pa.Table, positions: Positions) -> DataFile:
    """Write rows to a file; return its description."""
    rows = rows.combine_chunks()
    path = f"part-00000-{uuid4()}-c000.snappy.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="snappy", coerce_timestamps="us")
    data = sink.getvalue()
    files.put(path, data)
    return DataFile(
        path=path,
        bytes=data.size,
        keys=positions.identities(rows),
        seqs=rows[SEQ].combine_chunks(),
        deleted=pa.repeat(pa.scalar(value=False), rows.num_rows),
        stats=_stats(rows),
    )


def _stats(rows: pa.Table) -> dict[str, Any]:
    """Return the statistics by which readers skip a file: bounds of integers and dates, NULLs."""
    bounds: dict[str, Any] = {"minValues": {}, "maxValues": {}}
    for field in rows.schema:
        if field.type in _INTEGERS and rows[field.name].null_count < rows.num_rows:
            found = pc.min_max(rows[field.name])
            for name, which in (("minValues", "min"), ("maxValues", "max")):
                value = found[which].as_py()
                bounds[name][field.name] = value if isinstance(value, int) else str(value)
    nulls = {field.name: rows[field.name].null_count for field in rows.schema}
    return {"numRecords": rows.num_rows, **bounds, "nullCount": nulls}


def _added(
    file: DataFile, vector: Mapping[str, object] | None = None, *, changes: bool = True
) -> Action:
    stats = file.stats or {"numRecords": file.rows}
    action: dict[str, Any] = {
        "path": file.path,
        "partitionValues": {},
        "size": file.bytes,
        "modificationTime": int(time.time() * 1_000),
        "dataChange": changes,
        "stats": json.dumps(stats | {"tightBounds": vector is None}),
    }
    if vector is not None:
        action["deletionVector"] = vector
    return {"add": action}


def _removed(file: DataFile, *, changes: bool = True) -> Action:
    action: dict[str, Any] = {
        "path": file.path,
        "deletionTimestamp": int(time.time() * 1_000),
        "dataChange": changes,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": file.bytes,
    }
    if file.vector is not None:
        action["deletionVector"] = file.vector
    return {"remove": action}
