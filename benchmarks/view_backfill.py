"""view-backfill: all rows of a view, built by executors on one and on two Spark workers.

The view and the tables of `view-refresh`. A follower of the view is submitted to a standalone
cluster of one worker, which has one processor, and another one to a cluster of two of them. Each
builds the view (`first_s`, from its first Spark job until readers find the view), which also starts
executors and their Python. Then a column is added to a table, for which a view is built again, now
by processes that run: `seconds` is from the mirrors' frontier to that of the view, and
`of_one_worker` divides that of one worker by that of two. The figure is rows of the view per second
on two workers. The memory is the largest of any process; `driver_rss_mb` is that of the follower's
own, which must not have the rows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from benchmarks import result, servers, slots, view_refresh
from benchmarks.daemon import config_path
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.follow_server import RUN
from benchmarks.latency import POSTGRES
from benchmarks.programs import follower_on
from benchmarks.progress import say
from benchmarks.view_run import ViewRun
from tests.fixtures.spark_cluster import standalone

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAME: Final = "view-backfill"
LIMIT: Final = 1.5
_ROWS: Final = 10_000_000
_VIEW: Final = "totals"
# What makes a follower build the view again: a column, and rows from which the log knows it. They
# are more than the canaries that may come meanwhile, so that a wait ends with them.
_CHANGES: Final = {
    name: [
        f"ALTER TABLE customers ADD COLUMN {name} int",
        f"UPDATE customers SET {name} = 1 WHERE id < 1000",
    ]
    for name in ("one", "two")
}


class Build(NamedTuple):
    """Two builds on a cluster."""

    rows: int  # of the view
    first_s: float
    seconds: float
    cpu_s: float
    driver_rss_mb: float
    jvm_rss_mb: float
    worker_rss_mb: float  # of executors' Python


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    size = options.rows or _ROWS
    with servers.running(NAME, POSTGRES, keep=options.keep) as up, up.connect() as connection:
        shown = ViewRun(up, connection, view_refresh.TABLES, view_refresh.VIEWS)
        with slots.created(connection, RUN), shown.mirrored(("one", "two")):
            say(f"{size:,} orders")
            for statements in view_refresh.filling(size):
                shown.execute(statements)
            shown.wait_for_mirrors()
            one, two = (_built(up, shown, *each) for each in (("one", 1), ("two", 2)))
        return result.build(
            name=NAME,
            unit="rows/s",
            value=two.rows / two.seconds,
            limit=None,
            floor=None,
            peer=None,
            cpu_s_per_million=two.cpu_s / two.rows * 1e6,
            peak_rss_mb=max(two.driver_rss_mb, two.jvm_rss_mb, two.worker_rss_mb),
            versions=up.versions,
            details={
                "of_one_worker": round(one.seconds / two.seconds, 2),
                "of_one_worker_limit": LIMIT,
                "first_of_one_worker": round(one.first_s / two.first_s, 2),
                "orders": size,
                "one_worker": one._asdict(),
                "two_workers": two._asdict(),
            },
        )


def _built(up: Servers, shown: ViewRun, name: str, workers: int) -> Build:
    """Return the figures of a follower's builds on so many workers of one core each."""
    folder = up.place.folder / f"spark-{workers}"
    folder.mkdir()
    with standalone(folder, *[1] * workers, pinned=True) as cluster:
        with follower_on(cluster, config_path(up.place, RUN), "--followers", name) as follower:
            family = Family(follower.pid)
            executing = [Family(each.pid) for each in cluster.workers]
            shown.wait_for(name, follower, family, *executing)
            first = time.time()
            family.wait_until_quiet()
            shown.count_canaries()
            shown.execute(_CHANGES[name])
            shown.wait_for_mirrors()
            seconds = shown.wait_for(name, follower, family, *executing)
        first_s = first - _first_job(folder)
    found = Build(
        rows=shown.check(_VIEW, name),
        first_s=round(first_s, 2),
        seconds=round(seconds, 2),
        cpu_s=round(sum(each.cpu_seconds for each in (family, *executing)), 2),
        driver_rss_mb=family.peaks_mb.get("python", 0.0),
        jvm_rss_mb=max(_peak(each, "main", "java") for each in (family, *executing)),
        worker_rss_mb=max(_peak(each, "python", "worker") for each in executing),
    )
    say(f"{workers} of one core: {found}")
    return found


def _peak(family: Family, *kinds: str) -> float:
    return max(family.peaks_mb.get(kind, 0.0) for kind in kinds)


def _first_job(folder: Path) -> float:
    """Return when the first job has started, in seconds since the epoch, by Spark's event log."""
    logs = [each for each in folder.rglob("*") if each.name.startswith(("app-", "events_"))]
    found = [
        int(orjson.loads(line)["Submission Time"])
        for log in logs
        if log.is_file()
        for line in log.read_bytes().splitlines()
        if b'"SparkListenerJobStart"' in line
    ]
    if not found:
        raise BenchmarkError("Spark's event log has no job", hint=f"see {folder}")
    return min(found) / 1_000
