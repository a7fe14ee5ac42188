"""follow-history, follow-keyless, follow-documents: the CPU time of a small cut as a table grows.

A table is filled through the log to one size after another. At each size, transactions of a hundred
updates of random rows follow one by one, and the follower's CPU time for each is measured: from
before the commit until the store is at its frontier and a moment after, less what the follower uses
while nothing happens. The figure is `growth`: the mean at the largest size divided by that at the
smallest. Documents have a process of their own, so that their mirror's work does not count.

Of a history one transaction then updates every row, which executors write: `large` has the time
until readers find its frontier, and the peak memory of another process of the follower.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import yaml
from deltalake import DeltaTable, QueryBuilder

from benchmarks import backlog, follow_redis, result, rows, servers, slots
from benchmarks.daemon import CDC, Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.follow_delta import DeltaStore
from benchmarks.follow_redis import RedisStore
from benchmarks.follow_run import FIRST_ID, FOLLOWER, FollowRun
from benchmarks.follow_server import RUN
from benchmarks.latency import POSTGRES
from benchmarks.programs import Program
from benchmarks.progress import Every, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from benchmarks.follow_run import Store
    from benchmarks.options import Options
    from benchmarks.servers import Servers

LIMIT: Final = 1.5
_SIZES: Final = (100_000, 1_000_000, 5_000_000)
_CHANGES: Final = 100
_CUTS: Final = 20
_IDLE_SECONDS: Final = 10.0
_AFTERWARDS_SECONDS: Final = 0.3
_LOOK_SECONDS: Final = 0.05
_TIMEOUT_SECONDS: Final = 3_600.0
_TRANSACTION_ROWS: Final = 10_000
_MOST_EVENTS: Final = 300_000  # as by default
# Odd and not a multiple of five, so that each row of a round number of rows occurs once.
_STEP: Final = 2_654_435_761
# A document is an order with three lines.
_LINES: Final = 3
_CREATE_LINES: Final = (
    b"CREATE TABLE lines (id bigint PRIMARY KEY, bench_id bigint NOT NULL, note text)"
)
_LAKE: Final = "lake"


class Growth(NamedTuple):
    """What grows, and what is measured."""

    name: str
    each: str  # what a row is called
    sections: Callable[[GrowthRun], dict[str, dict[str, Any]]]  # the followers' configuration
    create: tuple[bytes, ...]
    tables: tuple[str, ...] = (rows.TABLE,)
    documents: bool = False
    large: bool = False  # whether one transaction changes every row in the end


class CutCost(NamedTuple):
    """Cuts at one size of the table."""

    rows: int
    cpu_s: float  # the mean
    seconds: float  # the median, from the commit to the frontier
    cuts: list[float]
    idle_cores: float


class GrowthRun(FollowRun):
    """A table that grows, and one follower of it."""

    def __init__(
        self,
        kind: Growth,
        store: Store,
        up: Servers,
        connection: psycopg.Connection,
        options: Options,
        most_events: int = _MOST_EVENTS,
    ) -> None:
        """`most_events`: how many a follower's cut gathers."""
        super().__init__(RUN, store, up, connection, options)
        self._kind, self.most_events = kind, most_events
        self.lake = up.place.folder / "lake"
        self.section = store.section
        self._seq = 0
        self.large: dict[str, Any] | None = None

    def costs(self, sizes: tuple[int, ...]) -> Iterator[CutCost]:
        """Yield the cost of cuts at each size, ascending."""
        subject, place, kind = Daemon(), self._up.place, self._kind
        subject.prepare(place, RUN, kind.tables)
        self._configure()
        with ExitStack() as stack:
            daemon = stack.enter_context(subject.start(place, RUN))
            if kind.documents:
                mirror = stack.enter_context(self._following(_LAKE))
            with self._following(FOLLOWER) as follower:
                watched = [daemon, follower, *([mirror] if kind.documents else [])]
                family, size = Family(follower.pid), 0
                for wanted in sizes:
                    say(f"{wanted:,} {kind.each}s")
                    self._grow(size, wanted)
                    size = wanted
                    self._wait(watched, family)
                    # It reads keys that later ones find in memory.
                    self._cut(watched, family, size, 0)
                    yield self._cost(watched, family, size)
                self.peak_mb = max(family.peaks_mb.values())
            if kind.large:
                with self._following(FOLLOWER) as follower:
                    self.large = self._large([daemon, follower], Family(follower.pid), size)

    def _configure(self) -> None:
        path = config_path(self._up.place, RUN)
        config = yaml.safe_load(path.read_text())
        config["followers"] = self._kind.sections(self)
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    def _following(self, name: str) -> Program:
        folder = self._up.place.folder / RUN
        command = [*CDC, "follow", "--config", str(config_path(self._up.place, RUN))]
        return Program(
            f"the follower {name}",
            [*command, "--followers", name],
            folder / f"follow-{name}.log",
            environment={**os.environ, "TMPDIR": str(folder), "PYSPARK_PYTHON": sys.executable},
        )

    def _grow(self, size: int, wanted: int) -> None:
        values = rows.VALUES.format(i="i")
        for first in range(size, wanted, _TRANSACTION_ROWS):
            last = min(first + _TRANSACTION_ROWS, wanted) - 1
            series = f"generate_series({FIRST_ID + first}::bigint, {FIRST_ID + last}) i"
            self._connection.execute(f"INSERT INTO bench SELECT {values} FROM {series}".encode())
            self._seq += last + 1 - first
            if self._kind.documents:
                self._connection.execute(
                    f"INSERT INTO lines SELECT i * {_LINES} + n, i, 'line ' || n FROM {series},"
                    f" generate_series(0, {_LINES - 1}) n".encode()
                )
                self._seq += _LINES * (last + 1 - first)

    def _cost(self, watched: list[Program], family: Family, size: int) -> CutCost:
        family.wait_until_quiet()
        idle = family.cores(min(_IDLE_SECONDS, self._options.seconds))
        found = [self._cut(watched, family, size, number) for number in range(1, _CUTS + 1)]
        cuts = [cpu - idle * lasted for cpu, lasted, _ in found]
        mean = statistics.fmean(cuts)
        say(f"{_CHANGES} changes at {size:,} {self._kind.each}s: {mean:.3f} CPU-s")
        seconds = statistics.median(seconds for _, _, seconds in found)
        return CutCost(
            size, round(mean, 4), round(seconds, 2), [round(e, 3) for e in cuts], round(idle, 3)
        )

    def _cut(
        self, watched: list[Program], family: Family, size: int, number: int
    ) -> tuple[float, float, float]:
        """Change rows; return the CPU seconds, over how long, and the time to the frontier."""
        family.look()
        used, began = family.cpu_seconds, time.monotonic()
        share = _CHANGES // 2 if self._kind.documents else _CHANGES
        first = (size + number) * _CHANGES  # other rows at each size and in each cut
        chosen = f"(i::numeric * {_STEP} % {size})::bigint"
        series = f"generate_series({first}, {first + share - 1}) i"
        with self._connection.transaction():
            self._connection.execute(
                f"UPDATE bench SET k = k + 1 WHERE id IN (SELECT {FIRST_ID} + {chosen}"
                f" FROM {series})".encode()
            )
            if self._kind.documents:
                self._connection.execute(
                    "UPDATE lines SET note = note || '!' WHERE id IN (SELECT"
                    f" ({FIRST_ID} + {chosen}) * {_LINES} + 1 FROM {series})".encode()
                )
        self._seq += _CHANGES
        seconds = self._wait(watched, family)
        time.sleep(_AFTERWARDS_SECONDS)
        family.look()
        return family.cpu_seconds - used, time.monotonic() - began, seconds

    def _large(self, watched: list[Program], family: Family, size: int) -> dict[str, Any]:
        """Return the figures of one transaction that changes every row."""
        self._connection.execute(f"UPDATE bench SET k = k + 1 WHERE id = {FIRST_ID}".encode())
        self._seq += 1
        self._wait(watched, family)
        family.wait_until_quiet()
        used = family.cpu_seconds
        say(f"one transaction of {size:,} updates")
        self._connection.execute(b"UPDATE bench SET k = k + 1, payload = reverse(payload)")
        self._seq += size
        seconds = self._wait(watched, family)
        peaks = family.peaks_mb
        return {
            "rows": size,
            "seconds": round(seconds, 2),
            "cpu_s": round(family.cpu_seconds - used, 2),
            "driver_rss_mb": peaks["main"],
            "jvm_rss_mb": peaks.get("java", 0.0),
            "worker_rss_mb": peaks.get("worker", 0.0),
        }

    def _wait(self, watched: list[Program], family: Family) -> float:
        """Wait until readers find every change; return for how long."""
        began, progress = time.monotonic(), Every(10.0)
        while (seq := self._store.seq()) < self._seq:
            for program in watched:
                program.check()
            progress.say(f"at {seq:,} of {self._seq:,}")
            family.look()
            if time.monotonic() > began + _TIMEOUT_SECONDS:
                raise BenchmarkError("the follower does not catch up", hint="see its log")
            time.sleep(_LOOK_SECONDS)
        return time.monotonic() - began

    def check(self, size: int, cuts: int) -> None:
        """Raise BenchmarkError unless the store has every row."""
        if isinstance(self._store, RedisStore):
            found, more = self._store.keys(f"{RUN}:documents.{rows.TABLE}:*"), 0
        else:
            found = self._mirrored()
            more = cuts * _CHANGES if self._kind.name == HISTORY.name else 0
            more += size + 1 if self.large else 0
        if found != size + more:
            raise BenchmarkError(
                f"the store has {found:,} rows, not {size + more:,}", hint="no figure counts"
            )

    def _mirrored(self) -> int:
        table = DeltaTable(self.lake / f"public.{rows.TABLE}")
        query = QueryBuilder().register("t", table).execute("SELECT count(*) FROM t")
        return int(pa.table(query.read_all()).column(0)[0].as_py())


def _history(run: GrowthRun) -> dict[str, dict[str, Any]]:
    section = {**run.section["delta"], "history": [f"public.{rows.TABLE}"]}
    # A shorter run has a large cut, too.
    return {FOLLOWER: {"delta": section, "max_events": run.most_events}}


def _keyless(run: GrowthRun) -> dict[str, dict[str, Any]]:
    return {FOLLOWER: run.section}


def _documents(run: GrowthRun) -> dict[str, dict[str, Any]]:
    lines = {"table": "public.lines", "by": {"bench_id": "id"}}
    document = {"table": f"public.{rows.TABLE}", "children": {"lines": lines}}
    documents = {**run.section, "mirror": _LAKE, "documents": {"bench": document}}
    return {_LAKE: {"delta": {"path": str(run.lake)}}, FOLLOWER: documents}


HISTORY: Final = Growth(
    "follow-history", "row", _history, (rows.CREATE_TABLE.encode(),), large=True
)
KEYLESS: Final = Growth(
    "follow-keyless",
    "row",
    _keyless,
    (
        rows.CREATE_TABLE.replace(" PRIMARY KEY", "").encode(),
        b"ALTER TABLE bench REPLICA IDENTITY FULL",
        b"CREATE INDEX ON bench (id)",
    ),
)
DOCUMENTS: Final = Growth(
    "follow-documents",
    "document",
    _documents,
    (rows.CREATE_TABLE.encode(), _CREATE_LINES, b"CREATE INDEX ON lines (bench_id)"),
    (rows.TABLE, "lines"),
    documents=True,
)


def _run(kind: Growth, options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    largest = options.rows or _SIZES[-1]
    sizes = tuple(size * largest // _SIZES[-1] for size in _SIZES)
    with (
        servers.running(kind.name, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
        ExitStack() as stack,
    ):
        for statement in kind.create:
            connection.execute(statement)
        backlog.publish(connection, kind.tables)
        store: Store = DeltaStore(up.place.folder / "lake", 0)
        if kind.documents:
            store = stack.enter_context(follow_redis.running(up.place.folder / "store"))
        with slots.created(connection, RUN):
            most = min(_MOST_EVENTS, max(_TRANSACTION_ROWS, sizes[-1] // 2))
            run_ = GrowthRun(kind, store, up, connection, options, most)
            costs = list(run_.costs(sizes))
            run_.check(sizes[-1], (_CUTS + 1) * len(sizes))
        growth = round(costs[-1].cpu_s / costs[0].cpu_s, 2)
        return result.build(
            name=kind.name,
            unit="times",
            value=growth,
            limit=LIMIT,
            floor=None,
            peer=None,
            cpu_s_per_million=costs[-1].cpu_s / _CHANGES * 1e6,
            peak_rss_mb=run_.peak_mb,
            versions=up.versions,
            details={
                "growth": growth,
                "changes": _CHANGES,
                "sizes": [cost._asdict() for cost in costs],
                **({"large": run_.large} if run_.large else {}),
                "servers": up.settings,
            },
        )


run_history: Final = partial(_run, HISTORY)
run_keyless: Final = partial(_run, KEYLESS)
run_documents: Final = partial(_run, DOCUMENTS)
