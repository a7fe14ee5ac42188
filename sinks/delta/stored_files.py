"""Rows of a table's files by their numbers, or by values, from columns that stay in memory.

Files never change: a column of a row group that was read once is the same in every later version,
and so is an index of a file's column (`sinks.delta.column_index`); which rows are deleted is in the
log. So a cut of a large table costs what it looks at, not what the files have. What does not fit is
read again each time, and by values nothing is found of a table that does not fit.

Of a table the files of the two versions that were used last are known, because a cut reads both.

Of tables whose files are what readers see (`can_read`): no mapped columns, no partitions.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.sinks.delta import column_index, lake, log, roaring
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.columns import one_chunk
from lockstep.sinks.delta.layout import CURRENT, DELETED, EXACT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from deltalake import DeltaTable

    from lockstep.sinks.delta.actions import TaggedVersion

# In bytes, of all tables of a follower: some 15 million rows of four columns.
MOST_BYTES: Final = 512 << 20
# A cut has two versions of a table.
_VERSIONS: Final = 2
# A table that did not fit is tried again at this fraction of its size: a try reads what fits.
_SMALLER: Final = 0.75

# A table's name and a file's path, and what is kept of the file.
_Place = tuple[str, str]
_Part = tuple[object, ...]


def can_read(table: DeltaTable) -> bool:
    """Return whether the files have what readers see, but for deleted rows."""
    return not table.metadata().partition_columns and not lake.is_mapped(table)


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
        footer = self._file.footer
        if name not in footer.names:
            return True
        if name != EXACT:
            return False
        if self._number not in footer.exact_is_null:
            footer.exact_is_null[self._number] = self._exact_is_null()
        return footer.exact_is_null[self._number]

    def _exact_is_null(self) -> bool:
        chunks = (self.about.column(at) for at in range(self.about.num_columns))
        stats = [each.statistics for each in chunks if each.path_in_schema.startswith(f"{EXACT}.")]
        return all(each is not None and each.null_count == self.rows for each in stats)

    def _columns(self, fields: list[pa.Field]) -> dict[str, pa.Array]:
        place, number = (self._file.table, self._file.path), self._number
        kept = self._files.kept.get(place, {})
        found = {field.name: kept.get((number, field.name)) for field in fields}
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
                self._files.keep(place, (number, name), found[name])
        return found


class _Footer(NamedTuple):
    """What a file's end says."""

    metadata: pq.FileMetaData
    names: frozenset[str]
    ends: list[int]  # of each group, in rows
    exact_is_null: dict[int, bool]  # whether a group has no value of `_exact`, if it was asked for


class _File(NamedTuple):
    """A file of a table."""

    table: str
    path: str
    open: Callable[[], pa.NativeFile]
    footer: _Footer


class _Listed(NamedTuple):
    """The files of a table's version."""

    table: DeltaTable  # that was last used at this version
    version: TaggedVersion
    files: log.Added


class StoredFiles:
    """The files of a lake's tables, for one reader."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, storage: Mapping[str, str] | None = None
    ) -> None:
        self._most, self._storage, self.bytes = most_bytes, storage or {}, 0
        # By file: columns of a row group, by its number and their names, and indexes of a column.
        self.kept = dict[_Place, dict[_Part, pa.Array | pa.RecordBatch]]()
        # Of each table its versions, in the order of use.
        self._versions = dict[str, dict[int, _Listed]]()
        self._footers = dict[_Place, _Footer]()
        # By file: the two deletion vectors that were decoded last.
        self._deleted: dict[_Place, list[tuple[Mapping[str, Any], pa.Array]]] = {}
        # The tables that do not fit, and the size of their files then, in bytes.
        self._too_large = dict[str, int]()

    def follow(self, table: DeltaTable) -> log.Added:
        """Return the add action of each file at the table's version.

        Forget files that only versions used before the last two have.
        """
        name, number = _name(table), table.version()
        known = self._versions.get(name, {})
        if number in known and known[number].table is table:
            known[number] = known.pop(number)
        else:
            self._use(name, self._listed(table, known))
        return self._versions[name][number].files

    def _listed(self, table: DeltaTable, known: Mapping[int, _Listed]) -> _Listed:
        """Return the table's version, from those that are known if the log still has them.

        The commit of a known number is another one after the table was restored.
        """
        there = Files(table.table_uri, self._storage)
        version = there.tagged(table.version())
        same = known.get(version.number)
        if same is not None and version.tag is not None and same.version == version:
            return same._replace(table=table)
        before = max((each for each in known if each < version.number), default=None)
        if before is not None and there.has(known[before].version):
            since = log.since(table, before)
            if since is not None:
                added, removed = since
                files = known[before].files.items()
                kept = {path: add for path, add in files if path not in removed}
                return _Listed(table, version, kept | added)
        return _Listed(table, version, log.added(table))

    def _use(self, name: str, listed: _Listed) -> None:
        """Know a version as the one that was used last."""
        uri = listed.table.table_uri
        at_uri = [each for each in self._versions if each.rpartition(" ")[0] == uri]
        for replaced in (each for each in at_uri if each != name):
            self._too_large.pop(replaced, None)
            self._forget_files(replaced, self._versions.pop(replaced).values())
        known, number = self._versions.setdefault(name, {}), listed.version.number
        dropped = [known.pop(number)] if number in known else []
        known[number] = listed
        while len(known) > _VERSIONS:
            dropped.append(known.pop(next(iter(known))))
        self._forget_files(name, dropped)

    def _forget_files(self, name: str, dropped: Iterable[_Listed]) -> None:
        for path in {path for each in dropped for path in each.files}:
            if not self._is_current(name, path):
                self._forget((name, path))

    def find(
        self, table: DeltaTable, schema: pa.Schema, tests: Mapping[str, pa.Array]
    ) -> pa.Table | None:
        """Return columns of the live rows that have a value of each test, and maybe of others.

        A test has a column's name, and the values as indexes have them (`column_index.sought`).
        None if what is read for it does not fit. Raises FileNotFoundError if a file was deleted.
        """
        name, parts = _name(table), [schema.empty_table()]
        marks = [each.name for each in table.schema().fields if each.name in {CURRENT, DELETED}]
        of_columns = [lake.arrow_schema(table, [each, *marks]) for each in tests]
        files = self.follow(table)
        if name in self._too_large and _size(files) <= self._too_large[name] * _SMALLER:
            del self._too_large[name]
        for path in files:
            if name in self._too_large:
                return None
            indexes = [self._index(table, path, of_column) for of_column in of_columns]
            found = column_index.find(zip(indexes, tests.values(), strict=True))
            if len(found):
                parts += self._alive(table, path, schema, found.cast(pa.int64()))
        return None if name in self._too_large else pa.concat_tables(parts)

    def _alive(
        self, table: DeltaTable, path: str, schema: pa.Schema, found: pa.Array
    ) -> Iterator[pa.Table]:
        """Yield columns of those of a file's rows that the table's version has."""
        alive = self.alive(table, path, found)
        file, of_groups = self._file(table, path), dict[int, list[int]]()
        for number in (found if alive is None else found.filter(alive)).to_pylist():
            of_groups.setdefault(bisect_right(file.footer.ends, number), []).append(number)
        for at, numbers in of_groups.items():
            first = file.footer.ends[at - 1] if at else 0
            here = pa.array([number - first for number in numbers], pa.int64())
            yield RowGroup(self, file, at, first).take(schema, here)

    def _index(self, table: DeltaTable, path: str, schema: pa.Schema) -> pa.RecordBatch:
        """Return the index of a file's rows by the schema's first column.

        Without rows that the other columns mark as deleted or historical.
        """
        place = _name(table), path
        part = tuple(map(str, schema))
        found = self.kept.get(place, {}).get(part)
        if found is None:
            groups = [group.read(schema) for group in self.groups(table, path)]
            rows = pa.concat_tables([schema.empty_table(), *groups])
            rows = live_rows(rows.append_column("#", pa.arange(0, rows.num_rows)))
            found = column_index.index(*(one_chunk(rows[at]) for at in (0, "#")))
            self.keep(place, part, found)
        return found

    def groups(self, table: DeltaTable, path: str) -> Iterator[RowGroup]:
        """Yield the row groups of a file; raise FileNotFoundError if it was deleted."""
        file, first = self._file(table, path), 0
        for number, end in enumerate(file.footer.ends):
            if end > first:
                yield RowGroup(self, file, number, first)
            first = end

    def _file(self, table: DeltaTable, path: str) -> _File:
        name, opened = _name(table), partial(log.opened, table, path)
        footer = self._footers.get((name, path))
        if footer is None:
            with opened() as data, pq.ParquetFile(data) as file:
                about, names = file.metadata, frozenset(file.schema_arrow.names)
            sizes = (about.row_group(each).num_rows for each in range(about.num_row_groups))
            footer = _Footer(about, names, list(accumulate(sizes)), {})
            if self._is_current(name, path):
                self._footers[name, path] = footer
        return _File(name, path, opened, footer)

    def numbers(self, table: DeltaTable, path: str, vector: Mapping[str, Any]) -> pa.Array:
        """Return the numbers of the rows in a deletion vector of a file, ascending."""
        place = _name(table), path
        known = self._deleted.get(place, [])
        for of, numbers in known:
            if of == vector:
                return numbers
        deleted = roaring.deleted_rows(log.files(table), vector)
        if self._is_current(*place):
            self._deleted[place] = [*known[-1:], (vector, deleted)]
        return deleted

    def alive(self, table: DeltaTable, path: str, numbers: pa.Array) -> pa.BooleanArray | None:
        """Return which rows with these numbers the table's version has; None: all of them."""
        vector = self.follow(table)[path].get("deletionVector") or {}
        if not vector:
            return None
        deleted = self.numbers(table, path, vector)
        return pc.invert(column_index.contains(deleted, numbers))

    def keep(self, place: _Place, part: _Part, values: pa.Array | pa.RecordBatch) -> None:
        """Keep what was read of a file that one of the versions has, if it fits."""
        before = self.kept.get(place, {}).pop(part, None)
        self.bytes -= before.nbytes if before is not None else 0
        if not self._is_current(*place):
            return
        if self.bytes + values.nbytes > self._most:
            self._forget_older()
        if self.bytes + values.nbytes > self._most:
            self._refuse(place[0])
            return
        self.kept.setdefault(place, {})[part] = values
        self.bytes += values.nbytes

    def _forget_older(self) -> None:
        """Keep nothing of files that only the older of two versions has."""
        for name, versions in self._versions.items():
            for path in {*versions[min(versions)].files} - {*versions[max(versions)].files}:
                self._drop((name, path))

    def _refuse(self, table: str) -> None:
        """Find no rows of a table by values until it is smaller, and give up its room."""
        if table not in self._too_large:
            (*_, last) = self._versions[table].values()
            self._too_large[table] = _size(last.files)
            for place in [each for each in self.kept if each[0] == table]:
                self._drop(place)

    def _is_current(self, table: str, path: str) -> bool:
        return any(path in each.files for each in self._versions.get(table, {}).values())

    def _drop(self, place: _Place) -> None:
        self.bytes -= sum(each.nbytes for each in self.kept.pop(place, {}).values())

    def _forget(self, place: _Place) -> None:
        self._drop(place)
        self._footers.pop(place, None)
        self._deleted.pop(place, None)


def live_rows(rows: pa.Table) -> pa.Table:
    """Return the current rows: neither marked as deleted nor historical."""
    if CURRENT in rows.column_names:
        return rows.filter(rows[CURRENT])
    if DELETED in rows.column_names:
        return rows.filter(pc.invert(pc.fill_null(rows[DELETED], fill_value=False)))
    return rows


def _size(files: log.Added) -> int:
    return sum(each["size"] for each in files.values())


def _name(table: DeltaTable) -> str:
    """Return what no other table is named, in this place or another."""
    return f"{table.table_uri} {table.metadata().id}"
