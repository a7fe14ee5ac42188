"""Rows of a table's files by their numbers, from columns that stay in memory while they are few.

Files never change: a column of a row group that was read once is the same in every later version,
and which rows are deleted is in the log. So a cut of a large table costs what it looks at, not what
the files have. What does not fit is read again each time.

Of tables whose files are what readers see (`can_read`): no mapped columns, no partitions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.sinks.delta import lake, log, roaring
from lockstep.sinks.delta.layout import EXACT
from lockstep.sinks.delta.positions import with_deleted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deltalake import DeltaTable

# In bytes, of all tables of a follower: some 15 million rows of four columns.
MOST_BYTES: Final = 512 << 20


def can_read(table: DeltaTable) -> bool:
    """Return whether the files have what readers see, but for deleted rows."""
    return not table.metadata().partition_columns and not lake.is_mapped(table)


class _Deleted(NamedTuple):
    """The rows of a file that a deletion vector has."""

    vector: Mapping[str, Any]
    numbers: pa.Array  # ascending
    flags: pa.BooleanArray  # of each row


class RowGroup:
    """Some rows of a file, one after another."""

    def __init__(self, files: StoredFiles, file: _File, number: int, first: int) -> None:
        self._files, self._file, self._number = files, file, number
        self.about = file.footer.metadata.row_group(number)
        self.first, self.rows = first, self.about.num_rows

    def bounds(self, name: str) -> tuple[Any, Any] | None:
        """Return values that no value of a column is below and above; None if they are unknown."""
        for at in range(self.about.num_columns):
            chunk = self.about.column(at)
            if chunk.path_in_schema == name:
                stats = chunk.statistics
                return (stats.min, stats.max) if stats is not None and stats.has_min_max else None
        return None

    def read(self, schema: pa.Schema) -> pa.Table:
        """Return all rows' values of columns."""
        return self.take(schema, None)

    def take(self, schema: pa.Schema, numbers: pa.Array | None) -> pa.Table:
        """Return values of the rows with these numbers in the group; None: of all rows."""
        many = self.rows if numbers is None else len(numbers)
        there = [field for field in schema if not self._is_null(field.name)]
        columns = self._columns(there)
        if numbers is not None:
            columns = {name: values.take(numbers) for name, values in columns.items()}
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(many, field.type)
            for field in schema
        ]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _is_null(self, name: str) -> bool:
        """Return whether the group has no value of a column."""
        if name not in self._file.footer.names:
            return True
        if name != EXACT:
            return False
        chunks = (self.about.column(at) for at in range(self.about.num_columns))
        stats = [each.statistics for each in chunks if each.path_in_schema.startswith(f"{EXACT}.")]
        return all(each is not None and each.null_count == self.rows for each in stats)

    def _columns(self, fields: list[pa.Field]) -> dict[str, pa.Array]:
        place = self._file.table, self._file.path, self._number
        found = {field.name: self._files.kept.get((*place, field.name)) for field in fields}
        # A column may have another type now.
        missing = [each for each in fields if getattr(found[each.name], "type", None) != each.type]
        if missing:
            names, footer = [field.name for field in missing], self._file.footer.metadata
            with self._file.open() as data:
                reader = pq.ParquetFile(data, metadata=footer, coerce_int96_timestamp_unit="us")
                part = reader.read_row_group(self._number, columns=names, use_threads=False)
            read = lake.under(part, pa.schema(missing)).combine_chunks()
            for name, values in zip(names, read.itercolumns(), strict=True):
                found[name] = values.chunk(0)
                self._files.keep((*place, name), found[name])
        return found


class _Footer(NamedTuple):
    """What a file's end says."""

    metadata: pq.FileMetaData
    names: frozenset[str]


class _File(NamedTuple):
    """A file of a table."""

    table: str
    path: str
    open: Callable[[], pa.NativeFile]
    footer: _Footer


class StoredFiles:
    """The files of a lake's tables, for one reader."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self.kept = dict[tuple[str, str, int, str], pa.Array]()
        # Of each table the newest version that was asked for, and its files.
        self._versions = dict[str, tuple[int, log.Added]]()
        self._footers = dict[tuple[str, str], _Footer]()
        self._deleted = dict[tuple[str, str], _Deleted]()

    def follow(self, table: DeltaTable) -> log.Added:
        """Return the add action of each file at the table's version; forget other files."""
        name, version = _name(table), table.version()
        before, known = self._versions.get(name, (-1, log.Added()))
        if before == version:
            return known
        since = log.since(table, before) if 0 <= before < version else None
        if since is None:
            found = log.added(table)
        else:
            added, removed = since
            found = {path: add for path, add in known.items() if path not in removed} | added
        self._versions[name] = version, found
        for path in known.keys() - found.keys():
            self._forget(name, path)
        return found

    def groups(self, table: DeltaTable, path: str) -> Iterator[RowGroup]:
        """Yield the row groups of a file; raise FileNotFoundError if it was deleted."""
        file, first = self._file(table, path), 0
        for number in range(file.footer.metadata.num_row_groups):
            group = RowGroup(self, file, number, first)
            if group.rows:
                yield group
            first += group.rows

    def _file(self, table: DeltaTable, path: str) -> _File:
        name, opened = _name(table), partial(log.opened, table, path)
        footer = self._footers.get((name, path))
        if footer is None:
            with opened() as data, pq.ParquetFile(data) as file:
                footer = _Footer(file.metadata, frozenset(file.schema_arrow.names))
            if self._is_current(name, path):
                self._footers[name, path] = footer
        return _File(name, path, opened, footer)

    def numbers(self, table: DeltaTable, path: str, vector: Mapping[str, Any]) -> pa.Array:
        """Return the numbers of the rows in a deletion vector of a file, ascending."""
        known = self._deleted.get((_name(table), path))
        if known is not None and known.vector == vector:
            return known.numbers
        return roaring.deleted_rows(log.files(table), vector)

    def alive(self, table: DeltaTable, path: str, numbers: pa.Array) -> pa.BooleanArray | None:
        """Return which rows with these numbers the newest version has; None: all of them."""
        vector = self.follow(table)[path].get("deletionVector") or {}
        if not vector:
            return None
        key = _name(table), path
        known = self._deleted.get(key)
        if known is None or known.vector != vector:
            deleted = self.numbers(table, path, vector)
            none = pa.repeat(
                pa.scalar(value=False), self._file(table, path).footer.metadata.num_rows
            )
            flags = known.flags if known else none
            flags = with_deleted(flags, deleted.filter(pc.invert(flags.take(deleted))))
            if flags.true_count > len(deleted):  # rows are there again, as after RESTORE
                flags = with_deleted(none, deleted)
            known = self._deleted[key] = _Deleted(vector, deleted, flags)
        return pc.invert(known.flags.take(numbers))

    def keep(self, key: tuple[str, str, int, str], values: pa.Array) -> None:
        """Keep a column of a file that the newest version has, if it fits."""
        before = self.kept.pop(key, None)
        self._bytes -= before.nbytes if before is not None else 0
        if self._is_current(*key[:2]) and self._bytes + values.nbytes <= self._most:
            self.kept[key] = values
            self._bytes += values.nbytes

    def _is_current(self, table: str, path: str) -> bool:
        return table in self._versions and path in self._versions[table][1]

    def _forget(self, table: str, path: str) -> None:
        for key in [each for each in self.kept if each[:2] == (table, path)]:
            self._bytes -= self.kept.pop(key).nbytes
        self._footers.pop((table, path), None)
        self._deleted.pop((table, path), None)


def _name(table: DeltaTable) -> str:
    """Return what no other table is named, in this place or another."""
    return f"{table.table_uri} {table.metadata().id}"
