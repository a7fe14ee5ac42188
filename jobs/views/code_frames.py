"""The rows of a view in Python, as a Spark DataFrame: its function is called in executors.

A transform is called with the batches of its one input. A view is called once for each partition,
which has the rows of all inputs with the same values of its columns `by`; without such columns
there is one partition, and one call even if there are no rows.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING

from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.jobs.views.code import compute
from lockstep.jobs.views.plans import NEW
from lockstep.jobs.views.translating import relation
from lockstep.jobs.views.values import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lockstep.jobs.views.plans import ViewPlan


def register(spark: SparkSession, view: ViewPlan, state: str, test: str = "") -> None:
    """Make a view's rows in a state of its tables a temporary view: what `view.new` reads.

    `test` is a predicate for rows `v` of its inputs; "" for all. The tables are registered.
    """
    assert view.code is not None, "it is a view in Python"
    for made in view.made:
        register(spark, made, state)
    where = f" WHERE {test}" if test else ""
    inputs = [
        spark.sql(f"SELECT v.* FROM ({each.new if state == NEW else each.old}) AS v{where}")  # noqa: S608 - quoted
        for each in view.code.inputs
    ]
    task = view.code.task
    if not task.is_transform:
        inputs = [_together(spark, inputs, task.by)]
    schema = ", ".join(f"{quoted(name)} {kind.spark}" for name, kind in view.columns.items())
    rows = in_arrow(inputs[0], partial(compute, task), schema)
    rows.createOrReplaceTempView(quoted(relation(view.version.name, state)))


def _together(spark: SparkSession, inputs: list[DataFrame], by: tuple[str, ...]) -> DataFrame:
    """Return a struct of each input's columns, all NULL but one; partitioned by `by`."""
    from pyspark.sql.functions import col, lit, struct  # noqa: PLC0415 - it takes a second

    wanted = [
        struct(*(frame[quoted(name)] for name in frame.columns)).alias(str(at))
        for at, frame in enumerate(inputs)
    ]
    shapes = [
        frame.select(each).schema[0].dataType for frame, each in zip(inputs, wanted, strict=True)
    ]
    places = [f"by {name}" for name in by]
    parts = [
        frame.select(
            *(
                each if at == number else lit(None).cast(shapes[at]).alias(str(at))
                for at, each in enumerate(wanted)
            ),
            *(frame[quoted(name)].alias(place) for name, place in zip(by, places, strict=True)),
        )
        for number, frame in enumerate(inputs)
    ]
    if not by:  # a row of nothing, so that it is called once
        nothing = (lit(None).cast(shape).alias(str(at)) for at, shape in enumerate(shapes))
        parts.append(spark.range(1).select(*nothing))
    rows = reduce(lambda one, other: one.union(other), parts)
    rows = rows.repartition(*(col(quoted(each)) for each in places)) if by else rows.repartition(1)
    return rows.select(*(quoted(str(at)) for at in range(len(inputs))))
