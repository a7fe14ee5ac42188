"""Call a function with a frame's batches in executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def in_arrow(
    frame: DataFrame,
    do: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
) -> DataFrame:
    """Return `frame.mapInArrow(do, schema)`, which requires pandas and does not use it."""
    function = UserDefinedFunction(do, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column = function(*(frame[name] for name in frame.columns))
    found = frame._jdf.mapInArrow(column._jc, False, None)  # noqa: FBT003, SLF001 - as pyspark's own
    return DataFrame(found, frame.sparkSession)


def streamed(frame: DataFrame) -> Iterator[pa.Table]:
    """Yield a frame's rows, whose columns are numbered; of one partition at a time."""
    numbered = frame.toDF(*(str(at) for at in range(len(frame.columns))))
    for row in in_arrow(numbered, _packed, "rows binary").toLocalIterator():
        yield unpacked(bytes(row.rows)).rename_columns(frame.columns)


def packed(rows: pa.Table) -> bytes:
    """Return rows as bytes, for a column of a frame."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def unpacked(data: bytes) -> pa.Table:
    """Return the rows that `packed` made these bytes of."""
    with pa.ipc.open_stream(data) as stream:
        return stream.read_all()


def _packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        data = packed(pa.Table.from_batches([batch]))
        yield pa.RecordBatch.from_pydict({"rows": pa.array([data], pa.binary())})
