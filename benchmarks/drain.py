"""One drain: a subject carries a backlog from the WAL into its topics, watched and checked.

The drain's time runs from where the workload's clock starts (the broker's timestamp of the first
record, or the moment at which a walsender streams) to the moment at which a read_committed reader
can see the last event, found by polling end offsets every 25 ms. It excludes start-up, which is
reported separately: `total_s` runs from the start of the process. CPU time is split where the clock
starts. What arrived is checked before the figure is reported.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import measure, slots
from benchmarks.failure import BenchmarkError
from benchmarks.progress import Every
from benchmarks.topics import Topics
from benchmarks.workload import Clock

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from benchmarks.backlog import Backlog
    from benchmarks.programs import Program
    from benchmarks.servers import Servers
    from benchmarks.subject import Subject
    from benchmarks.workload import Workload

_LOOK_SECONDS = 0.025
_TIMEOUT_SECONDS = 900.0
# The control records of transactions take offsets too, so the offsets alone do not identify the
# last event. The last event is assumed after this many seconds without change; the check then
# counts the events.
_STILL_SECONDS = 2.0
_QUIET_SECONDS = 20.0


@dataclass(frozen=True)
class Drain:
    """What one drain took."""

    rows: int
    rows_per_second: float
    drain_s: float
    total_s: float
    slot_taken_s: float  # from the start of the process, as are the next fields
    first_record_s: float
    cpu_s: float
    cpu_start_up_s: float
    peak_rss_mb: float
    peak_files_mb: float  # in its folder, without its log
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
    subject: Subject,
    servers: Servers,
    connection: psycopg.Connection,
    workload: Workload,
    backlog: Backlog,
    run: str,
) -> Drain:
    """Drain a copy of the base slot with the subject, and check what arrived."""
    topics = Topics(servers.bootstrap)
    contents = {
        subject.topic(run, table): content
        for table, content in workload.contents(connection, backlog.rows).items()
    }
    with slots.copied(connection, run):
        subject.prepare(servers.place, run, workload.tables)
        for topic in contents:
            topics.stamp_appends(topic)
        measure.wait_until_quiet(_QUIET_SECONDS)
        with subject.start(servers.place, run) as program:
            watch = _BacklogPoller(
                program, servers, topics, list(contents), servers.place.folder / run
            )
            watch.until_taken(connection, run)
            watch.until_written()
            watch.until_visible(backlog.rows)
        checked = topics.check(contents)
        topics.delete_prefix(run)
    first_record_at = checked.first_append_ms / 1000
    return watch.drain(backlog.rows, first_record_at, checked.value_bytes_mean, workload.clock)


class _BacklogPoller:
    """Polls a running subject's topics until all of the backlog is visible."""

    def __init__(
        self,
        program: Program,
        servers: Servers,
        topics: Topics,
        watched: list[str],
        folder: Path,
    ) -> None:
        self._program = program
        self._folder = folder
        self._servers = servers
        self._topics = topics
        self._places = [(name, number) for name in watched for number in topics.partitions(name)]
        self._foreign = measure.Foreign(self._own_seconds)
        self._foreign_cores = 0.0
        self._peak_rss_mb = self._peak_files_mb = 0.0
        self._started = self._taken = self._first = self._last = self._moment()

    def until_taken(self, connection: psycopg.Connection, slot: str) -> None:
        """Return when a walsender streams from the slot."""
        while not slots.is_taken(connection, slot):
            self._look(self._started)
        self._taken = self._moment()

    def until_written(self) -> None:
        """Return when the first record is in a topic: the end of the start-up."""
        while not self._end(committed=False):
            self._look(self._started)
        self._first = self._moment()

    def until_visible(self, rows: int) -> None:
        """Return when a read_committed reader can see all rows and no offset changes."""
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

    def drain(
        self, rows: int, first_record_at: float, value_bytes_mean: float, clock: Clock
    ) -> Drain:
        """Return the figures; `first_record_at` is the broker's timestamp of the first record."""
        began = first_record_at if clock is Clock.FIRST_RECORD else self._taken.at
        # Where the clock starts at the slot, work before the first record does not count as
        # start-up.
        before = self._first if clock is Clock.FIRST_RECORD else self._taken
        seconds = self._last.at - began
        return Drain(
            rows=rows,
            rows_per_second=rows / seconds,
            drain_s=seconds,
            total_s=self._last.at - self._started.at,
            slot_taken_s=self._taken.at - self._started.at,
            first_record_s=first_record_at - self._started.at,
            cpu_s=self._last.subject - before.subject,
            cpu_start_up_s=before.subject,
            peak_rss_mb=self._peak_rss_mb,
            peak_files_mb=self._peak_files_mb,
            broker_cpu_s=self._last.broker - self._started.broker,
            postgres_cpu_s=self._last.postgres - self._started.postgres,
            foreign_cores=self._foreign_cores,
            value_bytes_mean=value_bytes_mean,
        )

    def _look(self, since: _Moment) -> None:
        self._program.check()
        files_mb = measure.folder_mb(self._folder, without="log")
        self._peak_files_mb = max(self._peak_files_mb, files_mb)
        if time.time() - since.at > _TIMEOUT_SECONDS:
            raise BenchmarkError(
                f"{self._program.name} is not done after {_TIMEOUT_SECONDS:.0f} s",
                hint="try fewer --rows, or look at its log in the folder that --keep leaves",
            )
        time.sleep(_LOOK_SECONDS)

    def _end(self, *, committed: bool) -> int:
        return sum(self._topics.ends(self._places, committed=committed))

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
