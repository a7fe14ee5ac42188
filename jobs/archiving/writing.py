"""Write rows to files of the archive, as its next commit names them.

A file is made in memory, sorted, and written once it has enough rows: so its SHA-256 is known, and
its add action has it as a tag. A file that no commit names is deleted by the next vacuum.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.jobs.archiving import layout
from lockstep.sinks.delta.actions import added_file, removal
from lockstep.sinks.delta.stats import Stats

if TYPE_CHECKING:
    from lockstep.sinks.delta.actions import Action, Files

SHA256: Final = "lockstep.sha256"  # the tag of a file's digest
FILE_SUFFIX: Final = ".zstd.parquet"
# The size of a file's rows in memory; some eighth of it as Parquet.
_FILE_BYTES: Final = 128 << 20
# Readers of one key decompress complete pages.
_PAGE_BYTES: Final = 256 << 10
_GROUP_ROWS: Final = 100_000
_NAMES: Final = ["topic", "op", "cut", "partition", "commit_lsn", "committed_at"]
_NUMBERS: Final = {"offset": "DELTA_BINARY_PACKED", "seq": "DELTA_BINARY_PACKED"}


class ArchiveWriter:
    """Collects rows; `finish` returns the actions that add their files."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._actions: list[Action] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows; those of a full file are written."""
        self._held.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _FILE_BYTES:
            self._write()

    def finish(self) -> list[Action]:
        """Write what is left; return the actions."""
        self._write()
        return self._actions

    def _write(self) -> None:
        held, self._held, self._bytes = self._held, [], 0
        if held:
            self._actions.append(write(self._files, pa.Table.from_batches(held)))


def write(
    files: Files, rows: pa.Table, *, is_new: bool = True, schema: pa.Schema = layout.SCHEMA
) -> dict[str, Any]:
    """Write one file; return the action that adds it. Not `is_new`: its rows were there before."""
    # Of one chunk: its rows are compared and taken in a third of the time.
    rows = rows.combine_chunks().sort_by([(name, "ascending") for name in layout.SORTED_BY])
    data = as_parquet(rows, schema)
    path = f"part-{uuid4()}{FILE_SUFFIX}"
    files.put(path, data)
    # Topics with a long prefix would all be between truncated bounds.
    stats = Stats(schema, exact=("topic",))
    stats.add(rows)
    tags = {SHA256: sha256(data).hexdigest()}
    return added_file(path, len(data), stats.json(), changes_rows=is_new, tags=tags)


def as_parquet(rows: pa.Table, schema: pa.Schema = layout.SCHEMA) -> bytes:
    """Return a file's bytes."""
    to = pa.BufferOutputStream()
    with pq.ParquetWriter(
        to,
        schema,
        compression="zstd",
        use_dictionary=[name for name in _NAMES if name in schema.names],
        column_encoding=_NUMBERS,
        data_page_size=_PAGE_BYTES,
        coerce_timestamps="us",
        write_page_checksum=True,
    ) as writer:
        writer.write_table(rows, row_group_size=_GROUP_ROWS)
    data: bytes = to.getvalue().to_pybytes()
    return data


def removed(add: dict[str, Any], *, changes_rows: bool = False) -> Action:
    """Return the action that removes a file; not `changes_rows`: another one has its rows."""
    return removal(add, changes_rows=changes_rows)
