"""`python -m benchmarks.view_recompute CONFIG FOLLOWER OUT RUNS`: compute views completely.

What the cost of a cut is compared with: each view's query over the newest mirrors, which are read
as Delta tables, in a session that is warm, written in place of what a Delta table held. No state
before it is read, nothing is compared, and no frontier is kept. Prints one line of JSON: CPU and
wall seconds of each run but the first, the JVM's included, for all views together and for each.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import orjson

from benchmarks.family import Family
from cdc.config.check import load
from lockstep.jobs.documents.mirror_cuts import LogVersions
from lockstep.jobs.reading_as_of import session
from lockstep.jobs.views import functions
from lockstep.jobs.views.cuts import ViewCuts
from lockstep.jobs.views.plans import NEW, plan
from lockstep.jobs.views.translating import relation
from lockstep.jobs.views.values import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.views.plans import ViewPlan


def main(config_path: str, follower: str, out: str, runs: str) -> None:
    """Compute the follower's views; print what it costs."""
    config = load(config_path)
    spark = session("recompute")
    spark.conf.set("spark.sql.ansi.enabled", "true")
    functions.register(spark)
    plans = _registered(spark, config, follower)
    family, found = Family(os.getpid()), list[dict[str, dict[str, float]]]()
    for _ in range(1 + int(runs)):
        found.append({each.name: _computed(spark, each, out, family) for each in plans})
    print(orjson.dumps(found[1:]).decode())


def _registered(spark: SparkSession, config: Config, follower: str) -> list[ViewPlan]:
    """Return the plans, whose tables are the mirrors at their newest frontier."""
    cuts = ViewCuts(config, follower, lambda: spark)
    cut = cuts.cut(None)
    assert cut is not None, "the mirrors have a frontier"
    lsn = cut.after.applied.lsn
    versions = LogVersions(config)(lsn)
    plans = [plan(name, config.views, versions) for name in cuts.names]
    for name in {table for each in plans for table in each.tables}:
        place = cuts.place(cut.after.versions, versions[name])
        assert place is not None, "the table has rows"
        rows = spark.read.format("delta").option("versionAsOf", place.version).load(place.path)
        rows.createOrReplaceTempView(quoted(relation(name, NEW)))
    return plans


def _computed(spark: SparkSession, view: ViewPlan, out: str, family: Family) -> dict[str, float]:
    family.look()
    used, began = family.cpu_seconds, time.monotonic()
    rows = spark.sql(view.new)
    rows.write.format("delta").mode("overwrite").save(f"{out}/{view.name}")
    family.look()
    return {"cpu_s": family.cpu_seconds - used, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main(*sys.argv[1:])
