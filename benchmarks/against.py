"""`python -m benchmarks.against REV NAME`: run a workload here and at another commit, alternately.

A machine's speed varies by more than a change does. So the two commits run in pairs, in alternating
order, and the ratio is compared. The result has every single run and is saved as
`results/against-NAME.json`. Without the peer; uncommitted changes belong to "here".
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks import result
from benchmarks.progress import say

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path(__file__).parent.parent
# The figures that are compared, where a result has them.
_FIGURES: Final = ("value", "of_floor", "cpu_s_per_million", "peak_rss_mb", "p50_ms", "p99_ms")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("rev")
@click.argument("name")
@click.option("--pairs", default=3, show_default=True, help="Runs of each commit.")
@click.option("--rows", type=int, help="Backlog of a drain.  [default: the workload's own]")
@click.option("--runs", default=1, show_default=True, help="Drains in each run.")
@click.option("--seconds", type=float, help="Measured at the rate, of latency.")
def main(rev: str, name: str, *, pairs: int, **given: float | None) -> None:
    """Run NAME at REV and here in turns; print the ratios, here to there, as one line of JSON."""
    options = [f"--{option}={value}" for option, value in given.items() if value is not None]
    here: list[dict[str, Any]] = []
    there: list[dict[str, Any]] = []
    with checked_out(rev) as before:
        for number in range(pairs):
            turn = [(_ROOT, here), (before, there)]
            for tree, kept in turn if number % 2 else reversed(turn):
                say(f"{name}: pair {number + 1} of {pairs}, {'here' if kept is here else rev}")
                kept.append(measured(tree, name, options))
    shown = compared(name, here, there)
    result.keep(shown)
    click.echo(result.line(shown))


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
