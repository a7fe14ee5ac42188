"""The job from Delta's documentation: a stream's changes into a table, one MERGE per batch.

A separate program: `python -m benchmarks.merge_job BROKERS TOPIC PATH COUNT`; prints one JSON
object. Each batch takes the newest change of each key, then runs MERGE, with deletion vectors on.
The time runs from the end of the first batch to the end of the last, so that the JVM's start-up
work does not count.

https://docs.delta.io/delta-update/#upsert-from-streaming-queries-using-foreachbatch
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Final

from delta.tables import DeltaTable
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it

from cdc.runtime import spark as files
from cdc.runtime.progress import Progress
from lockstep.jobs.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_EVENT: Final = (
    "op string, before struct<id: bigint>, source struct<seq: bigint>, after struct<id: bigint,"
    " k: int, payload: string, amount: decimal(12,2), created_at: timestamp>"
)
_BATCH_EVENTS: Final = 300_000
_COLUMNS: Final = ("id", "k", "payload", "amount", "created_at")


def main() -> None:
    brokers, topic, path, count = sys.argv[1:]
    spark = session("merge", jars=files.jars(Progress()), more={"spark.driver.memory": "3g"})
    spark.sql(
        f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    ends: dict[int, float] = {}

    def merge(batch: DataFrame, number: int) -> None:
        event = F.from_json(F.col("value").cast("string"), _EVENT)
        key = F.coalesce(F.col("e.after.id"), F.col("e.before.id"))
        newest = Window.partitionBy("key").orderBy(F.col("e.source.seq").desc())
        changes = (
            batch.where("value IS NOT NULL")
            .select(event.alias("e"))
            .select("e", key.alias("key"))
            .withColumn("place", F.row_number().over(newest))
            .where("place = 1")
            .select("e.op", F.col("e.source.seq").alias("_seq"), "key", "e.after.*")
        )
        values: dict[str, str | Column] = {name: f"s.{name}" for name in (*_COLUMNS, "_seq")}
        (
            DeltaTable.forPath(spark, path)
            .alias("t")
            .merge(changes.alias("s"), "t.id = s.key")
            .whenMatchedDelete("s.op = 'd'")
            .whenMatchedUpdate(set=values)
            .whenNotMatchedInsert("s.op <> 'd'", values)
            .execute()
        )
        ends[number] = time.monotonic()

    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        query = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", brokers)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", _BATCH_EVENTS)
            .load()
            .writeStream.foreachBatch(merge)
            .option("checkpointLocation", scratch)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    done = [(ends[each["batchId"]], each["numInputRows"]) for each in query.recentProgress
            if each["numInputRows"]]  # fmt: skip
    (first_at, first), (last_at, _) = done[0], done[-1]
    rows = sum(many for _, many in done)
    # A batch may read its rows more than once, so only the total number of rows is exact.
    seconds, counted = last_at - first_at, int(count) * (rows - first) / rows
    if not seconds:
        seconds, counted = last_at - began, float(count)
    print(
        json.dumps(
            {
                "rows_per_second": round(counted / seconds, 1),
                "seconds_per_batch": round(seconds / max(len(done) - 1, 1), 2),
                "batches": len(done),
                "rows": int(count),
            }
        )
    )
    spark.stop()


if __name__ == "__main__":
    main()
