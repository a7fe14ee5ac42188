"""Divide what tasks make among other tasks, as bytes.

Spark moves each piece of bytes without looking into it, so what Python makes of thousands of rows
crosses the JVM as one record. What the tasks made is kept until the result is no longer used:
several jobs may read it, each a part.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.core.rdd import RDD
from pyspark.serializers import NoOpSerializer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Each piece with the number of its partition.
Pieces: TypeAlias = "Iterator[tuple[int, bytes]]"

_number: Final = struct.Struct("!q").pack


def shuffled(
    tasks: RDD[Any], do: Callable[[int, Iterable[Any]], Pieces], partitions: int
) -> RDD[bytes]:
    """Return what `do` makes of each task's items, in so many partitions.

    `do` runs in executors, and gets the number of its task.
    """
    framed = tasks.mapPartitionsWithIndex(partial(_framed, do))
    # As `RDD.partitionBy`, which pickles pieces in batches that may be of any size.
    framed._bypass_serializer = True  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    jvm: Any = tasks.context._jvm  # noqa: SLF001 - as above
    pairs = jvm.PairwiseRDD(framed._jrdd.rdd()).asJavaPairRDD()  # noqa: SLF001 - as above
    divided = pairs.partitionBy(jvm.PythonPartitioner(partitions, 0))
    return RDD(jvm.PythonRDD.valueOfPair(divided), tasks.context, NoOpSerializer())


def _framed(
    do: Callable[[int, Iterable[Any]], Pieces], task: int, items: Iterable[Any]
) -> Iterator[bytes]:
    for partition, piece in do(task, items):
        yield _number(partition)
        yield piece
