"""The Spark session of our jobs: one that is active already, else one with settings that fit.

What decides about values is set in every session of ours: UTC, dates as they are (no rebase to the
Julian calendar), timestamps in microseconds, no speculation (of two copies of a task one fences the
other). How large and where is whoever submits to say: spark-submit's settings stay as they are.
Without spark-submit it is a small local one.

Delta's jars must be known before the JVM starts: spark-submit's `--jars` names them
(`cdc spark jars`), or `jars` here where there is no spark-submit.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from cdc.errors import ConfigError
from cdc.local.java import OLDEST, system_java
from cdc.local.spark import DELTA, NO_MEMORY, VALUES
from jobs import source_worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Without spark-submit.
_SMALL: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.adaptive.enabled": "false",
}
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
_JAVA: Final = f"-XX:+UseSerialGC {NO_MEMORY} -Xss2m -Dlog4j2.configurationFile={_LOGGING.as_uri()}"
# One compiler instead of two halves the CPU time of short sessions, and slows down long ones.
_QUICK_JAVA: Final = f"{_JAVA} -XX:TieredStopAtLevel=1"
_WORKER: Final = """\
#!/bin/sh
all=$PYTHONPATH
PYTHONPATH=
IFS=:
for each in $all; do
  case $each in
    */pyspark.zip | */py4j-*.zip) ;;
    *) PYTHONPATH=$PYTHONPATH${{PYTHONPATH:+:}}$each ;;
  esac
done
export PYTHONPATH
if [ "$1" = -m ] && [ "$2" = {module} ]; then
  exec {python} -P {worker}
fi
exec {python} "$@"
"""
# A failed task is tried so often in all, in a local session too.
_TRIES: Final = 4


def session(
    name: str,
    *,
    cores: int = 2,
    short: bool = False,
    delta: bool = True,
    jars: Sequence[Path] = (),
    more: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session of our own; all but the name counts where none is active yet.

    `cores`, `short` (minutes at most) and `jars` count where this starts the JVM.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        own = active.newSession()
        for key, value in VALUES.items():
            own.conf.set(key, value)
        return own
    settings = {**VALUES, "spark.speculation": "false", **(DELTA if delta else {})}
    made = None
    if not submitted():
        _expect_java()
        if "PYSPARK_PYTHON" not in os.environ:  # workers would take the first python3 of PATH
            made = _python()
            os.environ["PYSPARK_PYTHON"] = str(made)
        # Else Spark looks this machine's name up, and warns of what it finds.
        os.environ.setdefault("SPARK_LOCAL_IP", _SMALL["spark.driver.host"])
        settings |= {"spark.master": f"local[{cores},{_TRIES}]", **_SMALL}
        settings["spark.driver.extraJavaOptions"] = _QUICK_JAVA if short else _JAVA
        if jars:
            settings["spark.jars"] = ",".join(map(str, jars))
    builder = SparkSession.Builder().appName(name)
    for key, value in (settings | dict(more or {})).items():
        builder = builder.config(key, value)
    try:
        started = builder.getOrCreate()
    except BaseException:
        if made is not None:
            shutil.rmtree(made.parent, ignore_errors=True)
        raise
    made = made or _python_of(started)
    if made is not None:
        delete_with_jvm(started, made.parent)
    return started


def _python_of(started: SparkSession) -> Path | None:
    """Have a local session of spark-submit start its workers as ours does, if by our Python."""
    context = started.sparkContext
    if not (context.master or "").startswith("local"):
        return None
    if shutil.which(context.pythonExec) != shutil.which(sys.executable):
        return None
    made = _python()
    context.pythonExec = str(made)
    return made


def delete_with_jvm(spark: SparkSession, folder: Path) -> None:
    """Have a folder deleted when the JVM ends, as it does whichever way this process ends."""
    jvm = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way
    assert jvm is not None, "it has been started"
    hooks = jvm.org.apache.spark.util.ShutdownHookManager
    hooks.registerShutdownDeleteDir(jvm.java.io.File(str(folder)))


def _expect_java() -> None:
    """Raise ConfigError where Spark would say no more than that its gateway has ended."""
    if system_java() is None:
        raise ConfigError(
            f"Spark needs Java {OLDEST} or newer, and none is on PATH or in JAVA_HOME",
            hint="install one (Debian and Ubuntu: apt-get install openjdk-17-jre-headless), or name"
            " it in JAVA_HOME",
        )


def submitted() -> bool:
    """Return whether spark-submit started this process, and with it the JVM."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _python() -> Path:
    """Return what workers are started by: our Python, with pyspark from where it is installed.

    Spark puts an archive of pyspark first, which has no compiled modules: each process would
    compile them anew, for most of a second. A streaming source's worker answers before it imports
    any of it (`jobs.source_worker`): who has not answered in ten seconds is given up.
    """
    path = Path(tempfile.mkdtemp(prefix="lockstep-python-")) / "python"
    worker = Path(__file__).with_name("source_worker.py")
    text = _WORKER.format(
        module=source_worker.MODULE,
        python=shlex.quote(sys.executable),
        worker=shlex.quote(str(worker)),
    )
    path.write_text(text, "utf-8")
    path.chmod(0o755)
    return path
