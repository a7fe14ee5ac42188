"""The followers as a Spark app: `spark-submit jobs/follow.py --config lockstep.yaml`.

One session, one streaming query per follower; until Spark has started, followers apply small cuts
in this process. A follower that halts does not affect the others; the exit code is the worst of
all. Positions are only in the stores, so the app may be killed at any time and started anywhere,
even twice.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import with_config
from cdc.config.followers import chosen_names
from cdc.errors import Exit
from cdc.events import LSN
from lockstep.jobs.apply import app
from lockstep.jobs.apply.reporting import Lines, ProgressPrinter
from lockstep.jobs.apply.running import Run
from lockstep.jobs.spark.starting import SparkStart

if TYPE_CHECKING:
    from types import FrameType

    from cdc.config import Config

# The exit codes that a supervisor must see, the most severe first.
_GRAVEST: Final = (Exit.BUG, Exit.CONFIG, Exit.PERMISSION, Exit.UNAVAILABLE, Exit.TEMPORARY)
_TURN_SECONDS: Final = 0.2
# Supervisors kill after ten seconds.
_END_SECONDS: Final = 8.0


@click.command(
    "follow",
    epilog="\b\nExample:\n"
    '  spark-submit --jars "$(cdc spark jars)" "$(cdc spark app follow)" --config lockstep.yaml\n'
    "  python jobs/follow.py --followers cache,search",
)
@with_config
@click.option("--followers", default="", help="Their names, separated by commas. Default: all.")
@click.option(
    "--once", is_flag=True, help="End when everything that was in the log at the start is applied."
)
@click.option(
    "--until",
    metavar="LSN",
    type=LSN.parse,
    help="End when this LSN is applied, such as 0/16E9088.",
)
@json_option
@click.option(
    "--checkpoint", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for Spark's scratch data, one subfolder per session. Default: the system's"
    " directory for temporary files.",
)  # fmt: skip
def main(
    config: Config,
    followers: str,
    until: LSN | None,
    checkpoint: Path | None,
    *,
    once: bool,
    as_json: bool,
) -> Exit:
    """Keep the configured stores equal to the source: from the log, frontier by frontier."""
    stopping = Stopping()
    path = app.begin(config)
    until = _end(config) if once else until
    wanted = [name.strip() for name in followers.split(",") if name.strip()]
    chosen = chosen_names(config.followers, wanted or None)
    return follow(config, path, chosen, until, checkpoint, stopping, Lines(as_json=as_json))


class Stopping:
    """The handler of SIGTERM and SIGINT, from the job's start on.

    Before the followers start, the process just exits. Later they finish their batches; a batch
    that takes too long is interrupted, as by a kill, and repeated at the next start. A JVM that
    still starts, which may take minutes on a busy machine, ends with its standard input.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.is_starting = True
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._on_signal)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if self.is_starting:
            os._exit(Exit.OK)
        if not self.requested.is_set():
            self.requested.set()
            ending = threading.Timer(_END_SECONDS, os._exit, (Exit.OK,))
            ending.daemon = True
            ending.start()


def follow(
    config: Config,
    path: Path,
    names: list[str],
    until: LSN | None,
    folder: Path | None,
    stopping: Stopping,
    lines: Lines,
) -> Exit:
    """Run followers until asked to stop, or until all have ended; return the most severe code."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    lines.say(f"opening the stores of {', '.join(names)}; Spark starts meanwhile", followers=names)
    spark = SparkStart(
        partial(app.session_of, f"lockstep followers of {config.pipeline}", config, names),
        {name for name in names if not config.followers[name].documents},
    )
    runs = [_run(spark, config, path, name, until, folder) for name in names]
    stopping.is_starting = False
    printer = ProgressPrinter(runs, lines)
    run_all(runs, stopping.requested, lines)
    printer.close()
    with suppress(Exception):  # it did not start, or the JVM may have received the same signal
        spark.session.result(0).stop()
    codes = {run.exit for run in runs}
    return next((code for code in _GRAVEST if code in codes), Exit.OK)


def run_all(runs: list[Run], stop: threading.Event, lines: Lines) -> None:
    """Run them until all have ended, or until asked to stop."""
    threads = [threading.Thread(target=run.run, name=run.name) for run in runs]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if stop.wait(_TURN_SECONDS):
            lines.say(f"stopping after the current batches, within {_END_SECONDS:.0f} s")
            for run in runs:
                run.stop()
            for thread in threads:
                thread.join()


def _run(
    spark: SparkStart,
    config: Config,
    path: Path,
    name: str,
    until: LSN | None,
    folder: Path | None,
) -> Run:
    from lockstep.jobs.apply import stores  # noqa: PLC0415 - with the session
    from lockstep.jobs.apply.following import Following  # noqa: PLC0415 - as above
    from lockstep.jobs.apply.following_documents import DocumentsFollowing  # noqa: PLC0415 - as above
    from lockstep.jobs.generations.repairing import Repair  # noqa: PLC0415 - as above

    follower = config.followers[name]
    sink = stores.sink(config, name, follower)
    following = (
        DocumentsFollowing(config, name, sink, spark=spark.now, until=until)
        if follower.documents
        else Following(spark, config, path, name, sink, until=until, folder=folder)
    )
    repair = Repair(config, path, name, spark.session.result)
    return Run(config, name, stores.kind(follower), following, repair=repair)


def _end(config: Config) -> LSN:
    """Return the LSN of the log's newest frontier."""
    from cdc.log.reader import read_frontier_tail  # noqa: PLC0415 - for --once

    tail = read_frontier_tail(config, 1)
    return tail[-1][0].lsn if tail else LSN(0)


if __name__ == "__main__":
    app.run(main)
