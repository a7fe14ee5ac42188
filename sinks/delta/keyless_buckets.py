"""Write a large cut's part of a table without a key from many processes.

A row is known by a hash of its values. A change has up to two halves, an old row and a new one:
they are divided among tasks by their hashes, so that a task has all halves of equal rows
(`halves`, `resolved`). An old row takes the newest of the equal rows that the cut has added before,
or else a stored one: the task returns how many stored rows are taken. Other tasks hash the stored
rows, file by file (`hashed`), and both are joined by the hash.

The rows are those of `sinks.delta.keyless`, except that of equal stored rows another may remain.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa

from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta.keyless import old_rows
from lockstep.sinks.delta.rows import batch
from lockstep.sinks.delta.targets import StoredRows, packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.sinks.contract import Version
    from lockstep.sinks.delta.columns import ColumnReader
    from lockstep.sinks.delta.parts import Parts
    from lockstep.sinks.delta.targets import Target

# How many rows are written at a time.
ROWS_AT_ONCE: Final = 5_000
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[object]).decode


class Half(NamedTuple):
    """An old row or a new row of a change."""

    id: bytes  # the hash of the row
    seq: int
    is_new: bool
    data: bytes  # of a new row: the change


class Taken(NamedTuple):
    """How many stored rows with these values are deleted."""

    id: bytes
    rows: int


def halves(target: Target, changes: Changes, readers: dict[int, ColumnReader]) -> Iterator[Half]:
    """Yield the halves of changes; those up to the mirror's own seq are in it."""
    new = [each for each in changes.changes if each.seq > target.seq and each.op != "t"]
    old_ones, new_ones = [each for each in new if each.before], [each for each in new if each.row]
    for is_new, some in ((False, old_ones), (True, new_ones)):
        rows = changes._replace(changes=some)
        found = batch(rows if is_new else old_rows(rows), target.schema, readers)
        hashes = delta_keys.hashes(found.rows, target.dropped)
        for change, id_ in zip(some, hashes.to_pylist(), strict=True):
            data = _encode(change._replace(before=None)) if is_new else b""
            yield Half(id_, change.seq, is_new, data)


def resolved(found: Iterable[Half]) -> Iterator[Change | Taken]:
    """Yield the changes whose rows remain, and the stored rows that are deleted.

    `found` is sorted by id, and descending by seq, of one seq the new row first: then an old row
    comes before the newest row that it can take, and nothing but their number is kept.
    """
    for id_, mine in groupby(found, attrgetter("id")):
        old = 0
        for half in mine:
            if not half.is_new:
                old += 1
            elif old:
                old -= 1
            else:
                yield _change(half.data)
        if old:
            yield Taken(id_, old)


def _change(data: bytes) -> Change:
    return Change(*_decode(data))  # type: ignore[arg-type]


class KeylessWriting:
    """Writes a task's rows."""

    def __init__(self, target: Target, versions: tuple[Version, ...], parts: Parts) -> None:
        self._target, self._versions, self._parts = target, versions, parts
        self._readers: dict[int, ColumnReader] = {}
        self._held: list[Change] = []

    def add(self, change: Change) -> None:
        """Add a change with a row."""
        self._held.append(change)
        if len(self._held) >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            changes = Changes(self._versions, self._held)
            self._parts.add_all(batch(changes, self._target.schema, self._readers).rows)
            self._held = []


def hashed(target: Target, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file: its place, path and number of rows, their positions and hashes."""
    stored, file = StoredRows(target), target.files[path]
    many = stored.count(path)
    for positions, rows in stored.remaining(file):
        count = len(positions)
        places = pa.Array.from_buffers(pa.binary(4), count, [None, pa.py_buffer(packed(positions))])
        columns = {
            "place": pa.repeat(pa.scalar(target.place), count),
            "path": pa.repeat(pa.scalar(path), count),
            "rows": pa.repeat(pa.scalar(many, pa.int64()), count),
            "data": places.cast(pa.binary()),
            "id": delta_keys.hashes(rows, target.dropped),
        }
        yield pa.RecordBatch.from_pydict(columns)
