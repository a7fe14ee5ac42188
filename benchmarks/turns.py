"""Drains of one backlog by two daemons in turns, on the same servers.

A machine's speed changes by the minute, by more than a change of the code does. So each pair of
drains is compared with itself, the order within pairs alternates, and the figure is the median of
the pairs' ratios.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks import backlog, drains, servers
from benchmarks.drain import Drain, measure_drain
from benchmarks.progress import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.daemon import Daemon
    from benchmarks.workload import Workload

# The figures of a drain that are compared.
FIGURES: Final = ("rows_per_second", "cpu_s_per_million", "peak_rss_mb")


class Pair(NamedTuple):
    """Two drains, one right after the other."""

    first: Drain
    second: Drain

    def ratio(self, figure: str) -> float:
        """Return the first one's figure by the second one's."""
        return float(getattr(self.first, figure) / getattr(self.second, figure))


def run(
    workload: Workload, first: Daemon, second: Daemon, rows: int, pairs: int, *, keep: bool = False
) -> tuple[list[Pair], Mapping[str, str]]:
    """Return the pairs, and the servers' versions."""
    found = []
    with (
        servers.running(workload.name, drains.POSTGRES, keep=keep) as up,
        up.connect() as connection,
    ):
        backlog.create(connection, workload, rows)
        loaded = backlog.preload(connection, workload, rows)
        for number in range(1, pairs + 1):
            drained = {}
            turn = [("first", first), ("second", second)]
            for which, daemon in turn if number % 2 else reversed(turn):
                drained[which] = measure_drain(
                    daemon, up, connection, workload, loaded, f"{which}_{number}"
                )
                say(
                    f"pair {number} of {pairs}, {daemon.name}:"
                    f" {drained[which].rows_per_second:,.0f} rows/s,"
                    f" {drained[which].cpu_s_per_million:.2f} CPU-us a row"
                )
            found.append(Pair(drained["first"], drained["second"]))
        return found, up.versions


def ratios(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the median of the pairs' ratios, by figure."""
    return {
        figure: round(statistics.median(pair.ratio(figure) for pair in pairs), 3)
        for figure in FIGURES
    }


def runs(pairs: Sequence[Pair]) -> dict[str, list[dict[str, Any]]]:
    """Return every single drain."""
    return {
        "first": [pair.first.details() for pair in pairs],
        "second": [pair.second.details() for pair in pairs],
    }
