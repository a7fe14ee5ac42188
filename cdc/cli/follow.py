"""`cdc follow`: the followers' job, as spark-submit runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from cdc.cli.options import as_json, example, with_config
from cdc.runtime import extras
from cdc.runtime.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config


@click.command(
    epilog=example(
        "cdc follow",
        "cdc follow --followers cache,search",
        "cdc follow --once",
        "cdc follow --until 0/16E9088",
        "cdc follow --standby",
    )
)
@with_config
@click.option("--followers", metavar="NAMES", help="Separated by commas. Default: all.")
@as_json
@click.option("--once", is_flag=True, help="End when all that is in the log now is applied.")
@click.option("--until", metavar="LSN", help="End when this LSN is applied, such as 0/16E9088.")
@click.option(
    "--standby", is_flag=True, help="Wait, ready, until no other copy of a follower is active."
)
@click.option(
    "--take-over-after",
    metavar="SECONDS",
    help="With --standby: how long an active copy may be silent. Default: 8.",
)
@click.option(
    "--checkpoint",
    hidden=True,
    expose_value=False,
    help="No effect: nothing is written to disk. Accepted, because unit files may have it.",
)
def follow(
    config: Config,
    followers: str | None,
    until: str | None,
    take_over_after: str | None,
    *,
    standby: bool,
    once: bool,
    as_json: bool,
) -> None:
    """Keep the configured stores equal to the source, until stopped.

    Runs jobs/follow.py on Spark: by spark-submit where SPARK_HOME has one, with the settings of its
    conf/ (a cluster's master, say), else in a small local session. Each follower's position is in
    its store; the job may be killed at any time, and run twice without harm. SIGTERM or Ctrl-C ends
    it after the current batches, or at once while Spark starts. It prints a line where a follower's
    state changes, one when it has caught up, with the seconds that its start took, and one for each
    every 30 s; with --json objects, to standard output.

    With --standby, on another machine say, it is ready, and takes over each follower whose active
    copy is stopped or killed; a follower that halted needs you. Two active copies do no harm.
    """
    if standby and (once or until):
        raise click.UsageError("--standby waits for ever: omit --once and --until")
    from cdc.config.followers import chosen_names  # noqa: PLC0415 - not for --help

    chosen = [name.strip() for name in (followers or "").split(",") if name.strip()]
    need("cdc follow", config, chosen_names(config.followers, chosen or None))
    given = [
        *(("--followers", followers) if followers else ()),
        *(("--until", until) if until else ()),
        *(("--standby",) if standby else ()),
        *(("--take-over-after", take_over_after) if take_over_after else ()),
        *(("--once",) if once else ()),
        *(("--json",) if as_json else ()),
    ]
    become("follow", given)


def need(what: str, config: Config, followers: Iterable[str]) -> None:
    """Raise MissingExtraError where these followers need an extra that is not installed."""
    each = [config.followers[name] for name in followers]
    stores = [
        name for name in ("redis", "opensearch", "sql") if any(getattr(f, name) for f in each)
    ]
    extras.require(what, "spark", *stores, but=("pyspark",) if _spark_submit() else ())


def become(job: str, given: list[str], *command: str, spark: bool = True) -> NoReturn:
    """Replace this process by one of our jobs, with our configuration and these arguments.

    `command` is one of the job's commands; without `spark` it needs no session.
    """
    from cdc.runtime import spark as files  # noqa: PLC0415 - not for --help

    path = Path(click.get_current_context().params["config_path"]).absolute()
    script, submit = str(files.job(job)), _spark_submit() if spark else None
    given = [*command, "--config", str(path), *given]
    sys.stdout.flush()
    if submit is None:
        os.execv(sys.executable, [sys.executable, script, *given])  # noqa: S606 - our own job
    jars = ",".join(str(each) for each in files.jars(Progress()))
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.setdefault(name, sys.executable)
    conf = files.conf_options(quiet=True)
    os.execv(submit, [submit, "--jars", jars, *conf, script, *given])  # noqa: S606 - our own job


def _spark_submit() -> str | None:
    """Return the path of spark-submit where SPARK_HOME has one."""
    home = os.environ.get("SPARK_HOME")
    path = Path(home or "") / "bin" / "spark-submit"
    return str(path) if home and path.exists() else None
