"""The archive as a Spark app: `spark-submit jobs/archive.py --config lockstep.yaml`.

Keeps every record of the log in one Delta table, cut after cut. Small cuts are written in this
process, large ones in executors; Spark starts with the first large one. The position is only in the
table, so the app may be killed at any time and started anywhere, even twice.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import with_config
from cdc.events import LSN
from cdc.operate.followers import ARCHIVE
from lockstep.jobs.apply import app
from lockstep.jobs.apply.reporting import Lines, ProgressPrinter
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.archiving.running import Archiving, opened, with_remedy
from lockstep.jobs.follow import STOPPING, Stopping, newest_lsn
from lockstep.jobs.following_stores import run_all
from lockstep.jobs.spark.starting import session_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.errors import Exit


@click.command(
    "archive",
    epilog="\b\nExample:\n"
    '  spark-submit --jars "$(cdc spark jars)" "$(cdc spark app archive)" --config lockstep.yaml\n'
    "  python jobs/archive.py --once",
)
@with_config
@click.option(
    "--once", is_flag=True, help="End when everything that was in the log at the start is archived."
)
@click.option(
    "--until",
    metavar="LSN",
    type=LSN.parse,
    help="End when this LSN is archived, such as 0/16E9088.",
)
@json_option
def main(config: Config, until: LSN | None, *, once: bool, as_json: bool) -> Exit:
    """Archive the log: every record of every topic, exactly once, frontier by frontier."""
    stopping = Stopping()
    app.begin(config)
    opened(config)
    until = newest_lsn(config) if once else until
    lines = Lines(as_json=as_json)
    lines.say(f"archiving to {config.archive.path}", path=config.archive.path)

    @cache
    def spark() -> SparkSession:
        return session_of(f"lockstep archive of {config.pipeline}", config, ())

    run = FollowerRun(config, ARCHIVE, "delta", Archiving(config, spark, until), remedy=with_remedy)
    stopping.is_starting = False
    printer = ProgressPrinter([run], lines)
    run_all([run], stopping.requested, lambda: lines.say(STOPPING))
    printer.close()
    if spark.cache_info().currsize:
        with suppress(Exception):  # the JVM may have received the same signal
            spark().stop()
    return run.exit


if __name__ == "__main__":
    app.run(main)
