"""The Spark session of our jobs: the active one, or one with suitable settings; and its end.

Settings that affect values are set in every session of ours: UTC, unmodified dates (no rebase to
the Julian calendar), timestamps in microseconds, no speculation (of two copies of a task one fences
the other). The user decides on size and place: spark-submit's settings are kept. Without
spark-submit it is a small local session.

Delta's jars must be known before the JVM starts: from spark-submit's `--jars` (`cdc spark jars`),
or from `jars` here without spark-submit.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.errors import CDCError, ConfigError, Exit, StoppedError
from cdc.runtime import class_archive
from cdc.runtime import spark as files
from cdc.runtime.java import OLDEST, system_java
from cdc.runtime.spark import DELTA, NO_MEMORY, VALUES, submitted
from lockstep.jobs.spark import source_worker

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping, Sequence

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
    # VACUUM lists in as many tasks: 10,000 by default, which take minutes of two cores.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.adaptive.enabled": "false",
    # 100 by default: a follower of some views would compile each of its queries again in every cut.
    "spark.sql.codegen.cache.maxEntries": "2000",
}
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
_JAVA: Final = f"-XX:+UseSerialGC {NO_MEMORY} -Xss2m -Dlog4j2.configurationFile={_LOGGING.as_uri()}"
# One JIT compiler instead of two halves the CPU time of short sessions, but slows long ones.
QUICK_JAVA: Final = f"{_JAVA} -XX:TieredStopAtLevel=1"
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
# How many attempts a task gets in total, in a local session too.
_TRIES: Final = 4
# How long a signal to several processes may take to reach this one.
_SIGNAL_SECONDS: Final = 1.0


class SparkEndedError(CDCError):
    """The session's JVM has ended: this process can do nothing further with Spark."""

    exit_code = Exit.TEMPORARY

    def __init__(self) -> None:
        super().__init__(
            "Spark's JVM has ended",
            hint="start the job again: it continues from its stores. If memory is short, see"
            " spark.driver.memory",
        )


def session(
    name: str,
    *,
    cores: int = 2,
    short: bool = False,
    delta: bool = True,
    jars: Sequence[Path] = (),
    more: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session; all arguments except the name apply only if none is active yet.

    `cores`, `short` (at most minutes) and `jars` apply if this call starts the JVM. Raises
    SparkEndedError if the JVM ends while it starts.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return _with_values(active)
    settings = {**VALUES, "spark.speculation": "false", **(DELTA if delta else {})}
    if not submitted():
        _expect_java()
        if "PYSPARK_PYTHON" not in os.environ:  # workers would take the first python3 of PATH
            os.environ["PYSPARK_PYTHON"] = _python()
        # Otherwise Spark looks up this machine's name, and logs a warning about the result.
        os.environ.setdefault("SPARK_LOCAL_IP", _SMALL["spark.driver.host"])
        settings |= {"spark.master": f"local[{cores},{_TRIES}]", **_SMALL}
        settings["spark.driver.extraJavaOptions"] = " ".join(
            (QUICK_JAVA if short else _JAVA, *_shared_classes())
        )
        if jars:
            # Not by `spark.jars`, whose classes a JVM does not take from an archive.
            settings["spark.driver.extraClassPath"] = ":".join(map(str, jars))
    builder = SparkSession.Builder().appName(name)
    for key, value in (settings | dict(more or {})).items():
        builder = builder.config(key, value)
    try:
        started = builder.getOrCreate()
    except Exception as error:
        if has_ended(error):
            raise SparkEndedError from error
        raise
    _give_python(started)
    return started


def _shared_classes() -> tuple[str, ...]:
    archive = files.classes()
    return () if archive is None else class_archive.using(archive)


def _with_values(started: SparkSession) -> SparkSession:
    """Return a new session with its own settings, and with those that affect values."""
    own = started.newSession()
    for key, value in VALUES.items():
        own.conf.set(key, value)
    return own


@contextmanager
def work_session(
    started: SparkSession, title: str, stopping: threading.Event
) -> Iterator[SparkSession]:
    """Make a session for one piece of work, active in this thread; Spark's UI shows the title.

    Raises SparkEndedError if the JVM ends meanwhile, unless that is because of `stopping`.
    """
    try:
        own = _with_values(started)
        assert own._jvm is not None, "it has been started"  # noqa: SLF001 - as below
        classes = SparkSession._get_j_spark_session_class(own._jvm)  # noqa: SLF001 - PySpark has no other way
        classes.setActiveSession(own._jsparkSession)  # noqa: SLF001 - as above
        own.sparkContext.setJobDescription(title)
        yield own
    except (Py4JError, ConnectionError) as error:
        if not has_ended(error):
            raise
        # A signal to all processes may end the JVM before this one has read its own.
        if stopping.wait(_SIGNAL_SECONDS):
            raise StoppedError from error
        raise SparkEndedError from error
    finally:
        # DataFrames are in cycles, and what they hold of the JVM is freed with them: followers
        # collect too seldom for its memory (`jobs.apply.app.suit_followers`).
        gc.collect()


def has_ended(error: Exception) -> bool:
    """Return whether the JVM has ended: it threw no exception, and no longer answers."""
    # If it ends during a call there is no answer, which py4j reports as a plain Py4JError.
    silent = type(error) is Py4JError and "Trace:" not in str(error)
    # It ended before it reported where it listens.
    unborn = isinstance(error, PySparkException) and error.getCondition() == "JAVA_GATEWAY_EXITED"
    return silent or unborn or isinstance(error, Py4JNetworkError | ConnectionError)


def _give_python(started: SparkSession) -> None:
    """Make a local spark-submit session with our Python start its workers as our own does."""
    context = started.sparkContext
    is_local = (context.master or "").startswith("local")
    if is_local and shutil.which(context.pythonExec) == shutil.which(sys.executable):
        context.pythonExec = _python()


def _expect_java() -> None:
    """Raise ConfigError if Java is missing; Spark would only report that its gateway exited."""
    if system_java() is None:
        raise ConfigError(
            f"Spark needs Java {OLDEST} or newer, and none is on PATH or in JAVA_HOME",
            hint="install one (Debian and Ubuntu: apt-get install openjdk-17-jre-headless), or name"
            " it in JAVA_HOME",
        )


def with_jars(name: str, *, cores: int = 2) -> SparkSession:
    """Return the active session, or a small local one with Delta's jars, fetched if missing."""
    from cdc.runtime.progress import Terminal  # noqa: PLC0415 - of the extra `spark`

    return session(name, cores=cores, jars=() if submitted() else files.jars(Terminal()))


@cache
def _python() -> str:
    """Return the program that starts workers: our Python, with the installed pyspark.

    Spark puts an archive of pyspark first, which has no compiled modules: each process would
    compile them again, for most of a second. A streaming source's worker answers before it imports
    pyspark (`jobs.spark.source_worker`): Spark gives up a worker that has not answered in ten
    seconds.

    It is a file in memory, which is there as long as this process, however it ends.
    """
    worker = Path(__file__).with_name("source_worker.py")
    text = _WORKER.format(
        module=source_worker.MODULE,
        python=shlex.quote(sys.executable),
        worker=shlex.quote(str(worker)),
    )
    number = os.memfd_create("lockstep-python")
    os.write(number, text.encode())
    return f"/proc/{os.getpid()}/fd/{number}"
