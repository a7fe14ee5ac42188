"""A table's rows by its Parquet files alone: for Spark, which plans a Delta table for a second.

Only of tables whose files are what readers see, but for deleted rows: no columns that are mapped or
in no file, no other feature, few files, and few deleted rows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta import lake, positions

if TYPE_CHECKING:
    from deltalake import DeltaTable

# A reader of the files needs no more of these than the deleted rows.
_FEATURES: Final = {"deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
# With more files Delta's statistics skip more than planning costs.
MOST_FILES: Final = 200
_MOST_DELETED: Final = 250_000
# Paths that are the same in a URI, and no pattern of paths.
_PLAIN: Final = re.compile(r"[\w./=@+-]+", re.ASCII)
_LOCAL: Final = "file://"


class PlainFiles(NamedTuple):
    """Where a table's rows are, and which of the files' rows are none."""

    uris: list[str]
    deleted: pa.Table  # `file`, its name, and `row`, its number


def plain_files(table: DeltaTable) -> PlainFiles | None:
    """Return a local table's files and their deleted rows; None if Delta has to be asked."""
    about, protocol = table.metadata(), table.protocol()
    if about.partition_columns or lake.is_mapped(table):
        return None
    if not {*(protocol.reader_features or ())} <= _FEATURES:
        return None
    paths = [each.removeprefix(_LOCAL) for each in table.file_uris()]
    names = {Path(each).name for each in paths}
    if len(names) < len(paths) or len(paths) > MOST_FILES:
        return None
    if not all(_PLAIN.fullmatch(each) and Path(each).is_file() for each in paths):
        return None
    deleted = [pa.table({"file": pa.array([], pa.string()), "row": pa.array([], pa.int64())})]
    for path, flags in positions.deleted_rows(table, names):
        rows = pc.indices_nonzero(flags).cast(pa.int64())
        deleted.append(pa.table({"file": pa.repeat(path, len(rows)), "row": rows}))
    found = pa.concat_tables(deleted)
    if found.num_rows > _MOST_DELETED:
        return None
    return PlainFiles([f"{_LOCAL}{each}" for each in paths], found)
