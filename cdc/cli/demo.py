"""`cdc demo`: a live database, a real Kafka, the daemon between them, and the proof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cdc.cli.options import Duration, as_json, example, next_step
from cdc.runtime import extras
from cdc.runtime.progress import Terminal

if TYPE_CHECKING:
    from cdc.playground.demo.stage import DemoOutcome


@click.command(epilog=example("cdc demo", "cdc demo --for 60s", "cdc demo --for 60s --chaos"))
@click.option("--for", "seconds", type=Duration(), help="Stop after this long, such as 60s or 5m.")
@click.option("--chaos", is_flag=True, help="Kill -9 daemon, broker, Postgres, followers in turn.")
@click.option(
    "--followers/--no-followers",
    default=True,
    help="Whether Delta Lake, Redis and OpenSearch follow: needs Spark.  [default: they do]",
)
@click.option("--seed", type=int, help="Write the same changes again.  [default: a new one]")
@click.option(
    "--rate",
    type=click.FloatRange(1, 5000),
    default=300,
    show_default=True,
    help="Changes a second.",
)
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".lockstep/demo"),
    show_default=True,
    help="Folder of the demo's servers; cleared at every start.",
)
@click.option("--keep", is_flag=True, help="Leave data and logs in the folder.")
@click.option(
    "--browser/--no-browser",
    default=None,
    help="Whether the console opens in a browser.  [default: on a desktop, but not over ssh or in"
    " CI, and not with --json]",
)
@as_json
def demo(
    *,
    seconds: float | None,
    chaos: bool,
    followers: bool,
    seed: int | None,
    rate: float,
    home: Path,
    keep: bool,
    browser: bool | None,
    as_json: bool,
) -> int:
    """Watch the changes of a live Postgres arrive in Kafka, and in three stores that follow it.

    Starts the servers, the daemon and the followers, copies the existing rows while a small social
    network and shop write to the database, and shows what arrives in the log, at which LSN, with
    what delay, and how far each follower is; its console opens in a browser. Runs until Ctrl-C or
    for the time given by --for, then proves that the topics, Delta Lake, Redis and OpenSearch equal
    the database: exit code 0 if they do, else 1. Everything that it started is stopped again. Your
    own servers are not touched.
    """
    import logging  # noqa: PLC0415 - none of these for --help
    import os  # noqa: PLC0415
    import secrets  # noqa: PLC0415
    import sys  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from cdc.playground.demo.browser import is_seen  # noqa: PLC0415
    from cdc.playground.demo.stage import DemoOptions, DemoRun, InterruptedEarly  # noqa: PLC0415
    from cdc.playground.demo.summary import closing_json, closing_lines  # noqa: PLC0415
    from cdc.playground.demo.view import LineView, ScreenView  # noqa: PLC0415

    extras.require("cdc demo", "local", *(("spark", "redis", "opensearch") if followers else ()))
    # Errors are raised or shown; log lines of the clients would only garble the screen.
    logging.getLogger("cdc").addHandler(logging.NullHandler())
    options = DemoOptions(
        home=home,
        seconds=seconds,
        chaos=chaos,
        followers=followers,
        seed=secrets.randbelow(100_000) if seed is None else seed,
        rate=rate,
        keep=keep,
        browser=not as_json and is_seen(os.environ, sys.platform) if browser is None else browser,
    )
    console = Console(stderr=as_json)
    with ScreenView(console) if console.is_terminal else LineView(console) as view:
        view.say(f"demo: seed {options.seed}, {rate:.0f} changes/s, in {home}")
        try:
            outcome: DemoOutcome = DemoRun(options, view, Terminal()).run()
        except InterruptedEarly:
            click.echo("demo: interrupted before the first change; everything is stopped", err=True)
            return 130
    if as_json:
        click.echo(closing_json(outcome))
    else:
        for line in closing_lines(outcome):
            click.echo(line)
    if outcome.failed:
        next_step(f"see {home / 'log'}; data and logs stay there until the next run")
    return int(outcome.failed)
