"""One initial snapshot: a subject carries a table's rows into its topic, watched and checked.

The time runs from the broker's timestamp of the first record to the moment at which a
read_committed reader can see the last, for every subject alike; start-up is reported separately.
What arrived is checked before the figure is reported: every key, once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks import measure, slots
from benchmarks.contents import EachIdOnce
from benchmarks.daemon import CDC, PARTITIONS, write_config
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.programs import Program
from benchmarks.progress import Every
from benchmarks.rows import TABLE
from benchmarks.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg

    from benchmarks.servers import Servers
    from benchmarks.subject import RunContext, Subject

_LOOK_SECONDS: Final = 0.05
_TIMEOUT_SECONDS: Final = 900.0
_STILL_SECONDS: Final = 2.0
_QUIET_SECONDS: Final = 20.0
_SETUP_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Snapshot:
    """What one snapshot took."""

    rows: int
    rows_per_second: float
    snapshot_s: float
    total_s: float  # from the start of the process
    first_record_s: float
    cpu_s: float  # of the subject's processes, start-up included
    broker_cpu_s: float
    postgres_cpu_s: float
    peak_rss_mb: dict[str, float]  # by kind of process
    foreign_cores: float
    value_bytes_mean: float

    @property
    def cpu_s_per_million(self) -> float:
        return self.cpu_s / self.rows * 1e6

    def details(self) -> dict[str, Any]:
        fields = asdict(self)
        rounded = {k: round(v, 2) for k, v in fields.items() if isinstance(v, float)}
        return {**fields, **rounded, "rows_per_second": round(self.rows_per_second)}


@dataclass(frozen=True)
class Ours:
    """`cdc run` on a new pipeline, with one of the snapshot runners."""

    runner: str
    snapshot: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"lockstep-{self.runner}"

    @property
    def settings(self) -> Mapping[str, str | int]:
        given = {"runner": self.runner, **self.snapshot}
        return {"log.partitions": PARTITIONS, **{f"snapshot.{k}": v for k, v in given.items()}}

    def topic(self, run: str, table: str) -> str:
        return f"{run}.public.{table}"

    def prepare(self, place: RunContext, run: str, tables: tuple[str, ...]) -> None:
        (place.folder / run).mkdir()
        snapshot = {"mode": "initial", "runner": self.runner, **self.snapshot}
        path = write_config(place, run, tables, snapshot=snapshot)
        done = subprocess.run(
            [*CDC, "setup", "--config", str(path)],
            capture_output=True, text=True, timeout=_SETUP_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise BenchmarkError(
                f"cdc setup ended with exit code {done.returncode}",
                hint=f"it printed: {done.stdout.strip()} {done.stderr.strip()}",
            )

    def start(self, place: RunContext, run: str) -> Program:
        folder = place.folder / run
        return Program(
            self.name,
            [*CDC, "run", "--config", str(folder / "lockstep.yaml")],
            folder / "log",
            environment={**os.environ, "TMPDIR": str(folder), "PYSPARK_PYTHON": sys.executable},
        )


def measure_snapshot(
    subject: Subject, servers: Servers, connection: psycopg.Connection, rows: int, run: str
) -> Snapshot:
    """Let the subject copy the table, and check what arrived."""
    topics, topic = Topics(servers.bootstrap), subject.topic(run, TABLE)
    with slots.dropped(connection, run):
        subject.prepare(servers.place, run, (TABLE,))
        topics.stamp_appends(topic)
        measure.wait_until_quiet(_QUIET_SECONDS)
        with subject.start(servers.place, run) as program:
            watch = _SnapshotPoller(program, servers, topics, topic)
            watch.until_visible(rows)
            last = watch.last
            peaks = watch.family.peaks_mb
        checked = topics.check({topic: EachIdOnce(TABLE, rows)})
        topics.delete_prefix(run)
    first_at = checked.first_append_ms / 1000
    return Snapshot(
        rows=rows,
        rows_per_second=rows / (last.at - first_at),
        snapshot_s=last.at - first_at,
        total_s=last.at - watch.began.at,
        first_record_s=first_at - watch.began.at,
        cpu_s=last.subject,
        broker_cpu_s=last.broker - watch.began.broker,
        postgres_cpu_s=last.postgres - watch.began.postgres,
        peak_rss_mb=peaks,
        foreign_cores=watch.foreign_cores,
        value_bytes_mean=checked.value_bytes_mean,
    )


@dataclass(frozen=True)
class _Moment:
    """The clock and the CPU seconds used so far."""

    at: float
    subject: float
    broker: float
    postgres: float


class _SnapshotPoller:
    """Polls a running subject until all rows are visible."""

    def __init__(self, program: Program, servers: Servers, topics: Topics, topic: str) -> None:
        self._program, self._servers, self._topics = program, servers, topics
        self._places = [(topic, number) for number in topics.partitions(topic)]
        self.family = Family(program.pid)
        self._foreign = measure.Foreign(self._own_seconds)
        self.foreign_cores = 0.0
        self.began = self.last = self._moment()

    def until_visible(self, rows: int) -> None:
        """Return when a read_committed reader can see all rows and no offset changes."""
        progress, end = Every(5.0), 0
        while True:
            seen = sum(self._topics.ends(self._places, committed=True))
            self.family.look()
            if seen != end:
                end, self.last = seen, self._moment()
                self.foreign_cores = self._foreign.cores()
                progress.say(f"{self._program.name}: {min(end, rows):,} of {rows:,} rows")
            elif end >= rows and time.time() - self.last.at > _STILL_SECONDS:
                return
            self._program.check()
            if time.time() - self.began.at > _TIMEOUT_SECONDS:
                raise BenchmarkError(
                    f"{self._program.name} is not done after {_TIMEOUT_SECONDS:.0f} s",
                    hint="try fewer --rows, or look at its log in the folder that --keep leaves",
                )
            time.sleep(_LOOK_SECONDS)

    def _moment(self) -> _Moment:
        return _Moment(
            at=time.time(),
            subject=self.family.cpu_seconds,
            broker=measure.cpu_seconds(self._servers.kafka_pid),
            postgres=measure.family_cpu_seconds(self._servers.postgres_pid),
        )

    def _own_seconds(self) -> float:
        moment = self._moment()
        return moment.subject + moment.broker + moment.postgres + time.process_time()
