"""How a history's files are written: every column has a codec, and numbers are packed."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.sinks.delta.parquet_form import GROUP_ROWS, of_history

_KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "int8": (pa.int8(), 1),
    "int64": (pa.int64(), -(2**63)),
    "date": (pa.date32(), date(1, 1, 1)),
    "time": (pa.timestamp("us", "UTC"), datetime(2026, 1, 1, tzinfo=UTC)),
    "local": (pa.timestamp("us"), datetime(2026, 1, 1)),  # noqa: DTZ001 - a time without zone
    "flag": (pa.bool_(), True),
    "real": (pa.float32(), 1.5),
    "number": (pa.decimal128(38, 2), Decimal("1.25")),
    "text": (pa.string(), "a"),
    "bytes": (pa.binary(), b"\0"),
    "list": (pa.list_(pa.list_(pa.int32())), [[1, None], []]),
    "map": (pa.map_(pa.string(), pa.string()), [("a", "b")]),
}


@pytest.mark.parametrize("name", _KINDS)
def test_every_column_is_compressed_and_numbers_are_packed(name: str) -> None:
    kind, value = _KINDS[name]
    many = GROUP_ROWS + 1
    rows = pa.table({name: pa.array([value, None] * many, kind).slice(0, many)})
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, coerce_timestamps="us", **of_history(rows.schema))
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    assert file.read().cast(rows.schema).equals(rows)
    assert file.metadata.num_row_groups == 2
    group = file.metadata.row_group(0)
    for chunk in map(group.column, range(group.num_columns)):
        is_text = chunk.physical_type == "BYTE_ARRAY"
        assert chunk.compression == ("ZSTD" if is_text else "SNAPPY")
        is_packed = chunk.physical_type in {"INT32", "INT64"}
        assert ("DELTA_BINARY_PACKED" in chunk.encodings) == is_packed
        assert not chunk.has_dictionary_page
