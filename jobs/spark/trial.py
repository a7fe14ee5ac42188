"""A short Spark session that leaves the archive of the classes that later ones load.

    python -m lockstep.jobs.spark.trial ARCHIVE

It does what all followers begin with: a Delta table is written, and read by SQL.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from pyspark import SparkContext

from cdc.runtime import class_archive
from cdc.runtime import spark as files
from cdc.runtime.progress import Progress
from lockstep.jobs.spark.session import QUICK_JAVA, session

if TYPE_CHECKING:
    import subprocess

    from pyspark.sql import SparkSession


def main(archive: Path) -> None:
    """Run the session; return when its JVM has written the archive and ended."""
    java = {"spark.driver.extraJavaOptions": " ".join((QUICK_JAVA, *class_archive.making(archive)))}
    started = session("trial", short=True, jars=files.jars(Progress()), more=java)
    gateway = cast("Any", SparkContext._gateway)  # noqa: SLF001 - PySpark has no other way
    jvm: subprocess.Popen[bytes] = gateway.proc
    with TemporaryDirectory() as folder:
        _work(started, f"{folder}/table")
    started.stop()
    assert jvm.stdin is not None, "the JVM ends when it is closed"
    jvm.stdin.close()
    jvm.wait()


def _work(spark: SparkSession, table: str) -> None:
    rows = spark.range(100).selectExpr("id", "CAST(id % 7 AS string) AS name")
    rows.write.format("delta").save(table)
    spark.read.format("delta").load(table).createOrReplaceTempView("t")
    grouped = "SELECT name, count(*) AS n FROM t GROUP BY name HAVING count(*) > 1"
    spark.sql(grouped).createOrReplaceTempView("o")
    spark.sql("SELECT o.* FROM o JOIN t ON o.n = t.id ORDER BY 1").toArrow()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
