"""The Spark runner: a plan's tasks by `spark-submit jobs/snapshot.py`, as a child process.

The job finds the running generation in the log and joins it. It records each finished range there,
and its progress is read from there. The job is found by the location of the package `jobs`, and
never imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from cdc import errors
from cdc.errors import CDCError, ConfigError, Exit, UnavailableError
from cdc.runtime import bugs
from cdc.snapshot.initial.topic import RangeTail

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.snapshot.initial.progress import SnapshotProgress
    from cdc.snapshot.initial.records import SnapshotPlan

# Spark takes a while to end: tasks are interrupted, the JVM stops.
_STOP_SECONDS: Final = 8.0
_MAX_CHARACTERS: Final = 4_000
# Exit codes for causes that may pass.
_PASSING: Final = {Exit.UNAVAILABLE, Exit.TEMPORARY}


def installed() -> bool:
    """Return whether Spark and our jobs are installed here."""
    return find_spec("pyspark") is not None and script() is not None


def script() -> Path | None:
    """Return the path of the job, or None."""
    spec = find_spec("lockstep.jobs")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "snapshot.py"
        if path.exists():
            return path
    return None


class SparkRunner:
    """One run of the job."""

    def __init__(self, config: Config, plan: SnapshotPlan, config_file: Path | None) -> None:
        """Submit it, with the configuration's file: secrets stay in the file."""
        job = script()
        if job is None or config_file is None:
            raise ConfigError(
                "the Spark job was not found",
                hint="install lockstep-cdc[spark]; or snapshot.runner: local",
            )
        self._following = RangeTail(config, plan.generation)
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(  # noqa: S603 - our own job
            [*_submit(), str(job), "--json", "--config", str(config_file.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            start_new_session=True,
        )

    def turn(self, seconds: float, progress: SnapshotProgress) -> bool:
        """Process new records of its ranges; return whether it has ended. Raises how it failed."""
        time.sleep(seconds)
        for record in self._following.take():
            progress.finished(record)
        code = self._process.poll()
        if code:
            raise failure(code, self._stdout, self._stderr)
        return code == 0

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._following.close()
        self._stdout.close()
        self._stderr.close()


def failure(code: int, stdout: IO[bytes], stderr: IO[bytes]) -> CDCError:
    """Return why the job failed: the error that it printed, or where in the code it ended."""
    if error := _printed_error(_end_of(stdout)):
        return error
    trace = bugs.places(_end_of(stderr))
    if code < 0 or code in _PASSING or code == Exit.FAILED:
        return UnavailableError(
            f"the Spark job ended with code {code}",
            hint=f"it is submitted again with the ranges that it has left; it failed: {trace}",
        )
    return ConfigError(f"the Spark job ended with code {code}", hint=f"it failed: {trace}")


def _end_of(file: IO[bytes]) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _MAX_CHARACTERS))
    return file.read().decode(errors="replace").strip()


def _printed_error(output: str) -> CDCError | None:
    """Return the error that the job has printed as JSON; None where it has printed none."""
    try:
        found = _decode(output[max(0, output.rfind("{")) :])
    except msgspec.MsgspecError:
        return None
    kind = getattr(errors, found.error, CDCError)
    return kind(found.what, hint=found.hint)


class _PrintedError(msgspec.Struct):
    error: str
    what: str
    hint: str


_decode: Final = msgspec.json.Decoder(_PrintedError).decode


def _submit() -> list[str]:
    """Return the command that runs a job: spark-submit of SPARK_HOME, or Python itself."""
    home = os.environ.get("SPARK_HOME")
    if home and (Path(home) / "bin" / "spark-submit").exists():
        return [str(Path(home) / "bin" / "spark-submit")]
    return [sys.executable]
