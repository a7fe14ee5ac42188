"""What spark-submit needs from us: jars that Spark lacks, and our own code for a cluster.

The jars are the lock's section `spark`, fetched like the servers' jars; their versions match the
Spark that `lockstep-cdc[spark]` installs. The code is `cdc` and `lockstep` as one zip; their
dependencies must be installed where executors run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cdc.errors import LocalStackError
from cdc.runtime import class_archive, parent
from cdc.runtime.artifacts import ArtifactCache, default_cache, lock_sections
from cdc.runtime.java import system_java

if TYPE_CHECKING:
    from cdc.runtime.progress import Progress

_SECTION: Final = "spark"
_PACKAGES: Final = ("cdc", "lockstep", "lockstep.jobs", "lockstep.sinks")
# Settings of the session: those that affect values.
VALUES: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
# Settings of the application, fixed once it runs, where Delta's jars are available.
DELTA: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
# Without it, jobs would wait for ever for a Spark thread that ran out of memory.
NO_MEMORY: Final = "-XX:+ExitOnOutOfMemoryError"
_LEFT_OUT: Final = {".pyc", ".pyo"}
_TRIAL_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 1.0


def submitted() -> bool:
    """Return whether spark-submit started this process, and with it the JVM."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def end_with_jvm() -> None:
    """Stop this process, as SIGTERM does, once the JVM ends that has started it.

    spark-submit is that JVM: who ends it would leave this process, which goes on without it.
    """
    if not submitted():
        return
    jvm = os.getppid()

    def jvm_ends() -> None:
        while os.getppid() == jvm:
            time.sleep(_LOOK_SECONDS)

    parent.end_with(jvm_ends)


def jars(progress: Progress) -> list[Path]:
    """Return the jars, fetched where they are not in the cache."""
    folder = ArtifactCache(default_cache(), progress).fetch(_SECTION)
    return [folder / each.file_name for each in lock_sections()[_SECTION]]


def classes() -> Path | None:
    """Return where the archive of the classes is that our own sessions load; None for nowhere.

    It lasts as long as the virtual environment, whose jars it names.
    """
    java = system_java()
    if java is None or sys.prefix == sys.base_prefix:
        return None
    jars = ":".join((str(folder_of("pyspark")), version("pyspark"), *coordinates()))
    name = class_archive.file_name(_SECTION, java, jars)
    return Path(sys.prefix) / "share" / "lockstep" / name


def make_classes(progress: Progress) -> None:
    """Make that archive, unless there is one; the file is empty where that fails."""
    archive = classes()
    if archive is None:
        return

    def make(target: Path) -> None:
        progress.step(_SECTION, "its first start here: preparing faster ones")
        for outdated in archive.parent.glob(f"{_SECTION}-*.jsa"):
            outdated.unlink()
        trial = [sys.executable, "-m", "lockstep.jobs.spark.trial", str(target)]
        try:
            subprocess.run(trial, check=True, capture_output=True, timeout=_TRIAL_SECONDS)
        except (subprocess.SubprocessError, FileNotFoundError):
            target.unlink(missing_ok=True)
        target.touch()

    ArtifactCache(archive.parent, progress).derive(archive.name, make)


def coordinates() -> list[str]:
    """Return the same jars as Maven coordinates, `group:name:version`."""
    return [f"{each.group}:{each.name}:{each.version}" for each in lock_sections()[_SECTION]]


def conf(*, quiet: bool = False) -> dict[str, str]:
    """Return the settings that a Spark session needs to read and write our mirrors.

    With `quiet` also those of the driver's JVM for our own jobs: what Spark logs, and that it ends
    when memory runs out.
    """
    found = {**VALUES, **DELTA}
    if quiet:
        found["spark.driver.defaultJavaOptions"] = NO_MEMORY
        logging = folder_of("lockstep.jobs") / "spark" / "log4j2-submit.properties"
        found["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={logging.as_uri()}"
    return found


def conf_options(*, quiet: bool = False) -> list[str]:
    """Return the same settings as spark-submit's arguments."""
    found = conf(quiet=quiet).items()
    return [part for name, value in found for part in ("--conf", f"{name}={value}")]


def job(name: str) -> Path:
    """Return the file of a job, for spark-submit."""
    return folder_of("lockstep.jobs") / f"{name}.py"


def pack(target: Path) -> int:
    """Write our packages into a zip for `--py-files`; return how many files it holds."""
    part = target.with_name(f"{target.name}.part")
    # In a checkout the packages below `lockstep` are links, which are not followed; installed, they
    # are found twice.
    files: dict[Path, Path] = {}
    for package in _PACKAGES:
        folder = folder_of(package)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in _LEFT_OUT:
                files[Path(*package.split(".")) / path.relative_to(folder)] = path
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files.items():
            archive.write(path, name)
    part.replace(target)
    return len(files)


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LocalStackError(
            f"the package {package} is not installed",
            hint="pip install 'lockstep-cdc[spark]'; in a checkout: make setup",
        )
    return Path(next(iter(spec.submodule_search_locations)))
