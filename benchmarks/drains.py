"""A drain workload: ours, the floor, the limit and the peer, alternately, in one run.

The backlog is in the WAL after one slot; each subject drains a copy of the slot: floor and limit
discard what they read, ours and the peer write to the same broker. The figure is the median of our
runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks import backlog, debezium, floor, measure, peer_files, result, servers, slots
from benchmarks.daemon import Daemon
from benchmarks.drain import Drain, measure_drain
from benchmarks.progress import say

if TYPE_CHECKING:
    import psycopg

    from benchmarks.backlog import Backlog
    from benchmarks.options import Options
    from benchmarks.servers import Servers
    from benchmarks.subject import Subject
    from benchmarks.workload import Workload

# The client is measured and not the disk: nothing waits for the disk, and no checkpoint runs.
POSTGRES = {
    "fsync": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "shared_buffers": "1GB",
    "max_wal_size": "16GB",
    "max_slot_wal_keep_size": "-1",
    "checkpoint_timeout": "1h",
}


# Ours with open transactions streamed: spilled to our disk until their commit.
STREAMED = Daemon("lockstep-streamed", {"streaming": "on"})


@dataclass
class Runs:
    """The figures of all runs so far; floor and limit in rows per second."""

    nowhere: dict[str, list[float]] = field(default_factory=dict)
    ours: list[Drain] = field(default_factory=list)
    streamed: list[Drain] = field(default_factory=list)
    peer: list[Drain] = field(default_factory=list)


class Drains:
    """One workload's runs, on their own servers."""

    def __init__(self, workload: Workload, options: Options) -> None:
        self._workload = workload
        self._options = options
        self._rows = options.rows or workload.rows
        self._program = floor.pg_recvlogical()
        self._peer = debezium.best(peer_files.fetch()) if options.peer else None
        self._runs = Runs()

    def run(self) -> dict[str, Any]:
        """Run the workload and return its result."""
        workload, options = self._workload, self._options
        with (
            servers.running(workload.name, POSTGRES, keep=options.keep) as up,
            up.connect() as connection,
        ):
            backlog.create(connection, workload, self._rows)
            loaded = backlog.preload(connection, workload, self._rows)
            for turn in range(1, options.runs + 1):
                self._to_nowhere(up, connection, loaded, turn)
                ours = self._drain(Daemon(), up, connection, loaded, f"ours_{turn}")
                self._runs.ours.append(ours)
                if workload.in_progress:
                    streamed = self._drain(STREAMED, up, connection, loaded, f"streamed_{turn}")
                    self._runs.streamed.append(streamed)
                if self._peer is not None and turn <= options.peer_runs:
                    peer = self._drain(self._peer, up, connection, loaded, f"peer_{turn}")
                    self._runs.peer.append(peer)
            return self._result(up, loaded)

    def _to_nowhere(
        self, up: Servers, connection: psycopg.Connection, loaded: Backlog, turn: int
    ) -> None:
        measure.wait_until_quiet(5.0)
        for in_progress in (False, True) if self._workload.in_progress else (False,):
            way = "_in_progress" if in_progress else ""
            with slots.copied(connection, f"floor_{turn}") as slot:
                read = floor.read_floor(
                    self._program, up.postgres_port, slot, loaded, in_progress=in_progress
                )
            self._note(f"floor{way}", turn, read)
            with slots.copied(connection, f"limit_{turn}") as slot:
                read = floor.read_limit(up.postgres_port, slot, loaded, in_progress=in_progress)
            self._note(f"limit{way}", turn, read)

    def _note(self, name: str, turn: int, read: floor.Read) -> None:
        self._runs.nowhere.setdefault(name, []).append(read.rows_per_second)
        say(f"{name}, run {turn}: {read.rows_per_second:,.0f} rows/s")

    def _drain(
        self,
        subject: Subject,
        up: Servers,
        connection: psycopg.Connection,
        loaded: Backlog,
        run: str,
    ) -> Drain:
        drained = measure_drain(subject, up, connection, self._workload, loaded, run)
        say(
            f"{subject.name}: {drained.rows_per_second:,.0f} rows/s,"
            f" {drained.cpu_s_per_million:.1f} CPU-s per million rows,"
            f" {drained.peak_rss_mb:.0f} MB, foreign load {drained.foreign_cores:.2f} cores"
        )
        return drained

    def _result(self, up: Servers, loaded: Backlog) -> dict[str, Any]:
        runs, peer = self._runs, self._peer
        ours = [drained.rows_per_second for drained in runs.ours]
        peers = [drained.rows_per_second for drained in runs.peer]
        nowhere = {name: result.median(reads) for name, reads in runs.nowhere.items()}
        value = result.median(ours)
        cpu = result.median([drained.cpu_s_per_million for drained in runs.ours])
        assert value is not None
        assert cpu is not None
        return result.build(
            name=self._workload.name,
            unit="rows/s",
            value=value,
            limit=nowhere["limit"],
            floor=nowhere["floor"],
            peer=result.median(peers),
            cpu_s_per_million=cpu,
            peak_rss_mb=max(drained.peak_rss_mb for drained in runs.ours),
            versions=up.versions | (peer_files.versions() if peer else {}),
            details={
                **self._in_progress(value, nowhere),
                "best": {
                    "value": round(max(ours)),
                    **{name: round(max(reads)) for name, reads in runs.nowhere.items()},
                    "peer": round(max(peers)) if peers else None,
                },
                "rows": loaded.rows,
                "wal_bytes": loaded.wal_bytes,
                "clock": f"from {self._workload.clock.value}",
                "floor_by": floor.describe(self._program),
                "limit_by": f"own raw reader with a nap of {floor.NAP_MS} ms between reads",
                "servers": up.settings,
                "settings": dict(Daemon().settings),
                "peer_settings": {"variant": peer.name, **peer.settings} if peer else None,
                "runs": {
                    **{
                        name: [round(each) for each in reads]
                        for name, reads in runs.nowhere.items()
                    },
                    "ours": [drained.details() for drained in runs.ours],
                    "streamed": [drained.details() for drained in runs.streamed],
                    "peer": [drained.details() for drained in runs.peer],
                },
            },
        )

    def _in_progress(self, value: float, nowhere: dict[str, float | None]) -> dict[str, Any]:
        """Return the figures with open transactions streamed, where they were measured."""
        if not self._workload.in_progress:
            return {}
        read = nowhere["floor_in_progress"], nowhere["limit_in_progress"]
        floor_rate, limit_rate = (round(each or 0) for each in read)
        rates = [drained.rows_per_second for drained in self._runs.streamed]
        streamed = result.median(rates) or 0.0
        return {
            "floor_in_progress": floor_rate,
            "limit_in_progress": limit_rate,
            "of_floor_in_progress": round(value / floor_rate, 3),
            "streamed": round(streamed),
            "of_floor_streamed": round(streamed / (nowhere["floor"] or 1), 3),
        }


def run(workload: Workload, options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    return Drains(workload, options).run()
