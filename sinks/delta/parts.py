"""Write rows to the files of a table as they arrive, for its next commit to name.

A row group is written when it is full, and a file is closed when it is full: memory holds one row
group, as Arrow and as Parquet, regardless of the table's size. Each file has a unique name; a
vacuum deletes files that no commit names.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from cdc.errors import CDCError
from lockstep.sinks.delta.actions import added_file
from lockstep.sinks.delta.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from lockstep.sinks.delta.actions import Action, Files

GROUP_BYTES: Final = 32 << 20
# In bytes. Columns with many values are not worth a dictionary: a low limit keeps the attempt
# cheap.
_DICTIONARY_BYTES: Final = 256 << 10
# The form of files that are read as one, for which a row group is as large as memory allows.
_LARGE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "compression": "zstd",
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
        # As Spark writes it: half the bytes for a typical price.
        "store_decimal_as_integer": True,
    }
)
FILE_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A complete file."""

    path: str
    bytes: int
    rows: int
    stats: str

    @property
    def action(self) -> Action:
        """Return the action that adds it."""
        return added_file(self.path, self.bytes, self.stats)


class Parts:
    """The files of one writer; `done` has them after the block."""

    def __init__(
        self, files: Files, schema: pa.Schema, form: Mapping[str, Any] | None = None
    ) -> None:
        """`form` has the options of `write_table`, if the files are to have another form."""
        self._files, self._schema, self._form = files, schema, form or _LARGE
        self._held: list[pa.RecordBatch] = []
        self.bytes_held = 0
        self._open: _Open | None = None
        self.done: list[WrittenFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows; they are written at the end of the block at the latest."""
        self._held.append(batch)
        self.bytes_held += batch.nbytes
        if self.bytes_held >= GROUP_BYTES:
            self._write()
            assert self._open is not None
            if self._open.bytes >= FILE_BYTES:
                self._end()

    def add_all(self, rows: pa.Table) -> None:
        """Add the rows of a table."""
        for each in rows.to_batches():
            self.add(each)

    def _write(self) -> None:
        rows = pa.Table.from_batches(self._held, self._schema)
        self._held, self.bytes_held = [], 0
        if rows.num_rows:
            if self._open is None:
                self._open = _Open(self._files, self._schema, self._form)
            self._open.write(rows)

    def _end(self) -> None:
        if self._open is not None:
            self.done.append(self._open.end())
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._write()
            self._end()
        elif self._open is not None:
            self._open.give_up()


class _Open:
    """A file that is being written."""

    def __init__(self, files: Files, schema: pa.Schema, form: Mapping[str, Any]) -> None:
        codec = ".zstd" if form is _LARGE else ""
        self._path = f"part-00000-{uuid4()}-c000{codec}.parquet"
        self._sink = files.sink(self._path)
        options = dict(form)
        self._group_rows: int | None = options.pop("row_group_size", None)
        self._writer = pq.ParquetWriter(self._sink, schema, coerce_timestamps="us", **options)
        self._stats = Stats(schema)

    @property
    def bytes(self) -> int:
        """Return how many bytes are written."""
        written: int = self._sink.tell()
        return written

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=self._group_rows or rows.num_rows)
        self._stats.add(rows)

    def end(self) -> WrittenFile:
        self._writer.close()
        size = self.bytes
        self._sink.close()
        return WrittenFile(self._path, size, self._stats.rows, self._stats.json())

    def give_up(self) -> None:
        """Abandon the file; no commit names it."""
        with suppress(OSError, CDCError):
            self._writer.close()
            self._sink.close()


def small_file(files: Files, rows: pa.Table) -> Action:
    """Write rows to a new file, in one row group; return the action that adds it."""
    path = f"part-00000-{uuid4()}-c000.snappy.parquet"
    sink = pa.BufferOutputStream()
    # In a file of one row group that is read as one, dictionaries and bounds cost more than they
    # save; the bounds that skip a file are in its add action.
    pq.write_table(
        rows,
        sink,
        compression="snappy",
        coerce_timestamps="us",
        use_dictionary=False,
        write_statistics=False,
    )
    data = sink.getvalue()
    files.put(path, data)
    stats = Stats(rows.schema)
    stats.add(rows)
    return WrittenFile(path, data.size, rows.num_rows, stats.json()).action
