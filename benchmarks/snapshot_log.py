"""snapshot-log: an initial snapshot: a table's existing rows into the log.

One table of 5 million rows of about 240 bytes. The floor is its binary COPY, discarded; ours is
`cdc run` on a new pipeline, always with exactly-once, by the Spark runner (the figure) and by the
local one; the peer is Debezium's initial snapshot at its best settings, at-least-once.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from importlib.util import find_spec
from struct import pack
from typing import TYPE_CHECKING, Any, Final

from benchmarks import backlog, debezium, measure, peer_files, result, servers
from benchmarks import rows as bench
from benchmarks.drains import POSTGRES
from benchmarks.progress import say
from benchmarks.snapshot_run import Ours, Snapshot, measure_snapshot

if TYPE_CHECKING:
    import psycopg

    from benchmarks.options import Options
    from benchmarks.servers import Servers
    from benchmarks.subject import Subject

NAME: Final = "snapshot-log"
_ROWS: Final = 5_000_000
_COPY: Final = b"COPY (SELECT * FROM bench) TO STDOUT (FORMAT binary)\0"
_READ_BYTES: Final = 256 << 10
_READY: Final = b"Z\0\0\0\x05"
# Settings for an initial snapshot, in addition to those of every drain.
_PEER: Final[dict[str, str | int]] = {
    "snapshot.mode": "initial",
    "snapshot.fetch.size": 20_000,
    "snapshot.max.threads": 2,
}


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    return _Snapshots(options).run()


class _Snapshots:
    """The workload's runs, on their own servers."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rows = options.rows or _ROWS
        self._peer: Subject | None = None
        if options.peer:
            best = debezium.best(peer_files.fetch())
            self._peer = replace(best, connector={**best.connector, **_PEER})
        runners = ["spark", "local"] if find_spec("pyspark") else ["local"]
        self._ours = [Ours(runner) for runner in runners]
        self._floor: list[float] = []
        self._done: dict[str, list[Snapshot]] = {}

    def run(self) -> dict[str, Any]:
        """Run the workload and return its result."""
        options = self._options
        with servers.running(NAME, POSTGRES, keep=options.keep) as up, up.connect() as connection:
            connection.execute(bench.CREATE_TABLE)
            bench.insert_at_once(connection, bench.TABLE, bench.VALUES, self._rows)
            # The first reader of a row sets its hint bits, which would cost one subject more: set
            # them here.
            connection.execute("VACUUM (FREEZE, ANALYZE) bench")
            connection.execute("CHECKPOINT")
            backlog.publish(connection, (bench.TABLE,))
            for turn in range(1, options.runs + 1):
                self._floor.append(copy_to_nowhere(connection, self._rows))
                say(f"floor, run {turn}: {self._floor[-1]:,.0f} rows/s")
                # The figure is the first subject's; the other runs once, for comparison.
                for subject in self._ours if turn == 1 else self._ours[:1]:
                    self._snapshot(subject, up, connection, f"{subject.runner}_{turn}")
                if self._peer is not None and turn <= options.peer_runs:
                    self._snapshot(self._peer, up, connection, f"peer_{turn}")
            return self._result(up, connection)

    def _snapshot(
        self, subject: Subject, up: Servers, connection: psycopg.Connection, run: str
    ) -> None:
        done = measure_snapshot(subject, up, connection, self._rows, run)
        self._done.setdefault(subject.name, []).append(done)
        say(
            f"{subject.name}: {done.rows_per_second:,.0f} rows/s, {done.cpu_s_per_million:.1f}"
            f" CPU-s per million rows, start-up {done.first_record_s:.1f} s, MB {done.peak_rss_mb},"
            f" foreign load {done.foreign_cores:.2f} cores"
        )

    def _result(self, up: Servers, connection: psycopg.Connection) -> dict[str, Any]:
        headline, peer = self._ours[0], self._peer
        ours = self._done[headline.name]
        rates = {name: [each.rows_per_second for each in runs] for name, runs in self._done.items()}
        value = result.median(rates[headline.name])
        cpu = result.median([each.cpu_s_per_million for each in ours])
        assert value is not None
        assert cpu is not None
        size = connection.execute("SELECT pg_relation_size('bench')").fetchone()
        assert size is not None
        return result.build(
            name=NAME,
            unit="rows/s",
            value=value,
            limit=None,
            floor=result.median(self._floor),
            peer=result.median(rates[peer.name]) if peer else None,
            cpu_s_per_million=cpu,
            peak_rss_mb=max(each.peak_rss_mb.get("worker", 0.0) for each in ours),
            versions=up.versions | (peer_files.versions() if peer else {}),
            details={
                "by": headline.name,
                "median": {name: round(result.median(each) or 0) for name, each in rates.items()},
                "best": {
                    "floor": round(max(self._floor)),
                    **{name: round(max(each)) for name, each in rates.items()},
                },
                "start_up_s": {
                    name: round(result.median([each.first_record_s for each in runs]) or 0.0, 1)
                    for name, runs in self._done.items()
                },
                "rows": self._rows,
                "table_bytes": size[0],
                "clock": "from the broker's stamp on the first record",
                "floor_by": "own reader of one COPY … (FORMAT binary) that looks at nothing",
                "servers": up.settings,
                "settings": {each.name: dict(each.settings) for each in self._ours},
                "peer_settings": {"variant": peer.name, **peer.settings} if peer else None,
                "runs": {
                    "floor": [round(each) for each in self._floor],
                    **{name: [e.details() for e in runs] for name, runs in self._done.items()},
                },
            },
        )


def copy_to_nowhere(connection: psycopg.Connection, rows: int) -> float:
    """Return the rows per second of one COPY whose bytes are read and discarded."""
    measure.wait_until_quiet(5.0)
    started = time.perf_counter()
    with socket.socket(fileno=os.dup(connection.pgconn.socket)) as raw:
        raw.settimeout(None)
        raw.sendall(b"Q" + pack(">I", 4 + len(_COPY)) + _COPY)
        buffer = bytearray(_READ_BYTES)
        tail = b""
        while tail[:-1] != _READY:
            taken = raw.recv_into(buffer)
            tail = (tail + bytes(buffer[max(0, taken - 6) : taken]))[-6:]
        os.set_blocking(raw.fileno(), False)  # as libpq left it
    return rows / (time.perf_counter() - started)
