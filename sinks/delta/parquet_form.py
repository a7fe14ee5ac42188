"""How the files are written whose rows are found in memory.

Rows of a history are read one by one when they end, each at the cost of its row group: so these are
small, too small for dictionaries. Numbers are packed, which is smaller than compressed and read
much faster; texts are compressed.

https://parquet.apache.org/docs/file-format/data-pages/encodings/
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

# In files of a history.
GROUP_ROWS: Final = 1_000
PLAIN: Final = {"compression": "snappy"}
_PACKED: Final = {"INT32", "INT64"}
_TEXT: Final = "BYTE_ARRAY"


@lru_cache(maxsize=64)
def of_history(schema: pa.Schema) -> dict[str, Any]:
    """Return the options of `write_table` for a history's files with this schema."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    columns = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    leaves = {each.path: each.physical_type for each in map(columns.column, range(len(columns)))}
    return {
        "compression": {
            path: "zstd" if kind == _TEXT else "snappy" for path, kind in leaves.items()
        },
        "column_encoding": {
            path: "DELTA_BINARY_PACKED" for path, kind in leaves.items() if kind in _PACKED
        },
        "use_dictionary": False,
        "row_group_size": GROUP_ROWS,
    }
