"""One drain: a subject carries a backlog from the WAL into its topic, watched and checked.

The drain's time runs from the broker's stamp on the first record to the moment at which a
read_committed reader may see the last, found by asking for end offsets every 25 ms. Start-up is
not in it but stated beside it: `total_s` runs from the start of the process. CPU time is split at
the same point. What arrived is checked before the figure is given.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import measure, slots
from benchmarks.failure import BenchmarkError
from benchmarks.progress import Every
from benchmarks.topics import Topics

if TYPE_CHECKING:
    import psycopg

    from benchmarks.programs import Program
    from benchmarks.rows import Preload
    from benchmarks.servers import Servers
    from benchmarks.subject import Subject

_LOOK_SECONDS = 0.025
_TIMEOUT_SECONDS = 900.0
# Transactions' control records are offsets too, so the offsets alone do not tell the last event.
# This long without any movement does; the check then counts.
_STILL_SECONDS = 2.0
_SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class Drain:
    """What one drain took."""

    rows: int
    rows_per_second: float
    drain_s: float
    total_s: float
    first_record_s: float
    cpu_s: float
    cpu_start_up_s: float
    peak_rss_mb: float
    broker_cpu_s: float
    postgres_cpu_s: float
    foreign_cores: float
    value_bytes_mean: float

    @property
    def cpu_s_per_million(self) -> float:
        return self.cpu_s / self.rows * 1e6

    def details(self) -> dict[str, Any]:
        rounded = {name: round(value, 2) for name, value in asdict(self).items()}
        return {**rounded, "rows": self.rows, "rows_per_second": round(self.rows_per_second)}


@dataclass(frozen=True)
class _Moment:
    """The clock and the CPU seconds used so far."""

    at: float
    subject: float
    broker: float
    postgres: float


def measure_drain(
    subject: Subject, servers: Servers, connection: psycopg.Connection, backlog: Preload, run: str
) -> Drain:
    """Drain a copy of the base slot with the subject, and check what arrived."""
    topics = Topics(servers.bootstrap)
    topic = subject.topic(run)
    with slots.copied(connection, run):
        subject.prepare(servers.place, run)
        topics.stamp_appends(topic)
        measure.settle(_SETTLE_SECONDS)
        with subject.start(servers.place, run) as program:
            watch = _Watch(program, servers, topics, topic)
            watch.until_written()
            watch.until_visible(backlog.rows)
        checked = topics.check(topic, backlog.rows)
        topics.delete_prefix(run)
    return watch.drain(backlog.rows, checked.first_append_ms / 1000, checked.value_bytes_mean)


class _Watch:
    """Looks at a running subject's topic until all of the backlog is visible."""

    def __init__(self, program: Program, servers: Servers, topics: Topics, topic: str) -> None:
        self._program = program
        self._servers = servers
        self._topics = topics
        self._topic = topic
        self._partitions = topics.partitions(topic)
        self._foreign = measure.Foreign(self._own_seconds)
        self._foreign_cores = 0.0
        self._peak_rss_mb = 0.0
        self._started = self._first = self._last = self._moment()

    def until_written(self) -> None:
        """Return when the first record is in the topic: the end of the start-up."""
        while not self._end(committed=False):
            self._look(self._started)
        self._first = self._moment()

    def until_visible(self, rows: int) -> None:
        """Return when a read_committed reader may see all rows and nothing moves any more."""
        progress = Every(5.0)
        end = 0
        while True:
            seen = self._end(committed=True)
            if seen != end:
                end = seen
                self._last = self._moment()
                self._peak_rss_mb = measure.peak_rss_mb(self._program.pid)
                self._foreign_cores = self._foreign.cores()
                progress.say(f"{self._program.name}: {min(end, rows):,} of {rows:,} rows")
            elif end >= rows and time.time() - self._last.at > _STILL_SECONDS:
                return
            self._look(self._first)

    def drain(self, rows: int, first_record_at: float, value_bytes_mean: float) -> Drain:
        """Return the figures; `first_record_at` is the broker's stamp on the first record."""
        seconds = self._last.at - first_record_at
        return Drain(
            rows=rows,
            rows_per_second=rows / seconds,
            drain_s=seconds,
            total_s=self._last.at - self._started.at,
            first_record_s=first_record_at - self._started.at,
            cpu_s=self._last.subject - self._first.subject,
            cpu_start_up_s=self._first.subject,
            peak_rss_mb=self._peak_rss_mb,
            broker_cpu_s=self._last.broker - self._started.broker,
            postgres_cpu_s=self._last.postgres - self._started.postgres,
            foreign_cores=self._foreign_cores,
            value_bytes_mean=value_bytes_mean,
        )

    def _look(self, since: _Moment) -> None:
        self._program.check()
        if time.time() - since.at > _TIMEOUT_SECONDS:
            raise BenchmarkError(
                f"{self._program.name} is not done after {_TIMEOUT_SECONDS:.0f} s",
                hint="try fewer --rows, or look at its log in the folder that --keep leaves",
            )
        time.sleep(_LOOK_SECONDS)

    def _end(self, *, committed: bool) -> int:
        return sum(self._topics.ends(self._topic, self._partitions, committed=committed))

    def _moment(self) -> _Moment:
        return _Moment(
            at=time.time(),
            subject=measure.cpu_seconds(self._program.pid),
            broker=measure.cpu_seconds(self._servers.kafka_pid),
            postgres=measure.family_cpu_seconds(self._servers.postgres_pid),
        )

    def _own_seconds(self) -> float:
        moment = self._moment()
        return moment.subject + moment.broker + moment.postgres + time.process_time()
