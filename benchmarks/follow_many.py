"""follow-many: a thousand small tables with few but steady changes, each into its mirror.

A hundred single-row transactions a second, one table after another. A change is readable once a
frontier of the lake is seen whose commit time is not before the change's: all mirrors are then at
that frontier. The figure is the slowest table's worst change, in seconds; the limit is twenty.
Before that, the follower's CPU time is measured while nothing changes (`idle_cores`), and for
transactions that change a row of every table (`cpu_s_per_cut`).
"""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Self

from benchmarks import backlog, result, servers, slots
from benchmarks.arrivals import percentiles
from benchmarks.daemon import Daemon
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.follow_delta import DeltaStore
from benchmarks.follow_run import FollowRun
from benchmarks.latency import POSTGRES
from benchmarks.progress import say
from lockstep.jobs.reading_as_of import read_as_of_arrow

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from benchmarks.options import Options
    from benchmarks.programs import Program

NAME: Final = "follow-many"
LIMIT_SECONDS: Final = 20.0
_RATE: Final = 100
_ROWS: Final = 100
_CUTS: Final = 3
_QUIESCE_SECONDS: Final = 1.0
_RUN: Final = "many"
_LOOK_SECONDS: Final = 0.05
_WAIT_SECONDS: Final = 900.0


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    names = tuple(f"t{number:04}" for number in range(options.tables))
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
    ):
        for name in names:
            connection.execute(
                f"CREATE TABLE {name} (id int PRIMARY KEY, k int, note text)".encode()
            )
        backlog.publish(connection, names)
        with slots.created(connection, _RUN):
            lake = up.place.folder / "lake"
            many = _Many(_RUN, DeltaStore(lake, 0), up, connection, options)
            return many.result(names, lake)


class _Many(FollowRun):
    """The run over many tables."""

    def result(self, names: tuple[str, ...], lake: Path) -> dict[str, Any]:
        subject = Daemon()
        subject.prepare(self._up.place, _RUN, names)
        self._configure()
        with subject.start(self._up.place, _RUN) as daemon:
            for name in names:
                self._connection.execute(
                    f"INSERT INTO {name} SELECT i, 0, 'note ' || i"
                    f" FROM generate_series(1, {_ROWS}) i".encode()
                )
            with self._follower() as follower:
                began = time.monotonic()
                seq = len(names) * _ROWS
                self._until(follower, seq)
                start_up = time.monotonic() - began
                say(f"{len(names)} mirrors of {_ROWS:,} rows after {start_up:.0f} s")
                family = Family(follower.pid)
                details = {"start_up_s": round(start_up, 1)}
                details |= self._of_all_tables(names, follower, family, seq)
                return self._watched(names, follower, daemon, family, details, lake)

    def _of_all_tables(
        self, names: tuple[str, ...], follower: Program, family: Family, seq: int
    ) -> dict[str, Any]:
        """Return the cores used while nothing happens, and the CPU time of a cut of all tables."""
        family.wait_until_quiet()
        idle = family.cores(self._options.seconds)
        say(f"{idle:.3f} cores while nothing changes")
        cuts = []
        for _ in range(_CUTS):
            family.look()
            used, began = family.cpu_seconds, time.monotonic()
            with self._connection.transaction():
                for name in names:
                    self._connection.execute(f"UPDATE {name} SET k = k - 1 WHERE id = 1".encode())
            seq += len(names)
            self._until(follower, seq)
            time.sleep(_QUIESCE_SECONDS)
            family.look()
            cuts.append(family.cpu_seconds - used - idle * (time.monotonic() - began))
        say(f"CPU seconds of cuts of {len(names)} tables: {', '.join(f'{e:.2f}' for e in cuts)}")
        return {
            "idle_cores": round(idle, 3),
            "cpu_s_per_cut": round(statistics.median(cuts), 2),
            "cuts": [round(each, 2) for each in cuts],
        }

    def _until(self, follower: Program, seq: int) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._store.seq() < seq:
            follower.check()
            if time.monotonic() > deadline:
                raise BenchmarkError("the follower does not catch up", hint="see its log")
            time.sleep(_LOOK_SECONDS)

    def _watched(
        self,
        names: tuple[str, ...],
        follower: Program,
        daemon: Program,
        family: Family,
        details: dict[str, Any],
        lake: Path,
    ) -> dict[str, Any]:
        with _LakePoller(lake) as watching:
            used, began = self._cpu(daemon, family), time.monotonic()
            changes = _load(self._connection, names, self._options.seconds)
            busy, lasted = self._cpu(daemon, family), time.monotonic() - began
            # A later commit ends the wait for the last change.
            self._connection.execute(f"UPDATE {names[0]} SET k = k + 1 WHERE id = 1".encode())
            watching.until(changes[-1][0], follower)
        _check(names, lake)
        cores = {name: round((busy[name] - used[name]) / lasted, 2) for name in used}
        waited: defaultdict[str, list[float]] = defaultdict(list)
        for at_us, name in changes:
            waited[name].append((watching.seen(at_us) - at_us) / 1_000)
        return result.build(
            name=NAME,
            unit="s",
            value=max(map(max, waited.values())) / 1_000,
            limit=LIMIT_SECONDS,
            floor=None,
            peer=None,
            cpu_s_per_million=cores["follower"] * lasted / len(changes) * 1e6,
            peak_rss_mb=max(family.peaks_mb.values()),
            versions=self._up.versions,
            details={
                "tables": len(names),
                "changes": len(changes),
                "latency": asdict(percentiles([each for one in waited.values() for each in one])),
                "frontiers": len(watching.frontiers),
                **details,
                "cores": cores,
                "servers": self._up.settings,
            },
        )


class _LakePoller:
    """Polls the lake for its newest frontier, in a thread."""

    def __init__(self, lake: Path) -> None:
        self._store, self._path = DeltaStore(lake, 0), str(lake)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        # Commit times of frontiers and when each was first seen, in microseconds.
        self.frontiers: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        newest = 0
        while not self._done.wait(_LOOK_SECONDS):
            seq = self._store.seq()
            if seq > newest:
                at_us, newest = time.time_ns() // 1_000, seq
                applied = read_as_of_arrow(self._path, []).applied
                self.frontiers.append((applied.committed_at_us, at_us))

    def until(self, at_us: int, follower: Program) -> None:
        """Wait until a frontier with that commit time, or a later one, was seen."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self.frontiers or self.frontiers[-1][0] < at_us:
            follower.check()
            if time.monotonic() > deadline:
                raise BenchmarkError("a change did not become readable", hint="see its log")
            time.sleep(_LOOK_SECONDS)

    def seen(self, at_us: int) -> int:
        """Return when a commit of that time could be read."""
        return self.frontiers[bisect_left(self.frontiers, (at_us, 0))][1]


def _check(names: tuple[str, ...], lake: Path) -> None:
    found = read_as_of_arrow(str(lake), [f"public.{name}" for name in names])
    short = [name for name, rows in found.tables.items() if rows.num_rows != _ROWS]
    if short:
        raise BenchmarkError(f"{short[0]} has not all of its rows", hint="see the follower's log")


def _load(
    connection: psycopg.Connection, names: tuple[str, ...], seconds: float
) -> list[tuple[int, str]]:
    """Change the tables in turn; return each change's time in microseconds and its table."""
    found, began = [], time.monotonic()
    for number in range(max(int(seconds * _RATE), len(names))):
        lap, place = divmod(number, len(names))
        time.sleep(max(began + number / _RATE - time.monotonic(), 0))
        name = names[place]
        connection.execute(f"UPDATE {name} SET k = k + 1 WHERE id = {1 + lap % _ROWS}".encode())
        found.append((time.time_ns() // 1_000, name))
    return found
