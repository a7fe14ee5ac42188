"""A follower into a store's server: the floor, the sink alone, then the complete follower.

Shared by the cache and the index: each has its own server, is filled with the same rows, and its
figure is rows per second of a backlog.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from benchmarks import backlog, measure, result, rows, servers, slots
from benchmarks.follow_run import RATE, FollowRun, Store
from benchmarks.latency import POSTGRES
from benchmarks.progress import say
from cdc.events import LSN
from lockstep.sinks.contract import Applied, Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.options import Options
    from lockstep.sinks.contract import Change, Sink, Version

# The name of the replication slot and the prefix of everything else in the run.
RUN: Final = "followed"


class Server(Store, Protocol):
    """A store that runs as the workload's own server."""

    def version(self) -> str:
        """Return the server's version."""
        ...

    def alone(self, count: int) -> tuple[float, dict[str, float]]:
        """Return the floor, and the sink's figures alone; leave no data in the store.

        With at most `count` rows. The floor uses the store's own client library, in rows per
        second.
        """
        ...


class Workload(NamedTuple):
    """The store that is followed into, and its limits."""

    name: str
    server: str  # its name among the versions
    each: str  # what the store calls a row
    limit: float  # rows per second
    p50_limit_ms: float
    p99_limit_ms: float
    rows: int
    floor_by: str
    running: Callable[[Path], AbstractContextManager[Server]]  # runs it in a folder, for a block


def sink_alone(
    sink: Sink, version: Version, changes: Sequence[Change], at_once: int, store: Store, each: str
) -> dict[str, float]:
    """Return a sink's figures in one process, with no log and no Spark, `at_once` rows per write.

    `each` is what a row is called in the store.
    """
    count = len(changes)
    sink.open()
    own, server = time.process_time(), measure.total_cpu_seconds(store.pids)
    began = time.monotonic()
    sink.begin(count, [version])
    for first in range(0, count, at_once):
        sink.write(Changes((version,), changes[first : first + at_once]))
    sink.commit(Applied.beginning("alone", 1)._replace(epoch=1, lsn=LSN(count), seq=count))
    seconds = time.monotonic() - began
    own = time.process_time() - own
    server = measure.total_cpu_seconds(store.pids) - server
    sink.close()
    return {
        f"{each}s_per_second": round(count / seconds),
        f"own_cpu_us_per_{each}": round(own / count * 1e6, 2),
        f"server_cpu_us_per_{each}": round(server / count * 1e6, 2),
    }


def run(workload: Workload, options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    count, unit = options.rows or workload.rows, f"{workload.each}s/s"
    with (
        servers.running(workload.name, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
        workload.running(up.place.folder / "store") as store,
    ):
        floor, alone = store.alone(count)
        say(f"floor: {floor:,.0f} {unit}; the sink alone {alone}")
        connection.execute(rows.CREATE_TABLE)
        backlog.publish(connection, (rows.TABLE,))
        with slots.created(connection, RUN):
            shown = FollowRun(RUN, store, up, connection, options).measure(count)
        catch_up = shown.catch_up
        return result.build(
            name=workload.name,
            unit=unit,
            value=catch_up.rows_per_second,
            limit=workload.limit,
            floor=floor,
            peer=None,
            cpu_s_per_million=catch_up.cpu_s["follower"] / catch_up.rows * 1e6,
            peak_rss_mb=max(catch_up.peak_rss_mb.values()),
            versions={**up.versions, workload.server: store.version()},
            details={
                "rate": RATE,
                "p50_limit_ms": workload.p50_limit_ms,
                "p99_limit_ms": workload.p99_limit_ms,
                **shown.details(),
                "sink_alone": alone,
                "floor_by": workload.floor_by,
                "servers": up.settings,
            },
        )
