"""Call a function with a frame's batches in executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa


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
