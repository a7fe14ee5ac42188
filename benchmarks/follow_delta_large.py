"""follow-delta-large: one transaction that updates every row of a mirror, applied by executors.

A follower first catches up with as many updates in transactions of a few thousand, which its driver
applies. Another process of it then runs idle, and one transaction updates all rows. The figure is
rows per second from the frontier record in the log until a reader finds that frontier, `of_small`
the same divided by the first follower's; the memory is the second process's. The floor is the same
rows appended to a Delta table, with no log and no lookup. The run has no peer.

The same transaction is then applied once more on a standalone Spark cluster of one worker with one
core, and on one of two such workers; `of_one_worker` is the first time divided by the second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from benchmarks import backlog, measure, result, rows, servers, slots
from benchmarks.daemon import Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.follow_delta import DeltaStore, Updates, fill_table, floor_of, mirror_of
from benchmarks.follow_run import FIRST_ID, CatchUp, FollowRun
from benchmarks.latency import POSTGRES
from benchmarks.programs import Program, follower_on
from benchmarks.progress import Every, say
from tests.fixtures.spark_cluster import standalone

if TYPE_CHECKING:
    from benchmarks.options import Options

NAME: Final = "follow-delta-large"
_RUN: Final = "mirrored"
_ROWS: Final = 10_000_000
_SMALL_EVENTS: Final = 300_000  # as by default
_SECONDS: Final = 3_600.0
_LOOK_SECONDS: Final = 0.1
_UPDATE: Final = (
    b"UPDATE bench SET k = k + 1, payload = reverse(payload), created_at = clock_timestamp()"
)


@dataclass(frozen=True)
class LargeCut:
    """One transaction applied."""

    rows: int
    seconds: float
    cpu_s: dict[str, float]  # by process
    peak_rss_mb: dict[str, float]
    foreign_cores: float


class LargeRun(FollowRun):
    """A backlog of small transactions, then one large transaction."""

    def every(self, count: int) -> tuple[CatchUp, LargeCut, list[LargeCut]]:
        """Return the figures of `count` updates each: small, large, and by one and two workers."""
        subject, place = Daemon(), self._up.place
        subject.prepare(place, self._run, (rows.TABLE,))
        self._configure()
        with subject.start(place, self._run) as daemon:
            say(f"{count:,} updates in small transactions")
            self._fill(self._connection, count)
            self._until_in_log(daemon, count)
            with self._follower() as follower:
                small = self._catch_up(daemon, follower, Family(follower.pid), count)
            say(f"in small transactions: {small.rows_per_second:,.0f} rows/s")
            with self._follower() as follower:
                large = self._large(daemon, follower, count, count)
            on_cluster = []
            for workers in (1, 2):
                folder = self._up.place.folder / f"spark-{workers}"
                folder.mkdir()
                with (
                    standalone(folder, *[1] * workers) as cluster,
                    follower_on(cluster, config_path(self._up.place, self._run)) as follower,
                ):
                    before = (1 + workers) * count + workers
                    on_cluster.append(self._large(daemon, follower, count, before))
                say(f"{workers} of one core: {on_cluster[-1].seconds:,.1f} s")
            self._store.check(count)
        return small, large, on_cluster

    def _large(self, daemon: Program, follower: Program, count: int, before: int) -> LargeCut:
        """Return the figures of a large transaction; `before` it there were that many updates."""
        family = Family(follower.pid)
        # Once this row is there, the follower is started and idle.
        self._connection.execute(_UPDATE + b" WHERE id = %d" % FIRST_ID)
        self._until_seen_by_readers(follower, family, before + 1)
        family.wait_until_quiet()
        busy = self._cpu(daemon, family)
        foreign = measure.Foreign(
            lambda: sum(self._cpu(daemon, family).values()) + time.process_time()
        )
        say(f"one transaction of {count:,} updates")
        self._connection.execute(_UPDATE)
        seconds = self._until_seen_by_readers(follower, family, before + count + 1)
        used = self._cpu(daemon, family)
        return LargeCut(
            rows=count,
            seconds=seconds,
            cpu_s={name: round(used[name] - busy[name], 2) for name in used},
            peak_rss_mb=family.peaks_mb,
            foreign_cores=round(foreign.cores(), 2),
        )

    def _until_seen_by_readers(self, follower: Program, family: Family, events: int) -> float:
        """Wait until readers find so many of the table's events; return the seconds from the log.

        These are from the frontier record of the last one to the poll that finds its frontier.
        """
        deadline, progress = time.monotonic() + _SECONDS, Every(10.0)
        in_log: tuple[int, float] | None = None
        while in_log is None or self._store.seq() < in_log[0]:
            in_log = in_log or self._frontier(events)
            follower.check()
            family.look()
            progress.say("waiting for the follower")
            if time.monotonic() > deadline:
                raise BenchmarkError("the follower does not apply the rows", hint="see its log")
            time.sleep(_LOOK_SECONDS)
        return time.time() - in_log[1]

    def _frontier(self, events: int) -> tuple[int, float] | None:
        """Return the seq of the first frontier above so many events, and when it was written."""
        found = 0
        for message in self._topics.read(f"{self._run}.cdc.frontier"):
            record = orjson.loads(message.value() or b"{}")
            found += sum(many for topic, _, _, many in record["partitions"] if topic == self._topic)
            if found >= events:
                return record["seq"], message.timestamp()[1] / 1_000
        return None


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    count = options.rows or _ROWS
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
    ):
        lake = up.place.folder / "lake"
        mirror = lake / f"public.{rows.TABLE}"
        connection.execute(rows.CREATE_TABLE)
        say(f"a table and its mirror of {count:,} rows")
        fill_table(connection, count)
        mirror_of(connection, up.place.folder, mirror)
        floor = floor_of(mirror, up.place.folder / "floor")
        backlog.publish(connection, (rows.TABLE,))
        store = DeltaStore(lake, 0)
        # A shorter run has a large cut, too.
        store.section["max_events"] = min(_SMALL_EVENTS, count // 2)
        with slots.created(connection, _RUN):
            updates = Updates(count)
            run_ = LargeRun(_RUN, store, up, connection, options, fill=updates)
            small, large, (one, two) = run_.every(count)
        value, peaks = large.rows / large.seconds, large.peak_rss_mb
        return result.build(
            name=NAME,
            unit="rows/s",
            value=value,
            limit=None,
            floor=floor,
            peer=None,
            cpu_s_per_million=large.cpu_s["follower"] / large.rows * 1e6,
            peak_rss_mb=max(peaks.values()),
            versions=up.versions,
            details={
                "mirror_rows": count,
                "driver_rss_mb": peaks["main"],
                "jvm_rss_mb": peaks.get("java", 0.0),
                "worker_rss_mb": peaks.get("worker", 0.0),
                "of_small": round(value / small.rows_per_second, 2),
                "of_one_worker": round(one.seconds / two.seconds, 2),
                "one_worker_s": round(one.seconds, 1),
                "two_workers_s": round(two.seconds, 1),
                "small_rows_per_second": round(small.rows_per_second),
                "small_rss_mb": small.peak_rss_mb,
                "seconds": round(large.seconds, 2),
                "cpu_s": large.cpu_s,
                "foreign_cores": large.foreign_cores,
                "floor_by": "the same rows appended by delta-rs, 300,000 at a time",
                "servers": up.settings,
            },
        )
