"""The followers as a Spark app: `spark-submit jobs/follow.py --config lockstep.yaml`.

One thread per follower applies its cuts in this process; a Spark session, which starts in the
background, does the work of large ones. A follower that halts does not affect the others; the exit
code is the worst of all. Positions are only in the stores, so the app may be killed at any time and
started anywhere, even twice.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import with_config
from cdc.config.followers import chosen_names
from cdc.errors import Exit
from cdc.events import LSN
from cdc.log.follower_reports import REPORT_SECONDS, TAKE_OVER_SECONDS
from cdc.runtime import extras
from lockstep.jobs.apply import app
from lockstep.jobs.apply.reporting import Lines, ProgressPrinter
from lockstep.jobs.following_stores import run_all, run_of, start_of

if TYPE_CHECKING:
    from types import FrameType

    from cdc.config import Config

# The exit codes that a supervisor must see, the most severe first.
_GRAVEST: Final = (Exit.BUG, Exit.CONFIG, Exit.PERMISSION, Exit.UNAVAILABLE, Exit.TEMPORARY)
# Supervisors kill after ten seconds.
_END_SECONDS: Final = 8.0
STOPPING: Final = f"stopping after the current batches, within {_END_SECONDS:.0f} s"


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
@click.option("--checkpoint", hidden=True, expose_value=False, help="No effect.")
@click.option(
    "--standby", is_flag=True, help="Wait, ready, until no other copy of a follower is active."
)
@click.option(
    "--take-over-after",
    metavar="SECONDS",
    type=click.FloatRange(min=REPORT_SECONDS),
    default=TAKE_OVER_SECONDS,
    show_default=True,
    help="With --standby: how long an active copy may be silent.",
)
def main(
    config: Config,
    followers: str,
    until: LSN | None,
    take_over_after: float,
    *,
    standby: bool,
    once: bool,
    as_json: bool,
) -> Exit:
    """Keep the configured stores equal to the source: from the log, frontier by frontier."""
    if standby and (once or until is not None):
        raise click.UsageError("--standby waits for ever: omit --once and --until")
    stopping = Stopping()
    app.begin(config)
    app.suit_followers()
    # The session, which alone needs it, starts in the background.
    extras.require("following", "spark", only=("pyspark",))
    until = newest_lsn(config) if once else until
    wanted = [name.strip() for name in followers.split(",") if name.strip()]
    chosen = chosen_names(config.followers, wanted or None)
    silent = take_over_after if standby else None
    return follow(config, chosen, until, silent, stopping, Lines(as_json=as_json))


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
    names: list[str],
    until: LSN | None,
    standby_seconds: float | None,
    stopping: Stopping,
    lines: Lines,
) -> Exit:
    """Run followers until asked to stop, or until all have ended; return the most severe code."""
    what = "opening the stores" if standby_seconds is None else "a standby"
    lines.say(f"{what} of {', '.join(names)}; Spark starts meanwhile", followers=names)
    spark = start_of(config, names)
    runs = [run_of(spark, config, name, until, standby_seconds) for name in names]
    stopping.is_starting = False
    printer = ProgressPrinter(runs, lines)
    run_all(runs, stopping.requested, lambda: lines.say(STOPPING))
    printer.close()
    with suppress(Exception):  # it did not start, or the JVM may have received the same signal
        spark.session.result(0).stop()
    codes = {run.exit for run in runs}
    return next((code for code in _GRAVEST if code in codes), Exit.OK)


def newest_lsn(config: Config) -> LSN:
    """Return the LSN of the log's newest frontier."""
    from cdc.log.reader import read_frontier_tail  # noqa: PLC0415 - for --once

    tail = read_frontier_tail(config, 1)
    return tail[-1][0].lsn if tail else LSN(0)


if __name__ == "__main__":
    app.run(main)
