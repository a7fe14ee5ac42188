"""Build all documents of a mirror in executors, in one pass over its tables.

Spark joins each row with the rows below it, level by level up to the root; so each task has some
roots, by a hash of the columns that join them to their children, with every row that their
documents may need. A task makes the documents of a few thousand roots at a time and writes them
with the sink, as the tasks of a large cut do (`jobs.apply.large`).

Rows are joined by text: any two values that are equal as terms (`jobs.documents.values`) have the
same text, and some others may. Which rows belong to which is decided by the task, by the terms.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it

from lockstep.jobs.copying.driving import translated
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.documents import documents

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from lockstep.jobs.documents.kinds import DocumentBuild, DocumentKind
    from lockstep.sinks.contract import Sink
    from lockstep.sinks.documents import DocumentNode, Row, Terms

# How many roots' documents are in memory at a time, and the bytes of a batch of their rows.
_AT_ONCE: Final = 2_000
_ARROW_BYTES: Final = 8 << 20
# The stored bytes of a task.
_TASK_BYTES: Final = 32 << 20
_NUMBERS: Final = ("tinyint", "smallint", "int", "bigint", "float", "double", "boolean", "decimal")


def build(spark: SparkSession, builds: Iterable[DocumentBuild], sink: Sink, size: int) -> int:
    """Write every document with the sink; return how many were new to the store.

    `size` is that of the tables, in bytes.
    """
    session = spark.newSession()  # these settings are for this job only
    tasks = max(spark.sparkContext.defaultParallelism, -(-size // _TASK_BYTES))
    for name, value in {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.caseSensitive": "true",
        "spark.sql.shuffle.partitions": str(tasks),
        "spark.sql.autoBroadcastJoinThreshold": "-1",  # so that joins divide the roots
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(_AT_ONCE),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(_ARROW_BYTES),
    }.items():
        session.conf.set(name, value)
    new = 0
    try:
        for each in builds:
            kind = each.kind()
            if kind.root.table in each.places:
                rows = _joined(session, each, kind, kind.root).select("item")
                written = in_arrow(rows, partial(_written, each, sink), "new long")
                new += sum(row.new for row in written.collect())
    except (PySparkException, Py4JJavaError) as error:
        raise translated(error) from error
    return new


def _joined(
    spark: SparkSession, build: DocumentBuild, kind: DocumentKind, node: DocumentNode
) -> DataFrame:
    """Return a node's rows, each an `item` of its columns and its children's items.

    With the text of the columns that join it to its parent, `own0` and so on.
    """
    path, version = build.places[node.table]
    stored = spark.read.format("delta").option("versionAsOf", version).load(path)
    types = dict(stored.dtypes)
    if delta_layout.CURRENT in types:
        stored = stored.where(F.col(delta_layout.CURRENT))
    elif delta_layout.DELETED in types:
        stored = stored.where(~F.coalesce(F.col(delta_layout.DELETED), F.lit(False)))  # noqa: FBT003 - Spark's
    columns = [
        (_column(name) if name in types else F.lit(None).cast("string")).alias(f"v{at}")
        for at, name in enumerate(kind.rows[node].columns)
    ]
    text = partial(
        _text, types, {each.name: each.type for each in build.versions[node.table].columns}
    )
    own = [text(name).alias(f"own{at}") for at, name in enumerate(node.own)]
    below = _below(build, node)
    parents = [
        text(name).alias(f"to{number}_{at}")
        for number, child in below
        for at, name in enumerate(child.parents)
    ]
    rows = stored.select(F.struct(*columns).alias("row"), *own, *parents)
    for number, child in below:
        names = [f"own{at}" for at in range(len(child.own))]
        children = _joined(spark, build, kind, child).dropna(subset=names)
        items = children.groupBy(*names).agg(F.collect_list("item").alias(f"child{number}"))
        for at, name in enumerate(names):
            items = items.withColumnRenamed(name, f"to{number}_{at}")
        rows = rows.join(items, [f"to{number}_{at}" for at in range(len(names))], "left")
    fields = ["row", *(f"child{number}" for number, _ in below)]
    return rows.select(F.struct(*fields).alias("item"), *(f"own{at}" for at in range(len(own))))


def _below(build: DocumentBuild, node: DocumentNode) -> list[tuple[int, DocumentNode]]:
    """Return the children whose tables are there, with their numbers."""
    return [(at, each) for at, each in enumerate(node.children) if each.table in build.places]


def _text(types: Mapping[str, str], kinds: Mapping[str, str], name: str) -> Column:
    """Return a value's text for joins; NULL for NULL, which equals nothing."""
    exact = F.col(delta_layout.EXACT).getItem(name)
    stored = types[name].partition("(")[0]
    if stored not in _NUMBERS and kinds[name] != "numeric":
        shown = F.hex(_column(name)) if stored == "binary" else _column(name).cast("string")
        return F.coalesce(F.concat(F.lit("t"), shown), F.concat(F.lit("x"), exact))
    # Plus zero: there is a negative one, which equals it.
    value = F.coalesce(_column(name).try_cast("double"), exact.try_cast("double")) + F.lit(0.0)
    return F.coalesce(F.concat(F.lit("n"), value.cast("string")), F.concat(F.lit("x"), exact))


def _column(name: str) -> Column:
    return F.col(f"`{name.replace('`', '``')}`")


# -- in executors ----------------------------------------------------------------------------------


def _written(
    build: DocumentBuild, sink: Sink, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the documents of a task's roots."""
    kind, new = build.kind(), 0
    with closing(sink):
        for batch in batches:
            for first in range(0, batch.num_rows, _AT_ONCE):
                some = _Rows(build, kind, batch.slice(first, _AT_ONCE).column(0))
                made = zip(some.roots, documents(kind.root, some.roots, some.find), strict=True)
                new += sink.write(kind.complete(made, build.applied))
    yield pa.RecordBatch.from_pydict({"new": pa.array([new], pa.int64())})


class _Rows:
    """Some roots, and all rows below them."""

    def __init__(self, build: DocumentBuild, kind: DocumentKind, items: pa.StructArray) -> None:
        self._build, self._kind = build, kind
        self._found: dict[DocumentNode, dict[bytes, Row]] = {}
        self.roots = self._read(kind.root, items)

    def find(
        self, node: DocumentNode, columns: tuple[str, ...], wanted: frozenset[Terms]
    ) -> Iterator[Row]:
        """Yield the rows whose `columns` are among `wanted`: a `Find`."""
        rows = self._found.get(node, {}).values()
        return (row for row in rows if row.of(columns) in wanted)

    def _read(self, node: DocumentNode, items: pa.StructArray) -> list[Row]:
        row, *children = items.flatten()
        reader = self._kind.rows[node]
        batch = pa.RecordBatch.from_arrays(row.flatten(), names=list(reader.columns))
        rows = list(reader.read(batch))
        self._found.setdefault(node, {}).update({each.key: each for each in rows})
        for (_, child), below in zip(_below(self._build, node), children, strict=True):
            self._read(child, below.flatten())
        return rows
