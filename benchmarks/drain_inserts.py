"""drain-inserts: how fast a backlog of single-row inserts gets from the WAL into Kafka.

A million inserts in transactions of 100 lie behind one slot; each subject drains a copy of it, in
turns: the floor and the limit to nowhere, ours and the peer into the same broker. The figure is
the median of our runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from benchmarks import debezium, floor, measure, peer_files, result, rows, servers, slots
from benchmarks.daemon import Daemon
from benchmarks.drain import Drain, measure_drain
from benchmarks.progress import say

if TYPE_CHECKING:
    from benchmarks.options import Options
    from benchmarks.rows import Preload
    from benchmarks.servers import Servers
    from benchmarks.subject import Subject

NAME = "drain-inserts"

# The client is to be measured and not the disk: nothing waits for it, and no checkpoint comes.
POSTGRES = {
    "fsync": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "shared_buffers": "1GB",
    "max_wal_size": "16GB",
    "max_slot_wal_keep_size": "-1",
    "checkpoint_timeout": "1h",
}


class _Runs:
    """The figures of all runs so far."""

    def __init__(self) -> None:
        self.floor: list[float] = []
        self.limit: list[float] = []
        self.ours: list[Drain] = []
        self.peer: list[Drain] = []


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    peer = debezium.best(peer_files.fetch()) if options.peer else None
    program = floor.pg_recvlogical()
    with servers.running(NAME, POSTGRES, keep=options.keep) as up, up.connect() as connection:
        rows.create(connection)
        backlog = rows.preload(connection, options.rows)
        runs = _Runs()
        for turn in range(1, options.runs + 1):
            _read_to_nowhere(up, connection, backlog, program, runs, turn)
            runs.ours.append(_drain(Daemon(), up, connection, backlog, f"ours_{turn}"))
            if peer is not None and turn <= options.peer_runs:
                runs.peer.append(_drain(peer, up, connection, backlog, f"peer_{turn}"))
        return _result(runs, up, backlog, program, peer)


def _read_to_nowhere(
    up: Servers,
    connection: psycopg.Connection,
    backlog: Preload,
    program: str | None,
    runs: _Runs,
    turn: int,
) -> None:
    measure.settle(5.0)
    with slots.copied(connection, f"floor_{turn}") as slot:
        read = floor.read_floor(program, up.postgres_port, slot, backlog)
    runs.floor.append(read.rows_per_second)
    say(f"floor, run {turn}: {read.rows_per_second:,.0f} rows/s")
    with slots.copied(connection, f"limit_{turn}") as slot:
        read = floor.read_limit(up.postgres_port, slot, backlog)
    runs.limit.append(read.rows_per_second)
    say(f"limit, run {turn}: {read.rows_per_second:,.0f} rows/s")


def _drain(
    subject: Subject, up: Servers, connection: psycopg.Connection, backlog: Preload, run: str
) -> Drain:
    drained = measure_drain(subject, up, connection, backlog, run)
    say(
        f"{subject.name}: {drained.rows_per_second:,.0f} rows/s,"
        f" {drained.cpu_s_per_million:.1f} CPU-s per million rows,"
        f" {drained.peak_rss_mb:.0f} MB, foreign load {drained.foreign_cores:.2f} cores"
    )
    return drained


def _result(
    runs: _Runs, up: Servers, backlog: Preload, program: str | None, peer: Subject | None
) -> dict[str, Any]:
    ours = [drained.rows_per_second for drained in runs.ours]
    peers = [drained.rows_per_second for drained in runs.peer]
    value = result.median(ours)
    cpu = result.median([drained.cpu_s_per_million for drained in runs.ours])
    assert value is not None
    assert cpu is not None
    return result.build(
        name=NAME,
        unit="rows/s",
        value=value,
        limit=result.median(runs.limit),
        floor=result.median(runs.floor),
        peer=result.median(peers),
        cpu_s_per_million=cpu,
        peak_rss_mb=max(drained.peak_rss_mb for drained in runs.ours),
        versions=up.versions | (peer_files.versions() if peer else {}),
        details={
            "best": {
                "value": round(max(ours)),
                "limit": round(max(runs.limit)),
                "floor": round(max(runs.floor)),
                "peer": round(max(peers)) if peers else None,
            },
            "rows": backlog.rows,
            "wal_bytes": backlog.wal_bytes,
            "floor_by": floor.describe(program),
            "limit_by": f"own raw reader with a nap of {floor.NAP_MS} ms between reads",
            "servers": up.settings,
            "settings": dict(Daemon().settings),
            "peer_settings": {"variant": peer.name, **peer.settings} if peer else None,
            "runs": {
                "floor": [round(each) for each in runs.floor],
                "limit": [round(each) for each in runs.limit],
                "ours": [drained.details() for drained in runs.ours],
                "peer": [drained.details() for drained in runs.peer],
            },
        },
    )
