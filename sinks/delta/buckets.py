"""Write a large cut's changes to a mirror from many processes, each with some of the keys.

The driver describes the mirror once (`target`). A task passes its keys' net changes to `written`:
they go into new files, and the positions of the rows that they replace are found by a pass over the
key columns of the files whose statistics admit one of the keys. A task needs no other state: it
holds `HELD_BYTES` of changes, however many it gets and however large the mirror is. Positions of
one file come from several tasks; `marked` makes one deletion vector of them, or removes a file
without remaining rows. What both return are the actions of one commit, which the driver makes;
until then nothing of it is visible.

The result is the same as with `sinks.delta.vectors`.
"""

from __future__ import annotations

import json
import time
from array import array
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import PyFileSystem

from cdc.errors import ConfigError
from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import lake, log
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.layout import EXACT, SEQ
from lockstep.sinks.delta.parts import Parts
from lockstep.sinks.delta.positions import deleted_rows
from lockstep.sinks.delta.rows import batch, joined, taken
from lockstep.sinks.delta.stats import with_deleted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Changes
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.columns import ColumnReader
    from lockstep.sinks.delta.rows import Batch

# How many bytes of changes a task holds, as Arrow: each time it has so many, it looks for their
# rows.
HELD_BYTES: Final = 32 << 20
# How many stored keys are compared at a time: each time the changes' keys are hashed.
KEYS_AT_ONCE: Final = 500_000
# How many stored rows are read at a time to fill values that were not sent, which may be large.
FILLED_ROWS: Final = 2_000
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


class Piece(NamedTuple):
    """A part of a task's result: a new file's action, or positions of replaced rows of a file."""

    place: str
    path: str  # "": a new file
    rows: int  # how many the file has
    data: bytes  # the add action as JSON; or the positions, as int32


class Hits(NamedTuple):
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
    return Target(place, uri, storage, schema, key, seq, table.version(), replaces, files)


def written(target: Target, changes: Iterable[Changes]) -> Iterator[Piece]:
    """Write the net changes of some keys, each at most once; yield the new files and positions."""
    with Parts(Files(target.uri, target.storage), target.schema) as parts:
        writing = _Writing(target, parts)
        for each in changes:
            yield from writing.add(each)
        yield from writing.flush()
    for file in parts.done:
        yield Piece(target.place, "", file.rows, json.dumps(file.action).encode())


def appended(target: Target, rows: Iterable[pa.Table]) -> Iterator[bytes]:
    """Write rows that replace none, with the mirror's columns; yield the new files' actions."""
    with Parts(Files(target.uri, target.storage), target.schema) as parts:
        for each in rows:
            for part in each.to_batches():
                parts.add(part)
    for file in parts.done:
        yield json.dumps(file.action).encode()


def marked(targets: Mapping[str, Target], pieces: Iterable[Piece]) -> Iterator[tuple[str, bytes]]:
    """Yield the actions of pieces that are sorted by place and path: place and JSON."""
    for (place, path), group in groupby(pieces, lambda piece: (piece.place, piece.path)):
        if not path:
            yield from ((place, piece.data) for piece in group)
            continue
        mine = targets[place]
        for action in _marked(mine, mine.files[path], list(group)):
            yield place, json.dumps(action).encode()


def _marked(target: Target, file: StoredFile, pieces: list[Piece]) -> list[Action]:
    """Return the actions that delete rows of a file."""
    rows = pieces[0].rows
    deleted = pa.repeat(pa.scalar(value=False), rows)
    if file.deleted is not None:
        deleted = pa.concat_arrays([file.deleted, deleted.slice(len(file.deleted))])
    positions = _unpacked(b"".join(piece.data for piece in pieces))
    deleted = pc.or_(deleted, _at(positions, rows))
    if deleted.true_count == rows:
        return [removed(file)]
    (vector,) = delta_actions.put_vectors(Files(target.uri, target.storage), [deleted])
    add = {
        "path": file.path,
        "partitionValues": {},
        "size": file.bytes,
        "modificationTime": int(time.time() * 1_000),
        "dataChange": True,
        "stats": with_deleted(file.stats, rows),
        "deletionVector": vector.action,
    }
    return [removed(file), {"add": add}]


def removed(file: StoredFile) -> Action:
    """Return the action that removes a file."""
    action: dict[str, Any] = {
        "path": file.path,
        "deletionTimestamp": int(time.time() * 1_000),
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": file.bytes,
    }
    if file.vector:
        action["deletionVector"] = dict(file.vector)
    return {"remove": action}


def expect_files(files: Files, actions: Sequence[Action]) -> None:
    """Raise ConfigError unless the files that the actions add are there."""
    for action in actions:
        if add := action.get("add"):
            if vector := add.get("deletionVector"):
                name = UUID(bytes=delta_actions.z85_decoded(vector["pathOrInlineDv"]))
                there = files.size(f"deletion_vector_{name}.bin") is not None
            else:
                there = files.size(add["path"]) == add["size"]
            if not there:
                raise ConfigError(
                    "the driver does not find the files that tasks wrote into a mirror",
                    hint="the driver and all executors must share that file system; or use an"
                    " object store",
                )


class _Writing:
    """One task's work on one mirror."""

    def __init__(self, target: Target, parts: Parts) -> None:
        self._target, self._parts = target, parts
        self._stored = _Stored(target)
        self._readers: dict[int, ColumnReader] = {}
        self._held: list[Batch] = []
        self._bytes = 0

    def add(self, changes: Changes) -> Iterator[Piece]:
        """Add changes; those up to the mirror's own seq are in it."""
        new = [change for change in changes.changes if change.seq > self._target.seq]
        if not new:
            return
        found = batch(changes._replace(changes=new), self._target.schema, self._readers)
        self._held.append(found)
        self._bytes += found.rows.nbytes
        if self._bytes >= HELD_BYTES:
            yield from self.flush()

    def flush(self) -> Iterator[Piece]:
        """Write what is held."""
        if not self._held:
            return
        changes = delta_keys.newest(joined(self._held), self._target.key)
        self._held, self._bytes = [], 0
        new = pc.invert(changes.deleted)
        every = list[Hits]()
        for hits, seqs in self._stored.find(changes.rows):
            # Only rows from a direct snapshot or another writer can be newer than a change.
            newer = pc.less(seqs, changes.rows[SEQ].combine_chunks().take(hits.wanted))
            new = pc.and_not(new, _at(hits.wanted.filter(pc.invert(newer)), len(new)))
            each = _only(hits, newer)
            if len(each.positions):
                every.append(each)
                yield Piece(self._target.place, each.path, each.rows, _packed(each.positions))
        if changes.unchanged:
            new = pc.and_not(new, self._fill(changes, every))
        self._write(changes.rows.filter(new))

    def _fill(self, changes: Batch, every: list[Hits]) -> pa.BooleanArray:
        """Write the changes that need values of stored rows; return which they are."""
        names = [*changes.unchanged, EXACT]
        needs = delta_work.any_of(changes.unchanged.values())
        filled = pa.repeat(pa.scalar(value=False), len(needs))
        for hits in every:
            some = _only(hits, needs.take(hits.wanted))
            filled = pc.or_(filled, _at(some.wanted, len(needs)))
            for rows, wanted in self._stored.rows(some, names):
                one = taken(changes, wanted)
                places = pa.arange(0, len(wanted))
                self._write(delta_work.merged(one, rows, places).rows)
        return filled

    def _write(self, rows: pa.Table) -> None:
        for each in rows.to_batches():
            self._parts.add(each)


class _Stored:
    """The rows of a mirror's files."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._files = PyFileSystem(DeltaStorageHandler(target.uri, dict(target.storage)))

    def find(self, changed: pa.Table) -> Iterator[tuple[Hits, pa.Array]]:
        """Yield the rows that have one of the changes' keys, by file, and their seqs."""
        if self._target.replaces:
            return
        key = self._target.key
        as_text = delta_keys.needs_text(changed, key)
        wanted = delta_keys.identities_of(changed, key, as_text=as_text)
        odd = as_text or delta_keys.always_text(self._target.schema, key)
        names = [*dict.fromkeys([*key, SEQ, *([EXACT] if odd else [])])]
        bounds = {} if as_text else _bounds(changed, key)
        for file in self._target.files.values():
            if not _may_have(file, bounds):
                continue
            first, positions, places, seqs = 0, [], [], []
            for rows in self._keys(file, names):
                mine = delta_keys.identities_of(rows, key, as_text=as_text)
                found = pc.index_in(mine, value_set=wanted)
                there = pc.and_not(found.is_valid(), _part(file.deleted, first, len(found)))
                at = pc.indices_nonzero(there).cast(pa.int32())
                positions.append(pc.add(at, pa.scalar(first, pa.int32())))
                places.append(found.filter(there))
                seqs.append(rows[SEQ].combine_chunks().filter(there))
                first += len(found)
            if any(map(len, positions)):
                hits = Hits(file.path, first, *map(pa.concat_arrays, (positions, places)))
                yield hits, pa.concat_arrays(seqs)

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

    def rows(self, hits: Hits, names: Sequence[str]) -> Iterator[tuple[pa.Table, pa.Array]]:
        """Yield the rows, a few at a time, and the change of each."""
        positions, first = hits.positions, 0
        with self._opened(hits.path) as reader:
            for group in range(reader.num_row_groups):
                end = first + reader.metadata.row_group(group).num_rows
                if pc.any(_within(positions, first, end)).as_py():
                    there = [name for name in names if name in reader.schema_arrow.names]
                    parts = reader.iter_batches(FILLED_ROWS, row_groups=[group], columns=there)
                    for part in parts:
                        mine = _within(positions, first, first + part.num_rows)
                        at = pc.subtract(positions.filter(mine), pa.scalar(first, pa.int32()))
                        if len(at):
                            # First the types: Arrow takes no rows of some that delta-rs writes.
                            rows = self._typed(pa.Table.from_batches([part]), names)
                            yield rows.take(at), hits.wanted.filter(mine)
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


def _packed(positions: pa.Int32Array) -> bytes:
    return array("i", positions.to_pylist()).tobytes()


def _unpacked(data: bytes) -> pa.Int32Array:
    return pa.Array.from_buffers(pa.int32(), len(data) // 4, [None, pa.py_buffer(data)])


def _at(places: pa.Array, rows: int) -> pa.BooleanArray:
    """Return which of so many rows are at the places."""
    return pc.is_in(pa.arange(0, rows).cast(places.type), value_set=places)


def _within(positions: pa.Array, first: int, end: int) -> pa.BooleanArray:
    return pc.and_(pc.greater_equal(positions, first), pc.less(positions, end))


def _only(hits: Hits, some: pa.BooleanArray) -> Hits:
    return hits._replace(positions=hits.positions.filter(some), wanted=hits.wanted.filter(some))
