"""`python -m benchmarks.against REV NAME`: run a workload here and at another commit, alternately.

A machine's speed varies by more than a change does. So the two commits run in pairs, in alternating
order, and the ratio is compared. Of a drain both commits' daemons drain the same backlog, on
the same servers, by this checkout's benchmark; any other workload runs as each commit has it. The
result has every single run and is saved as `results/against-NAME.json`. Without the peer;
uncommitted changes belong to "here".
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks import result, turns
from benchmarks.daemon import Daemon
from benchmarks.digest import NO_DIGESTS
from benchmarks.drain_bigtx import BigTransaction
from benchmarks.drain_inserts import Inserts
from benchmarks.drain_tpcb import TpcB
from benchmarks.drain_wide import Wide
from benchmarks.progress import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.workload import Workload

_ROOT: Final = Path(__file__).parent.parent
_DRAINS: Final[Mapping[str, Workload]] = {
    each.name: each for each in (Inserts(), TpcB(), BigTransaction(), Wide())
}
# The figures that are compared, where a result has them.
_FIGURES: Final = ("value", "of_floor", "cpu_s_per_million", "peak_rss_mb", "p50_ms", "p99_ms")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("rev")
@click.argument("name")
@click.option("--pairs", default=3, show_default=True, help="Runs of each commit.")
@click.option("--rows", type=int, help="Backlog of a drain.  [default: the workload's own]")
@click.option("--runs", default=1, show_default=True, help="Drains in each run.")
@click.option("--seconds", type=float, help="Measured at the rate, of latency.")
@click.option("--no-digests", is_flag=True, help="A drain here keeps no digests of the log.")
def main(rev: str, name: str, *, pairs: int, no_digests: bool, **given: float | None) -> None:
    """Run NAME at REV and here in turns; print the ratios, here to there, as one line of JSON."""
    with checked_out(rev) as before:
        if name in _DRAINS:
            shown = drained(before, _DRAINS[name], pairs, given["rows"], digests=not no_digests)
        else:
            shown = run_both(before, rev, name, pairs, given)
    result.keep(shown)
    click.echo(result.line(shown))


def drained(
    before: Path, workload: Workload, pairs: int, rows: float | None, *, digests: bool
) -> dict[str, Any]:
    """Drain one backlog by both commits' daemons in turns; return the ratios."""
    here = Daemon("here") if digests else Daemon("here", program=NO_DIGESTS)
    there = Daemon("there", tree=before)
    found, versions = turns.run(workload, here, there, int(rows or workload.rows), pairs)
    return {
        "name": f"against-{workload.name}{'' if digests else '-no-digests'}",
        "unit": "rows/s",
        "commit": result.commit(),
        "against": commit_of(before),
        "ratios": turns.ratios(found),
        "runs": dict(zip(("here", "there"), turns.runs(found).values(), strict=True)),
        "machine": result.machine(),
        "versions": {**result.client_versions(), **versions},
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit_of(tree: Path) -> str:
    """Return the commit of a checkout."""
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(asked, cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_both(
    before: Path, rev: str, name: str, pairs: int, given: Mapping[str, float | None]
) -> dict[str, Any]:
    """Run a workload as each commit has it, in turns; return the ratios."""
    options = [f"--{option}={value}" for option, value in given.items() if value is not None]
    here: list[dict[str, Any]] = []
    there: list[dict[str, Any]] = []
    for number in range(pairs):
        turn = [(_ROOT, here), (before, there)]
        for tree, kept in turn if number % 2 else reversed(turn):
            say(f"{name}: pair {number + 1} of {pairs}, {'here' if kept is here else rev}")
            kept.append(measured(tree, name, options))
    return compared(name, here, there)


@contextmanager
def checked_out(rev: str) -> Iterator[Path]:
    """Yield a folder with the tree of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), rev], cwd=_ROOT, check=True
        )
        try:
            yield tree
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], cwd=_ROOT, check=True
            )


def measured(tree: Path, name: str, options: list[str]) -> dict[str, Any]:
    """Return the result of one run of a tree's own benchmark, with this Python's packages."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--no-peer", *options],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},  # before what is installed
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def compared(name: str, here: list[dict[str, Any]], there: list[dict[str, Any]]) -> dict[str, Any]:
    """Return both commits' figures, and the ratio of the medians of each, here to there."""
    figures = [f for f in _FIGURES if all(run.get(f) is not None for run in (*here, *there))]
    runs = {
        figure: {"here": [run[figure] for run in here], "there": [run[figure] for run in there]}
        for figure in figures
    }
    ratios = {
        figure: round(statistics.median(both["here"]) / statistics.median(both["there"]), 3)
        for figure, both in runs.items()
        if statistics.median(both["there"])
    }
    return {
        "name": f"against-{name}",
        "unit": here[0]["unit"],
        "commit": here[0]["commit"],
        "against": there[0]["commit"],
        "ratios": ratios,
        "runs": runs,
        "machine": here[0]["machine"],
        "versions": here[0]["versions"],
        "at": here[-1]["at"],
    }


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.against")
