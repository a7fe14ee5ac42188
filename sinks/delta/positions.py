"""The position of each key's row: the keys of a mirror's files in memory, and their deletions.

Files never change, so a file's keys are read once, and those of files that we write are never read:
they are known at the write. Finding a batch's keys is one pass over all keys of the table, about
ten nanoseconds each: no sorting, no hashes that could collide. A key costs its own bytes and eight
for the seq.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import lake, log
from lockstep.sinks.delta.layout import EXACT, SEQ

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from deltalake import DeltaTable


@dataclass(slots=True)
class DataFile:
    """One file of the table."""

    path: str
    bytes: int
    keys: pa.Array
    seqs: pa.Array
    deleted: pa.BooleanArray
    stats: dict[str, Any] = field(default_factory=dict)
    vector: Mapping[str, object] | None = None  # the deletion vector that the log names

    @property
    def rows(self) -> int:
        """How many rows it holds, deleted ones included."""
        return len(self.seqs)

    @property
    def dead(self) -> int:
        """How many of its rows are deleted."""
        count: int = self.deleted.true_count
        return count


@dataclass(slots=True)
class RowsOfFile:
    """Rows of one file that a batch replaces."""

    file: DataFile
    hits: pa.BooleanArray  # which of the file's rows are hit
    wanted: pa.Array  # the batch's row for each hit

    def only(self, some: pa.BooleanArray) -> RowsOfFile:
        """Return some of the hits."""
        rows = pc.indices_nonzero(self.hits).filter(some)
        hits = pc.is_in(pa.arange(0, self.file.rows), value_set=rows.cast(pa.int64()))
        return RowsOfFile(self.file, hits, self.wanted.filter(some))


class Positions:
    """The keys of one table."""

    def __init__(self, key: Sequence[str]) -> None:
        self._key = key
        self.files: dict[str, DataFile] = {}
        self.version = -1
        # Whether keys are compared as text: a key may be NULL, or does not fit its column.
        self._as_text = False

    def follow(self, table: DeltaTable, *, as_text: bool) -> None:
        """Load the table's files as of its version."""
        if as_text and not self._as_text:
            self._as_text = True
            self.files.clear()
            self.version = -1
        if self.version == table.version():
            return
        actions = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
        known, self.files = self.files, {}
        for each in actions:
            path = each["path"]
            file = known.get(path) or self._read(table, path, each["size_bytes"])
            file.deleted, file.vector = pa.repeat(pa.scalar(value=False), file.rows), None
            self.files[path] = file
        marked = dict(deleted_rows(table, self.files))
        named = log.vectors(table) if marked else {}
        for path, deleted in marked.items():
            file = self.files[path]
            file.deleted, file.vector = _over(deleted, file.deleted), named[path]
        self.version = table.version()

    def identities(self, rows: pa.Table) -> pa.Array:
        """Return the identities of rows, comparable with the files' keys."""
        return delta_keys.identities_of(rows, self._key, as_text=self._as_text)

    def find(self, wanted: pa.Array) -> Iterator[RowsOfFile]:
        """Yield the rows that have one of the keys."""
        for file in self.files.values():
            places = pc.index_in(file.keys, value_set=wanted)
            there = pc.and_not(places.is_valid(), file.deleted)
            if there.true_count:
                yield RowsOfFile(file, there, places.filter(there))

    def read(self, table: DeltaTable, path: str, columns: Sequence[str] | None) -> pa.Table:
        """Return columns of a file, in the table's types."""
        with log.files(table).open_input_file(unquote(path)) as file:
            # Files rewritten by a Spark with other settings have INT96 timestamps: without a time
            # zone, and as nanoseconds they would end in 2262.
            rows = pq.read_table(file, columns=columns, coerce_int96_timestamp_unit="us")
        return rows.cast(lake.arrow_schema(table, rows.column_names))

    def _read(self, table: DeltaTable, path: str, size: int) -> DataFile:
        schema = lake.arrow_schema(table, self._key)
        odd = [EXACT] if self._as_text or delta_keys.always_text(schema, self._key) else []
        rows = self.read(table, path, [*self._key, SEQ, *odd])
        seqs = rows[SEQ].combine_chunks()
        none = pa.repeat(pa.scalar(value=False), len(seqs))
        return DataFile(path, size, self.identities(rows), seqs, none)


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
