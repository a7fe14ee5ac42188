"""A mirror at one Delta version, as tasks that write a part of it need it.

Its description, which the driver makes and tasks receive, and its stored rows: found by keys, in
files whose statistics admit one of them, and read a few at a time. A task holds no index.
"""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import PyFileSystem

from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import lake, log
from lockstep.sinks.delta.layout import CURRENT, EXACT, VALID_TO_LSN
from lockstep.sinks.delta.positions import deleted_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Change

# How many bytes of changes a task holds, as Arrow: each time it has so many, it looks for their
# rows.
HELD_BYTES: Final = 32 << 20
# How many stored keys are compared at a time: each time the changes' keys are hashed.
KEYS_AT_ONCE: Final = 500_000
# How many stored rows are read at a time, whose values may be large.
ROWS_AT_ONCE: Final = 2_000
_READ_BYTES: Final = 1 << 20


class StoredFile(NamedTuple):
    """A file of a mirror, as its log has it."""

    path: str
    bytes: int
    stats: str  # JSON; "" if there are none
    vector: Mapping[str, object]  # empty if there is none
    deleted: pa.BooleanArray | None  # which rows are deleted; later rows are not


class Target(NamedTuple):
    """A mirror at one Delta version, as tasks need it. Pickles."""

    place: str
    uri: str
    storage: Mapping[str, str]
    schema: pa.Schema
    key: tuple[str, ...]
    seq: int  # up to which it has every change
    version: int
    replaces: bool  # the changes replace all rows
    files: Mapping[str, StoredFile]
    is_history: bool = False
    truncates: tuple[Change, ...] = ()  # of a history: those that end versions, in seq order
    dropped: frozenset[str] = frozenset()  # columns that the source has no more
    keys_vary: bool = False  # of a history: the log may have several keys of one row


class Piece(NamedTuple):
    """A part of a task's result: a new file's action, or positions of replaced rows of a file."""

    place: str
    path: str  # "": a new file
    rows: int  # how many the file has
    data: bytes  # the add action as JSON; or the positions, as int32


class ReplacedRows(NamedTuple):
    """Rows of one file that changes replace."""

    path: str
    rows: int  # how many the file has
    positions: pa.Int32Array
    wanted: pa.Int32Array  # the change of each


def target(
    table: DeltaTable,
    place: str,
    storage: Mapping[str, str],
    key: tuple[str, ...],
    seq: int,
    *,
    replaces: bool,
    is_history: bool = False,
    truncates: tuple[Change, ...] = (),
) -> Target:
    """Return the description of a mirror at its version."""
    files: dict[str, StoredFile] = {}
    with lake.translated(table.table_uri):
        added = log.added(table)
        deleted = dict(deleted_rows(table, added))
    for path, add in added.items():
        vector = add.get("deletionVector") or {}
        files[path] = StoredFile(
            path, add["size"], add.get("stats") or "", vector, deleted.get(path)
        )
    schema, uri = lake.arrow_schema(table), table.table_uri
    at = table.version()
    return Target(place, uri, storage, schema, key, seq, at, replaces, files, is_history, truncates)


class StoredRows:
    """The rows of a mirror's files."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._files = PyFileSystem(DeltaStorageHandler(target.uri, dict(target.storage)))

    def find(self, changed: pa.Table, shown: str) -> Iterator[tuple[ReplacedRows, pa.Array]]:
        """Yield the rows that have one of the changes' keys, by file, and a column of theirs.

        In a history also rows that are not valid, but no files that have only such rows.
        """
        if self._target.replaces:
            return
        key = self._target.key
        as_text = delta_keys.needs_text(changed, key)
        wanted = delta_keys.identities_of(changed, key, as_text=as_text)
        odd = as_text or delta_keys.always_text(self._target.schema, key)
        names = [*dict.fromkeys([*key, shown, *([EXACT] if odd else [])])]
        bounds = {} if as_text else _bounds(changed, key)
        for file in self._target.files.values():
            if not (_may_have(file, bounds) and self._may_have_valid(file)):
                continue
            first, positions, places, values = 0, [], [], []
            for rows in self._keys(file, names):
                mine = delta_keys.identities_of(rows, key, as_text=as_text)
                found = pc.index_in(mine, value_set=wanted)
                there = pc.and_not(found.is_valid(), _part(file.deleted, first, len(found)))
                at = pc.indices_nonzero(there).cast(pa.int32())
                positions.append(pc.add(at, pa.scalar(first, pa.int32())))
                places.append(found.filter(there))
                values.append(rows[shown].combine_chunks().filter(there))
                first += len(found)
            if any(map(len, positions)):
                hits = ReplacedRows(file.path, first, *map(pa.concat_arrays, (positions, places)))
                yield hits, pa.concat_arrays(values)

    def _may_have_valid(self, file: StoredFile) -> bool:
        """Return whether a history's file may have valid rows: those without an end."""
        if not self._target.is_history or not file.stats:
            return True
        return bool((json.loads(file.stats).get("nullCount") or {}).get(VALID_TO_LSN, 1))

    def valid(self, file: StoredFile) -> Iterator[ReplacedRows]:
        """Yield the valid rows of a history's file, as rows that no change replaces."""
        if not self._may_have_valid(file):
            return
        first = 0
        for rows in self._keys(file, [CURRENT]):
            valid = pc.fill_null(rows[CURRENT].combine_chunks(), fill_value=False)
            there = pc.and_not(valid, _part(file.deleted, first, len(valid)))
            at = pc.add(pc.indices_nonzero(there).cast(pa.int32()), pa.scalar(first, pa.int32()))
            yield ReplacedRows(file.path, 0, at, pa.nulls(len(at), pa.int32()))
            first += len(valid)

    def remaining(self, file: StoredFile) -> Iterator[tuple[pa.Int32Array, pa.Table]]:
        """Yield the rows of a file that are not deleted, a few at a time, and their positions."""
        first, names = 0, self._target.schema.names
        with self._opened(file.path) as reader:
            for part in reader.iter_batches(ROWS_AT_ONCE):
                there = pc.invert(_part(file.deleted, first, part.num_rows))
                positions = pc.indices_nonzero(there).cast(pa.int32())
                rows = self._typed(pa.Table.from_batches([part]), names).take(positions)
                yield pc.add(positions, pa.scalar(first, pa.int32())), rows
                first += part.num_rows

    def count(self, path: str) -> int:
        """Return how many rows a file has."""
        with self._opened(path) as reader:
            return int(reader.metadata.num_rows)

    def _keys(self, file: StoredFile, names: Sequence[str]) -> Iterator[pa.Table]:
        held, count = [], 0
        with self._opened(file.path) as reader:
            for part in reader.iter_batches(KEYS_AT_ONCE, columns=list(names)):
                held.append(part)
                count += part.num_rows
                if count >= KEYS_AT_ONCE:
                    yield self._typed(pa.Table.from_batches(held), names)
                    held, count = [], 0
        if held:
            yield self._typed(pa.Table.from_batches(held), names)

    def rows(self, hits: ReplacedRows, names: Sequence[str]) -> Iterator[tuple[pa.Table, pa.Array]]:
        """Yield the rows, a few at a time, and the change of each."""
        positions, first = hits.positions, 0
        with self._opened(hits.path) as reader:
            for group in range(reader.num_row_groups):
                end = first + reader.metadata.row_group(group).num_rows
                if _count(positions, first, end):
                    there = [name for name in names if name in reader.schema_arrow.names]
                    parts = reader.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=there)
                    for part in parts:
                        start = _count(positions, 0, first)
                        mine = slice(start, start + _count(positions, first, first + part.num_rows))
                        at = pc.subtract(positions[mine], pa.scalar(first, pa.int32()))
                        if len(at):
                            # First the types: Arrow takes no rows of some that delta-rs writes.
                            rows = self._typed(pa.Table.from_batches([part]), names)
                            yield rows.take(at), hits.wanted[mine]
                        first += part.num_rows
                first = end

    def _typed(self, rows: pa.Table, names: Sequence[str]) -> pa.Table:
        """Return rows of a file in the mirror's types; a column added later is NULL."""
        return lake.under(rows, pa.schema([self._target.schema.field(name) for name in names]))

    def _opened(self, path: str) -> pq.ParquetFile:
        return pq.ParquetFile(
            self._files.open_input_file(unquote(path)),
            buffer_size=_READ_BYTES,
            pre_buffer=False,
            coerce_int96_timestamp_unit="us",
        )


def _bounds(changed: pa.Table, key: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return the least and greatest values of the key's columns whose statistics are exact."""
    found = {}
    for name in key:
        kind = changed.schema.field(name).type
        if pa.types.is_integer(kind) or pa.types.is_string(kind):
            bounds = pc.min_max(changed[name])
            found[name] = bounds["min"].as_py(), bounds["max"].as_py()
    return found


def _may_have(file: StoredFile, bounds: Mapping[str, tuple[Any, Any]]) -> bool:
    """Return whether the statistics admit a row with all values within the bounds."""
    if not bounds or not file.stats:
        return True
    stats = json.loads(file.stats)
    least, most = stats.get("minValues") or {}, stats.get("maxValues") or {}
    return all(
        name not in least or name not in most or (least[name] <= high and low <= most[name])
        for name, (low, high) in bounds.items()
    )


def _part(deleted: pa.BooleanArray | None, first: int, rows: int) -> pa.BooleanArray:
    none = pa.repeat(pa.scalar(value=False), rows)
    if deleted is None or first >= len(deleted):
        return none
    mine = deleted.slice(first, rows)
    return pa.concat_arrays([mine, none.slice(len(mine))])


def packed(positions: pa.Int32Array) -> bytes:
    return array("i", positions.to_pylist()).tobytes()


def unpacked(data: bytes) -> pa.Int32Array:
    return pa.Array.from_buffers(pa.int32(), len(data) // 4, [None, pa.py_buffer(data)])


def at_places(places: pa.Array, rows: int) -> pa.BooleanArray:
    """Return which of so many rows are at the places."""
    return pc.is_in(pa.arange(0, rows).cast(places.type), value_set=places)


def _count(positions: pa.Array, first: int, end: int) -> int:
    """Return how many of the ascending positions are from `first` on and below `end`."""
    least, most = pc.search_sorted(positions, pa.array([first, end], pa.int32())).to_pylist()
    return int(most - least)


def only(hits: ReplacedRows, some: pa.BooleanArray) -> ReplacedRows:
    return hits._replace(positions=hits.positions.filter(some), wanted=hits.wanted.filter(some))
