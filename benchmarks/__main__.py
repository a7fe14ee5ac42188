"""`python -m benchmarks [NAME...]`: run the named workloads, or all of them.

Progress goes to stderr. Each workload prints its result as one line of JSON on stdout and keeps it
under `results/`; a try with fewer rows, runs or seconds prints its line and keeps nothing, unless
--save is given. PEER=0 in the environment leaves the peer out.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import click

from benchmarks import drain_inserts, latency, result
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.rows import ROWS_PER_TRANSACTION
from cdc.errors import CDCError

WORKLOADS = {module.NAME: module.run for module in (drain_inserts, latency)}
_PINNED = Options()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar=f"[{'|'.join(WORKLOADS)}]...")
@click.option("--rows", default=_PINNED.rows, show_default=True, help="Backlog of a drain.")
@click.option("--runs", default=_PINNED.runs, show_default=True, help="Drains of ours.")
@click.option("--peer-runs", default=_PINNED.peer_runs, show_default=True, help="And of the peer.")
@click.option("--rate", default=_PINNED.rate, show_default=True, help="Commits a second.")
@click.option("--seconds", default=_PINNED.seconds, show_default=True, help="Measured at the rate.")
@click.option(
    "--warm-up-seconds", default=_PINNED.warm_up_seconds, show_default=True, help="Before that."
)
@click.option("--no-peer", is_flag=True, help="Leave the peer out, as PEER=0 does.")
@click.option("--keep", is_flag=True, help="Leave the servers' folder and all logs.")
@click.option("--save", is_flag=True, help="Keep the result of a shortened run as well.")
def main(names: tuple[str, ...], *, no_peer: bool, save: bool, **given: float) -> None:
    """Run pinned workloads and print one line of JSON for each."""
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise click.UsageError(f"no workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
    if given["rows"] % ROWS_PER_TRANSACTION:
        raise click.UsageError(f"--rows come in transactions of {ROWS_PER_TRANSACTION}")
    peer = not no_peer and os.environ.get("PEER") != "0"
    options = dataclasses.replace(_PINNED, peer=peer, **given)  # type: ignore[arg-type] # click checks
    pinned = options == dataclasses.replace(_PINNED, peer=options.peer, keep=options.keep)
    for name in names or WORKLOADS:
        say(f"{name}: starting")
        try:
            shown = WORKLOADS[name](options)
        except CDCError as error:
            click.echo(f"{name}: {error}", err=True)
            sys.exit(error.exit_code)
        if pinned or save:
            result.keep(shown)
        click.echo(result.line(shown))


if __name__ == "__main__":
    # Ended by a supervisor, leave no subject behind: the blocks that started them end them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main(prog_name="python -m benchmarks")
