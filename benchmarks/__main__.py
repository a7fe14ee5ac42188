"""`python -m benchmarks [NAME...]`: run the named workloads, or all of them.

Progress goes to stderr. Each workload prints its result as one line of JSON on stdout and saves it
under `results/`; a run with fewer rows, runs, seconds or megabytes prints its line and saves
nothing, unless --save is given. PEER=0 in the environment skips the peer.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from benchmarks import (
    console,
    costs,
    costs_page,
    demo,
    digest,
    encryption,
    follow_delta,
    follow_delta_large,
    follow_growth,
    follow_many,
    follow_redis,
    follow_restart,
    follow_search,
    key_search,
    latency,
    many_tables,
    memory_bigtx,
    past,
    redis_truncate,
    resnapshot_live,
    result,
    snapshot_delta,
    snapshot_log,
    view_backfill,
    view_refresh,
    view_timeline,
    view_tpch,
)
from benchmarks.drain_bigtx import BigTransaction
from benchmarks.drain_inserts import Inserts
from benchmarks.drain_tpcb import TpcB
from benchmarks.drain_wide import Wide
from benchmarks.drains import run
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.rows import ROWS_PER_TRANSACTION
from cdc.errors import CDCError

if TYPE_CHECKING:
    from collections.abc import Callable


class Benchmark(NamedTuple):
    """What one name runs, and how many minutes the pinned run takes with and without the peer.

    Measured on two cores; printed before the run starts.
    """

    run: Callable[[Options], dict[str, Any]]
    minutes: float
    minutes_alone: float


BENCHMARKS = {
    Inserts.name: Benchmark(partial(run, Inserts()), 4.5, 3),
    TpcB.name: Benchmark(partial(run, TpcB()), 4.5, 3),
    BigTransaction.name: Benchmark(partial(run, BigTransaction()), 6, 4.5),
    Wide.name: Benchmark(partial(run, Wide()), 3.5, 2),
    memory_bigtx.NAME: Benchmark(memory_bigtx.run, 7, 7),
    snapshot_log.NAME: Benchmark(snapshot_log.run, 10, 6),
    latency.NAME: Benchmark(latency.run, 6, 3),
    resnapshot_live.NAME: Benchmark(resnapshot_live.run, 3.5, 3.5),
    snapshot_delta.NAME: Benchmark(snapshot_delta.run, 5, 5),
    follow_redis.NAME: Benchmark(follow_redis.run, 5, 5),
    follow_search.NAME: Benchmark(follow_search.run, 5, 5),
    follow_delta.NAME: Benchmark(follow_delta.run, 9, 5),
    follow_delta_large.NAME: Benchmark(follow_delta_large.run, 40, 40),
    follow_many.NAME: Benchmark(follow_many.run, 8, 8),
    follow_restart.NAME: Benchmark(follow_restart.run, 8, 8),
    follow_growth.HISTORY.name: Benchmark(follow_growth.run_history, 8, 8),
    follow_growth.KEYLESS.name: Benchmark(follow_growth.run_keyless, 8, 8),
    follow_growth.DOCUMENTS.name: Benchmark(follow_growth.run_documents, 15, 15),
    redis_truncate.NAME: Benchmark(redis_truncate.run, 8, 8),
    **{name: Benchmark(run_, 8, 8) for name, run_ in past.RUNS.items()},
    key_search.NAME: Benchmark(key_search.run, 10, 10),
    many_tables.NAME: Benchmark(many_tables.run, 8, 8),
    view_backfill.NAME: Benchmark(view_backfill.run, 8, 8),
    view_refresh.NAME: Benchmark(view_refresh.run, 20, 20),
    view_timeline.NAME: Benchmark(view_timeline.run, 6, 6),
    view_tpch.NAME: Benchmark(view_tpch.run, 10, 10),
    console.NAME: Benchmark(console.run, 11, 11),
    digest.NAME: Benchmark(digest.run, 8, 8),
    encryption.NAME: Benchmark(encryption.run, 4, 4),
    demo.NAME: Benchmark(demo.run, 5, 5),
    costs.NAME: Benchmark(costs.run, 2, 2),
}
_PINNED = Options()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar=f"[{'|'.join(BENCHMARKS)}]...")
@click.option("--rows", type=int, help="Backlog of a drain.  [default: the workload's own]")
@click.option("--runs", default=_PINNED.runs, show_default=True, help="Drains of ours.")
@click.option("--peer-runs", default=_PINNED.peer_runs, show_default=True, help="And of the peer.")
@click.option("--rate", default=_PINNED.rate, show_default=True, help="Commits a second.")
@click.option("--seconds", default=_PINNED.seconds, show_default=True, help="Measured at the rate.")
@click.option(
    "--warm-up-seconds", default=_PINNED.warm_up_seconds, show_default=True, help="Before that."
)
@click.option("--megabytes", default=_PINNED.megabytes, show_default=True, help="Of memory-bigtx.")
@click.option("--tables", default=_PINNED.tables, show_default=True, help="Of follow-many.")
@click.option("--stages", is_flag=True, help="Of latency: split it into stages; another result.")
@click.option("--no-peer", is_flag=True, help="Leave the peer out, as PEER=0 does.")
@click.option("--keep", is_flag=True, help="Leave the servers' folder and all logs.")
@click.option("--save", is_flag=True, help="Keep the result of a shortened run as well.")
def main(names: tuple[str, ...], *, no_peer: bool, save: bool, **given: Any) -> None:  # noqa: ANN401 - click checks
    """Run pinned workloads and print one line of JSON for each."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise click.UsageError(f"no workload {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    if (given["rows"] or 0) % ROWS_PER_TRANSACTION:
        raise click.UsageError(f"--rows come in transactions of {ROWS_PER_TRANSACTION}")
    peer = not no_peer and os.environ.get("PEER") != "0"
    options = dataclasses.replace(_PINNED, peer=peer, **given)
    pinned = options == dataclasses.replace(
        _PINNED, peer=options.peer, keep=options.keep, stages=options.stages
    )
    chosen = names or tuple(BENCHMARKS)
    if pinned:
        say(estimate(chosen, peer=peer))
    for name in chosen:
        say(f"{name}: starting")
        try:
            shown = BENCHMARKS[name].run(options)
        except CDCError as error:
            click.echo(f"{name}: {error}", err=True)
            sys.exit(error.exit_code)
        if pinned or save:
            result.keep(shown)
            if name == costs.NAME:
                costs_page.write(shown)
        click.echo(result.line(shown))


def estimate(names: tuple[str, ...], *, peer: bool) -> str:
    """Return how long the named workloads take as pinned."""
    minutes = {
        name: BENCHMARKS[name].minutes if peer else BENCHMARKS[name].minutes_alone for name in names
    }
    each = ", ".join(f"{name} {many:g}" for name, many in minutes.items())
    return f"this takes about {sum(minutes.values()):.0f} minutes ({each})"


if __name__ == "__main__":
    # When a supervisor ends this process, leave no subject running: exiting ends the blocks that
    # started them, and each block stops its subject.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main(prog_name="python -m benchmarks")
