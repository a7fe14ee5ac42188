"""The position of each row that a change can replace: an index of a mirror's files in memory.

A row's identity is its key; in a history it is the key, of valid versions only; in a table without
a key it is a hash of all values (`sinks.delta.keys.hashes`). Each file's identities are sorted,
with the row of each: finding a batch is a binary search for each of its keys, whatever the size of
the table. Files never change, so a file's identities are read once, and those of files that we
write are never read: they are known at the write. An identity costs its own bytes and four for its
row; a key eight more, for the row's seq.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import lake, log
from lockstep.sinks.delta.actions import TaggedVersion, bitmap
from lockstep.sinks.delta.layout import CURRENT, EXACT, SEQ
from lockstep.sinks.delta.stats import without_values

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.delta.actions import Files

_UNKNOWN: Final = TaggedVersion(-1, None)
# Above one row in so many, a file's deleted rows are united column by column instead of row by row.
_FEW: Final = 64


class Identity(NamedTuple):
    """What identifies the rows that changes replace."""

    key: tuple[str, ...]  # empty: all values of the row
    is_history: bool
    dropped: frozenset[str] = frozenset()  # columns that do not count among all values

    def columns(self, schema: pa.Schema, *, as_text: bool) -> list[str]:
        """Return the columns that show the identities of stored rows, and which rows have one."""
        if not self.key:
            return list(schema.names)
        odd = as_text or delta_keys.always_text(schema, self.key)
        more = [CURRENT] if self.is_history else [SEQ]
        return [*dict.fromkeys([*self.key, *more, *([EXACT] if odd else [])])]

    def of(self, rows: pa.Table, *, as_text: bool) -> pa.Array:
        """Return the identities of rows."""
        if not self.key:
            return delta_keys.hashes(rows, self.dropped)
        return delta_keys.identities_of(rows, self.key, as_text=as_text)


class Footer(NamedTuple):
    """What a file's end says about its row groups."""

    metadata: pq.FileMetaData
    ends: list[int]  # of each group, in rows
    columns: frozenset[str]  # that have values


@dataclass(slots=True)
class DataFile:
    """One file of the table."""

    path: str
    bytes: int
    rows: int  # how many it holds, deleted ones included
    keys: pa.Array  # the identities, sorted
    places: pa.Int32Array  # the row of each
    seqs: pa.Array | None  # of all rows; None if none is asked for
    deleted: pa.BooleanArray
    dead: int  # how many rows are deleted
    stats: str  # JSON, as its add action has them
    vector: Mapping[str, object] | None = None  # the deletion vector that the log names
    footer: Footer | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes of memory its identities take."""
        seqs = 0 if self.seqs is None else self.seqs.nbytes
        return int(self.keys.nbytes + self.places.nbytes + seqs)

    def mark(self, deleted: pa.BooleanArray, vector: Mapping[str, object] | None) -> None:
        """Set the deleted rows and their vector."""
        self.deleted, self.vector, self.dead = deleted, vector, deleted.true_count


@dataclass(slots=True)
class RowsOfFile:
    """Rows of one file that a batch replaces."""

    file: DataFile
    rows: pa.Int32Array
    wanted: pa.Int32Array  # the identity for which each was found, as its index

    def only(self, some: pa.BooleanArray) -> RowsOfFile:
        """Return some of the rows."""
        return RowsOfFile(self.file, self.rows.filter(some), self.wanted.filter(some))


class Positions:
    """The rows of one table."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.files: dict[str, DataFile] = {}
        self.version = _UNKNOWN
        # Whether keys are compared as text: a key may be NULL, or does not fit its column.
        self._as_text = False

    def are_at(self, version: TaggedVersion, *, as_text: bool) -> bool:
        """Return whether they are those of a version."""
        return self.version == version and (self._as_text or not as_text)

    def follow(
        self, table: DeltaTable, version: TaggedVersion, files: Files, *, as_text: bool
    ) -> None:
        """Load the table's files as of its version: those that are new since the last one.

        All of them if `files` has another log than that of the last one, as after a restore.
        """
        # After an error all files are listed.
        before, self.version = self.version, _UNKNOWN
        if as_text and not self._as_text:
            self._as_text, before = True, _UNKNOWN
            self.files.clear()
        since = log.since(table, before.number) if files.has(before) else None
        if since is None:
            self._load(table, log.added(table))
        else:
            added, removed = since
            kept = {path: file for path, file in self.files.items() if path not in removed}
            if any(add.get("deletionVector") for add in added.values()):
                # Somebody else has deleted rows: rare, so all vectors are read.
                self._load(table, log.added(table))
            else:
                self.files = kept | {path: self._read(table, add) for path, add in added.items()}
        self.version = version

    def _load(self, table: DeltaTable, added: log.Added) -> None:
        known = self.files
        self.files = {
            path: known.get(path) or self._read(table, add) for path, add in added.items()
        }
        for path, add in added.items():
            file = self.files[path]
            file.mark(_none(file.rows), None)
            file.stats = add.get("stats") or ""
        if any(add.get("deletionVector") for add in added.values()):
            for path, deleted in deleted_rows(table, self.files):
                file = self.files[path]
                file.mark(_over(deleted, file.deleted), added[path].get("deletionVector"))

    def identities(self, rows: pa.Table) -> pa.Array:
        """Return the identities of rows, comparable with those of the files."""
        return self._identity.of(rows, as_text=self._as_text)

    def find(self, wanted: pa.Array) -> Iterator[RowsOfFile]:
        """Yield the rows that have one of the identities, which are distinct."""
        for file in self.files.values():
            first = pc.search_sorted(file.keys, wanted, side="left")
            end = pc.search_sorted(file.keys, wanted, side="right")
            hit = pc.indices_nonzero(pc.less(first, end)).cast(pa.int32())
            if not len(hit):
                continue
            first, end = first.take(hit), end.take(hit)
            if pc.any(pc.greater(pc.subtract(end, first), 1)).as_py():
                first, hit = _every(first, end, hit)
            rows = file.places.take(first)
            there = RowsOfFile(file, rows, hit).only(pc.invert(file.deleted.take(rows)))
            if len(there.rows):
                yield there

    def rows(self, table: DeltaTable, found: RowsOfFile, schema: pa.Schema) -> pa.Table:
        """Return columns of the found rows; of the file only the row groups with one are read."""
        file = found.file
        with log.opened(table, file.path) as opened:
            reader = _reader(opened, file.footer)
            if file.footer is None:
                file.footer = _footer(reader, file)
            ends, rows = file.footer.ends, found.rows.to_pylist()
            of = [bisect_right(ends, row) for row in rows]
            read = sorted(set(of))
            starts, first = {}, 0
            for group in read:
                begin = ends[group - 1] if group else 0
                starts[group] = first - begin
                first += ends[group] - begin
            there = [name for name in schema.names if name in file.footer.columns]
            part = reader.read_row_groups(read, columns=there, use_threads=False)
        # First the types: Arrow takes no rows of some that delta-rs writes.
        places = [row + starts[group] for row, group in zip(rows, of, strict=True)]
        return lake.under(part, schema).take(pa.array(places, pa.int64()))

    def read(self, table: DeltaTable, path: str, columns: Sequence[str] | None) -> pa.Table:
        """Return columns of a file, in the table's types; without those that it lacks."""
        with log.opened(table, path) as opened:
            reader = _reader(opened)
            names = set(reader.schema_arrow.names)
            wanted = None if columns is None else [name for name in columns if name in names]
            rows = reader.read(wanted)
        return rows.cast(lake.arrow_schema(table, rows.column_names))

    def indexed(self, path: str, size: int, rows: pa.Table, stats: str) -> DataFile:
        """Return the description of a file with these rows."""
        keys, history, many = self._identity.key, self._identity.is_history, rows.num_rows
        mine = pc.indices_nonzero(rows[CURRENT].combine_chunks()) if history else None
        identities = self.identities(rows if mine is None else rows.take(mine))
        order = pc.sort_indices(identities)
        places = order if mine is None else mine.take(order)
        return DataFile(
            path=path,
            bytes=size,
            rows=many,
            keys=identities.take(order),
            places=places.cast(pa.int32()),
            seqs=rows[SEQ].combine_chunks() if keys and not history else None,
            deleted=_none(many),
            dead=0,
            stats=stats,
        )

    def _read(self, table: DeltaTable, add: Mapping[str, object]) -> DataFile:
        path, size = str(add["path"]), int(str(add["size"]))
        schema = lake.arrow_schema(table)
        names = self._identity.columns(schema, as_text=self._as_text)
        rows = self.read(table, path, names)
        rows = lake.under(rows, lake.arrow_schema(table, names))
        return self.indexed(path, size, rows, str(add.get("stats") or ""))


def with_deleted(deleted: pa.BooleanArray, rows: pa.Array) -> pa.BooleanArray:
    """Return a file's deleted rows with some more."""
    if len(rows) * _FEW > len(deleted):
        all_rows = pa.arange(0, len(deleted)).cast(rows.type)
        return pc.or_(deleted, pc.is_in(all_rows, value_set=rows))
    bits = bytearray(bitmap(deleted))
    for row in rows.to_pylist():
        bits[row >> 3] |= 1 << (row & 7)
    return pa.BooleanArray.from_buffers(pa.bool_(), len(deleted), [None, pa.py_buffer(bits)])


def _every(first: pa.Array, end: pa.Array, hit: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return all places from the first to the end of each hit, and the hit of each."""
    places, hits = list[int](), list[int]()
    for low, high, each in zip(*(part.to_pylist() for part in (first, end, hit)), strict=True):
        places += range(low, high)
        hits += [each] * (high - low)
    return pa.array(places, pa.int64()), pa.array(hits, pa.int32())


def _reader(opened: pa.NativeFile, footer: Footer | None = None) -> pq.ParquetFile:
    return pq.ParquetFile(
        opened,
        metadata=footer and footer.metadata,
        # Files rewritten by a Spark with other settings have INT96 timestamps: without a time zone,
        # and as nanoseconds they would end in 2262.
        coerce_int96_timestamp_unit="us",
    )


def _footer(reader: pq.ParquetFile, file: DataFile) -> Footer:
    groups = range(reader.num_row_groups)
    sizes = (reader.metadata.row_group(each).num_rows for each in groups)
    empty = without_values(file.stats, file.rows)
    columns = frozenset(reader.schema_arrow.names) - empty
    return Footer(reader.metadata, list(accumulate(sizes)), columns)


def _none(rows: int) -> pa.BooleanArray:
    return pa.repeat(pa.scalar(value=False), rows)


def _over(deleted: pa.BooleanArray, none: pa.BooleanArray) -> pa.BooleanArray:
    """Return a file's deleted rows; its vector may end before the file's last row."""
    return pa.concat_arrays([deleted, none.slice(len(deleted))])


def deleted_rows(
    table: DeltaTable, paths: Collection[str]
) -> Iterator[tuple[str, pa.BooleanArray]]:
    """Yield each file that has deleted rows, and which they are; later rows are not deleted."""
    for part in table.deletion_vectors():
        rows = pa.record_batch(part)
        for uri, kept in zip(rows[0].to_pylist(), rows[1], strict=True):
            name = unquote(uri)
            path = next(path for path in paths if name.endswith(unquote(path)))
            yield path, pc.invert(kept.values)
