"""One follower under measurement: how fast it catches up, and the time from commit to visible.

Shared by every store's benchmark. The daemon has put a backlog of rows into the log before the
follower starts; then single rows are committed at a steady rate while the store is polled, as any
reader would, for its frontier. A change is visible when the store is first seen at a frontier with
its `seq` or a later one; its commit time is Postgres' own, from the event. So every latency
includes, on average, half the pause between two polls.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson
import yaml
from confluent_kafka import Consumer, TopicPartition

from benchmarks import measure, rows
from benchmarks.arrivals import Percentiles, percentiles
from benchmarks.daemon import CDC, PARTITIONS, Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.programs import Program
from benchmarks.progress import Every, say
from benchmarks.topics import Topics
from benchmarks.watching import watching

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import psycopg

    from benchmarks.options import Options
    from benchmarks.servers import Servers

RATE: Final = 500

FOLLOWER: Final = "measured"
# Ids of the backlog; the load's count from 1.
FIRST_ID: Final = 100_000_000
_TRANSACTION_ROWS: Final = 10_000
_LOOK_SECONDS: Final = 0.01
_FAMILY_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 20.0
_TIMEOUT_SECONDS: Final = 900.0
_LOAD_GRACE_SECONDS: Final = 300.0


class Store(Protocol):
    """A store that a follower writes, and how its readers read it."""

    section: dict[str, Any]  # the follower's section of the configuration
    pids: tuple[int, ...]  # process ids of its servers

    def seq(self) -> int:
        """Return the seq of the frontier that a reader finds; 0 if it finds none."""
        ...

    def check(self, count: int) -> None:
        """Raise BenchmarkError unless there are exactly `count` rows."""
        ...


@dataclass(frozen=True)
class CatchUp:
    """A backlog applied."""

    rows: int
    rows_per_second: float  # between the first and the last frontier seen
    seconds: float
    start_up_s: float  # from the start of the process to the first frontier, its cut included
    total_s: float
    cpu_s: dict[str, float]  # by process, start-up included
    peak_rss_mb: dict[str, float]
    foreign_cores: float


@dataclass(frozen=True)
class Latency:
    """Commit to visible, at a steady rate."""

    percentiles: Percentiles
    frontiers: int  # seen in the window
    between_ms: float  # median time between two frontiers seen
    batch_ms: float  # median time in a batch, as the follower reports it
    in_log_ms: float  # median, commit to a frontier record in the log
    cores: dict[str, float]
    late_ms_max: float
    foreign_cores: float


@dataclass(frozen=True)
class Followed:
    """The figures of one run."""

    catch_up: CatchUp
    latency: Latency

    def details(self) -> dict[str, Any]:
        """Return the figures in the form that the result has."""
        catch_up, latency = asdict(self.catch_up), asdict(self.latency)
        latency = {**latency.pop("percentiles"), **latency}
        return {"catch_up": _rounded(catch_up), "latency": _rounded(latency)}


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, dict)
        else round(value, 2) if isinstance(value, float) else value
        for name, value in fields.items()
    }  # fmt: skip


def fill(connection: psycopg.Connection, count: int) -> None:
    """Insert the backlog's rows, in transactions of a few thousand."""
    values = rows.VALUES.format(i="i")
    for first in range(0, count, _TRANSACTION_ROWS):
        last = min(first + _TRANSACTION_ROWS, count) - 1
        connection.execute(
            f"INSERT INTO bench SELECT {values}"
            f" FROM generate_series({FIRST_ID + first}::bigint, {FIRST_ID + last}) i".encode()
        )


class FollowRun:
    """A run's processes and what is measured of them."""

    def __init__(
        self,
        run: str,
        store: Store,
        up: Servers,
        connection: psycopg.Connection,
        options: Options,
        *,
        fill: Callable[[psycopg.Connection, int], None] = fill,
    ) -> None:
        """`fill` commits a backlog of the given number of changes."""
        self._fill = fill
        self._run, self._store, self._up = run, store, up
        self._connection, self._options = connection, options
        self._topics = Topics(up.bootstrap)
        self._topic = f"{run}.public.{rows.TABLE}"
        self._seen: list[tuple[float, int]] = []  # when, and at which seq the store was

    def measure(self, count: int) -> Followed:
        """Catch up with `count` rows, inserted first, then follow the load."""
        subject, place = Daemon(), self._up.place
        subject.prepare(place, self._run, (rows.TABLE,))
        self._configure()
        with subject.start(place, self._run) as daemon:
            say(f"filling table and log with {count:,} rows")
            self._fill(self._connection, count)
            self._until_in_log(daemon, count)
            measure.wait_until_quiet(_QUIET_SECONDS)
            with self._follower() as follower:
                family = Family(follower.pid)
                catch_up = self._catch_up(daemon, follower, family, count)
                say(f"caught up: {catch_up.rows_per_second:,.0f} rows/s {catch_up.cpu_s}")
                latency, committed = self._latency(daemon, follower, family)
                self._store.check(count + committed)
        return Followed(catch_up, latency)

    def _configure(self) -> None:
        """Add the follower to the daemon's configuration."""
        path = config_path(self._up.place, self._run)
        config = yaml.safe_load(path.read_text())
        config["followers"] = {FOLLOWER: self._store.section}
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    def _follower(self) -> Program:
        folder = self._up.place.folder / self._run
        return Program(
            "the follower",
            [*CDC, "follow", "--config", str(config_path(self._up.place, self._run))],
            folder / "follow.log",
            environment={**os.environ, "TMPDIR": str(folder), "PYSPARK_PYTHON": sys.executable},
        )

    def _until_in_log(self, daemon: Program, count: int) -> None:
        places = [(self._topic, number) for number in range(PARTITIONS)]
        deadline, progress = time.monotonic() + _TIMEOUT_SECONDS, Every(10.0)
        # End offsets count records and transactions' control records: at least the number of rows.
        while sum(self._topics.ends(places, committed=True)) < count:
            daemon.check()
            progress.say("waiting until the daemon has written them to the log")
            if time.monotonic() > deadline:
                raise BenchmarkError("the backlog is not in the log", hint="see the daemon's log")
            time.sleep(0.2)

    # --- catching up ---

    def _catch_up(self, daemon: Program, follower: Program, family: Family, count: int) -> CatchUp:
        began, busy = time.monotonic(), self._cpu(daemon, family)
        foreign = measure.Foreign(lambda: sum(self._cpu(daemon, family).values()) + _own())
        deadline, progress = began + _TIMEOUT_SECONDS, Every(10.0)
        seen, looked = list[tuple[float, int]](), began
        while not seen or seen[-1][1] < count:
            follower.check()
            seq, at = self._store.seq(), time.monotonic()
            if seq and (not seen or seq > seen[-1][1]):
                seen.append((at, seq))
            progress.say(f"caught up with {seen[-1][1] if seen else 0:,} rows")
            if at - looked > _FAMILY_SECONDS:
                family.look()
                looked = at
            if at > deadline:
                raise BenchmarkError("the follower does not catch up", hint="see its log")
            time.sleep(_LOOK_SECONDS)
        (first_at, first), (last_at, last) = seen[0], seen[-1]
        # If one cut took the complete backlog, its own time counts, start-up included.
        seconds = last_at - first_at if last > first else last_at - began
        many = last - first if last > first else count
        used = self._cpu(daemon, family)
        return CatchUp(
            rows=count,
            rows_per_second=many / seconds,
            seconds=seconds,
            start_up_s=first_at - began,
            total_s=last_at - began,
            cpu_s={name: used[name] - busy[name] for name in used},
            peak_rss_mb=family.peaks_mb,
            foreign_cores=foreign.cores(),
        )

    def _cpu(self, daemon: Program, family: Family) -> dict[str, float]:
        family.look()
        return {
            "follower": family.cpu_seconds,
            "store": measure.total_cpu_seconds(self._store.pids),
            "broker": measure.cpu_seconds(self._up.kafka_pid),
            "daemon": measure.cpu_seconds(daemon.pid),
            "postgres": measure.family_cpu_seconds(self._up.postgres_pid),
        }

    # --- following ---

    def _latency(self, daemon: Program, follower: Program, family: Family) -> tuple[Latency, int]:
        options, place = self._options, self._up.place
        seconds = options.warm_up_seconds + options.seconds
        command = [sys.executable, "-m", "benchmarks.commit_load"]
        command += [str(self._up.postgres_port), str(RATE), str(seconds)]
        ends = self._ends()
        with (
            Program("the commit load", command, place.folder / "load.log") as load,
            self._looking(),
        ):
            _sleep_until(load, time.monotonic() + options.warm_up_seconds, follower)
            from_us, began = time.time_ns() // 1_000, time.monotonic()
            busy = self._cpu(daemon, family)
            foreign = measure.Foreign(
                lambda: (
                    sum(self._cpu(daemon, family).values()) + measure.cpu_seconds(load.pid) + _own()
                )
            )
            _sleep_until(load, began + options.seconds, follower)
            to_us, lasted = time.time_ns() // 1_000, time.monotonic() - began
            used, foreign_cores = self._cpu(daemon, family), foreign.cores()
            load.wait(_LOAD_GRACE_SECONDS)
            committed = orjson.loads(load.output())
            events = self._events(ends, committed["committed"])
            self._until_seen(follower, max(seq for seq, _ in events))
        window = [(seq, at) for seq, at in events if from_us <= at < to_us]
        seen = [(at, seq) for at, seq in self._seen if from_us <= at < to_us]
        return Latency(
            percentiles=percentiles(self._waited(window)),
            frontiers=len(seen),
            between_ms=_middle([(b - a) / 1_000 for (a, _), (b, _) in pairwise(seen)]),
            batch_ms=self._batch_ms(from_us, to_us),
            in_log_ms=self._in_log_ms(from_us, to_us),
            cores={name: (used[name] - busy[name]) / lasted for name in used},
            late_ms_max=committed["late_ms_max"],
            foreign_cores=foreign_cores,
        ), int(committed["committed"])

    def _looking(self) -> AbstractContextManager[None]:
        """Note when the store is at which seq, for the duration of the block."""
        return watching(
            self._store.seq,
            lambda seq: self._seen.append((time.time_ns() // 1_000, seq)),
            _LOOK_SECONDS,
        )

    def _until_seen(self, follower: Program, seq: int) -> None:
        deadline = time.monotonic() + _LOAD_GRACE_SECONDS
        while not self._seen or self._seen[-1][1] < seq:
            follower.check()
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    "not every change became visible", hint="see the follower's log"
                )
            time.sleep(_LOOK_SECONDS)

    def _waited(self, events: list[tuple[int, int]]) -> list[float]:
        """Return how long each event took from its commit to the poll that found it."""
        seqs = [seq for _, seq in self._seen]
        return [(self._seen[bisect_left(seqs, seq)][0] - at) / 1_000 for seq, at in events]

    # --- what the log shows ---

    def _ends(self) -> list[TopicPartition]:
        places = [(self._topic, number) for number in range(PARTITIONS)]
        found = self._topics.ends(places, committed=True)
        return [TopicPartition(*place, end) for place, end in zip(places, found, strict=True)]

    def _events(self, begin: list[TopicPartition], count: int) -> list[tuple[int, int]]:
        """Return the seq and the commit time of each event from these offsets on."""
        reader = Consumer(
            {
                "bootstrap.servers": self._up.bootstrap,
                "group.id": "benchmarks-follow",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        reader.assign(begin)
        found: list[tuple[int, int]] = []
        deadline = time.monotonic() + _LOAD_GRACE_SECONDS
        while len(found) < count and time.monotonic() < deadline:
            for message in reader.consume(10_000, 0.5):
                source = orjson.loads(message.value() or b"{}")["source"]
                found.append((source["seq"], source["ts_us"]))
        reader.close()
        if len(found) < count:
            raise BenchmarkError("not every change is in the log", hint="see the daemon's log")
        return found

    def _batch_ms(self, from_us: int, to_us: int) -> float:
        """Return the median batch time that the follower's reports within the window give."""
        reports = (
            orjson.loads(message.value() or b"{}")
            for message in self._topics.read(f"{self._run}.cdc.followers")
        )
        return _middle(
            [each["batch_seconds"] * 1e3 for each in reports if from_us <= each["at_us"] < to_us]
        )

    def _in_log_ms(self, from_us: int, to_us: int) -> float:
        """Return the median age of a frontier's newest change when its record was written."""
        found = []
        for message in self._topics.read(f"{self._run}.cdc.frontier"):
            at_us = orjson.loads(message.value() or b"{}")["committed_at_us"]
            if from_us <= at_us < to_us:
                found.append(message.timestamp()[1] - at_us / 1_000)
        return _middle(found)


def _sleep_until(load: Program, deadline: float, follower: Program) -> None:
    while time.monotonic() < deadline and load.running():
        follower.check()
        time.sleep(0.1)


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _own() -> float:
    return time.process_time()
