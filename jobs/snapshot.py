"""The initial snapshot as a Spark app: `spark-submit jobs/snapshot.py --config lockstep.yaml`.

Joins a snapshot that `cdc run` or `cdc snapshot --initial` takes: its tasks run here. If one is due
and no process takes it, this job does, with the exported snapshot held in the driver, and the
daemon streams on from there. Submitted again after a kill it continues with the remaining ranges,
as long as the exported snapshot exists; otherwise it starts a new generation.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import print_json
from cdc.config import load
from cdc.errors import CDCError, StoppedError
from cdc.runtime import bugs
from cdc.runtime import spark as files
from cdc.runtime.progress import Progress as Quiet
from cdc.snapshot.initial import due, topic
from cdc.snapshot.initial import session as initial
from cdc.snapshot.initial.progress import Report, SnapshotProgress
from cdc.source.export import is_export_running
from cdc.source.pinned import connect_for_rows
from lockstep.jobs.apply import app  # noqa: F401 - explains what is not installed, so before what imports Spark
from lockstep.jobs.copying.driving import InSession
from lockstep.jobs.spark.session import session

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.snapshot.initial.host import HostProcess
    from cdc.snapshot.initial.records import SnapshotPlan

_PRINT_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 1.0
_SHORT_BYTES: Final = 1 << 30
_TERMINATED: Final = 128 + signal.SIGTERM


class Driver:
    """The host process of a snapshot's coordinator (`cdc.snapshot.initial.host.HostProcess`)."""

    def __init__(self, config_file: Path) -> None:
        self.config_file: Path | None = config_file
        self.stopping = False
        self._printed = ("", 0.0)

    def beat(self) -> None:
        """A driver has no health checks to answer."""

    def snapshotting(self, reason: str, report: Report | None = None) -> None:
        """Print a new reason at once, and figures at an interval."""
        printed, at = self._printed
        now = time.monotonic()
        if (reason != printed and report is None) or now - at >= _PRINT_SECONDS:
            self._printed = (reason, now)
            click.echo(f"snapshot: {reason}", err=True)

    def stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's
        """Handle a signal: stop at the next turn."""
        self.stopping = True


@click.command(
    epilog="\b\nExample:\n  spark-submit jobs/snapshot.py --config lockstep.yaml\n"
    '  spark-submit --master spark://host:7077 --py-files lockstep.zip --jars "$(cdc spark jars)"'
    " \\\n      jobs/snapshot.py --config lockstep.yaml --json"
)
@click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), default=Path("lockstep.yaml"),
    show_default=True, help="The configuration file; the driver alone reads it.",
)  # fmt: skip
@json_option
def main(path: Path, *, as_json: bool) -> None:
    """Copy tables' existing rows, on Spark: join a running snapshot, or take one."""
    bugs.install()
    driver = Driver(path.absolute())
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, driver.stop)
    files.end_with_jvm()
    began = time.monotonic()
    try:
        outcome = run(driver, path.absolute())
    except CDCError as error:
        if as_json:
            print_json({"error": type(error).__name__, "what": error.what, "hint": error.hint})
        click.echo(f"snapshot: {error.what}\nwhat to do: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except StoppedError:
        sys.exit(_TERMINATED)
    outcome["seconds"] = round(time.monotonic() - began, 1)
    if as_json:
        print_json(outcome)
    else:
        click.echo(f"snapshot: {outcome['outcome']}", err=True)


def run(driver: Driver, path: Path) -> dict[str, Any]:
    """Join the running snapshot, or take the one that is due; return the outcome."""
    config = load(path)
    while True:
        state = due.state(config)
        if state is None or state.stage == "done":
            return {"outcome": "no snapshot is due", "generation": state and state.generation}
        known = topic.read(config)
        with closing(connect_for_rows(config)) as connection:
            alive = is_export_running(connection, config)
        if not alive or known.plan is not None or driver.stopping:
            break
        driver.snapshotting("waiting for the coordinator's plan")
        time.sleep(_POLL_SECONDS)
    with closing(_Sparks(config, path)) as sparks:
        if alive and known.plan is not None:
            return _join(driver, sparks, known.plan, known)
        initial.take(config, driver, sparks.runner)
    state = due.state(config)
    return {"outcome": "taken", "generation": state and state.generation}


class _Sparks:
    """The session, started when there is something to run."""

    def __init__(self, config: Config, path: Path) -> None:
        self._config, self._path = config, path
        self._session: SparkSession | None = None
        self._is_ours = False

    def runner(self, plan: SnapshotPlan, _: HostProcess | None, left: list[int]) -> InSession:
        """Start copying the remaining ranges of a plan."""
        if self._session is None:
            from pyspark.sql import SparkSession  # noqa: PLC0415 - after what explains its absence

            delta = any(table.kind == "direct" for table in plan.tables)
            jars = files.jars(Quiet()) if delta and not files.submitted() else ()
            name = f"lockstep snapshot {plan.pipeline}"
            self._is_ours = SparkSession.getActiveSession() is None
            short = sum(table.bytes for table in plan.tables) < _SHORT_BYTES
            self._session = session(name, cores=plan.tasks, short=short, delta=delta, jars=jars)
        return InSession(self._session, self._config, self._path, plan, left)

    def close(self) -> None:
        """End the session, unless it was there before."""
        if self._session is not None and self._is_ours:
            self._session.stop()


def _join(
    driver: Driver, sparks: _Sparks, plan: SnapshotPlan, known: topic.InitialLog
) -> dict[str, Any]:
    """Copy the remaining ranges of a running snapshot's plan."""
    done = known.done(plan)
    left = {
        number % plan.tasks
        for number, each in enumerate(plan.ranges())
        if ("rows", each.table, each.number) not in done
    }
    progress = SnapshotProgress(plan, time.monotonic())
    progress.restart(known.ranges)
    driver.snapshotting(f"joining generation {plan.generation}")
    with closing(_Stopping(sparks.runner(plan, None, sorted(left)))) as running:
        while not driver.stopping and not running.runner.turn(_POLL_SECONDS, progress):
            report = progress.report(time.monotonic())
            driver.snapshotting(report.words(), report)
    if driver.stopping:
        raise StoppedError
    report = progress.report(time.monotonic())
    return {"outcome": f"joined: {report.words()}", **report.body()}


class _Stopping:
    """Stops a runner at the end of a block."""

    def __init__(self, runner: InSession) -> None:
        self.runner = runner
        self.close = runner.stop


if __name__ == "__main__":
    main()
