"""A follower of views under measurement: the CPU of its cuts, and of computing them completely.

The daemon and a Delta follower of the tables run in processes of their own. The measured process
keeps the views in Delta. What a cut costs is its CPU time from before the commit until the store is
at its frontier and a second after, less what it uses while nothing happens. Computing them
completely is `benchmarks.view_recompute`, over the same mirrors.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
import yaml
from msgspec.structs import asdict

from benchmarks import backlog
from benchmarks.daemon import CDC, Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.follow_delta import DeltaStore
from benchmarks.follow_run import FOLLOWER
from benchmarks.follow_server import RUN
from benchmarks.programs import Program
from benchmarks.progress import Every, say
from benchmarks.view_contents import differing
from cdc.config import load
from cdc.events import LSN
from cdc.log import follower_reports
from lockstep.jobs.documents.mirror_cuts import LogVersions
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.jobs.views.plans import plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from benchmarks.follow_run import Store
    from benchmarks.servers import Servers

LAKE: Final = "lake"
_IDLE_SECONDS: Final = 10.0
_AFTERWARDS_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.05
# Where executors have all processors: each look opens a table.
_RARE_LOOK_SECONDS: Final = 0.2
_TIMEOUT_SECONDS: Final = 3_600.0
_RECOMPUTES: Final = 3
_ALL: Final = LSN((1 << 64) - 1)

# Statements, or lines for COPY by table.
Work = Sequence[str] | Mapping[str, Iterable[bytes]]


class Cut(NamedTuple):
    """One transaction, applied by the follower of the views."""

    cpu_s: float
    seconds: float  # from the commit until readers find the frontier


class ViewRun:
    """Tables in Postgres, their mirrors, and views of them."""

    def __init__(
        self,
        up: Servers,
        connection: psycopg.Connection,
        tables: Mapping[str, str],
        views: Mapping[str, Mapping[str, Any]],
        store: Store | None = None,
        mirror_every_seconds: float = 0.0,
        linger_ms: int = 0,
    ) -> None:
        """`tables`: what CREATE TABLE has in parentheses. `views`: their sections.

        `store` is where the views are: in Delta by default.
        """
        self._batch = {"linger_ms": linger_ms}
        self._every = {"every_seconds": mirror_every_seconds}
        self._up, self.connection, self._tables, self.views = up, connection, tables, views
        self._folder = up.place.folder / RUN
        self._mirrors = self._in_delta(LAKE)
        self._answers = store or self._in_delta(FOLLOWER)
        self.seq, self._watched = 0, list[Program]()
        self.peaks_mb = dict[str, float]()
        for name, columns in tables.items():
            connection.execute(f"CREATE TABLE {name} ({columns})".encode())
        backlog.publish(connection, tuple(tables))

    @contextmanager
    def mirrored(self, others: Sequence[str] = ()) -> Iterator[None]:
        """Run the daemon and the follower of the tables for the duration of the block.

        The configuration also names these `others`, followers of the views in Delta.
        """
        daemon, place = Daemon(), self._up.place
        daemon.prepare(place, RUN, tuple(self._tables))
        path = config_path(place, RUN)
        config = yaml.safe_load(path.read_text())
        # Rows alone are counted here, to know which seq a store must reach: canaries have one, too.
        config["source"]["canary_seconds"] = 0
        config["batch"] = self._batch
        config["views"] = {name: dict(view) for name, view in self.views.items()}
        of_views = {"mirror": LAKE, "views": list(self.views)}
        config["followers"] = {
            LAKE: {**self._mirrors.section, **self._every},
            FOLLOWER: {**self._answers.section, **of_views},
            **{name: {**self._in_delta(name).section, **of_views} for name in others},
        }
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        with daemon.start(place, RUN) as running, self._following(LAKE) as lake:
            self._watched = [running, lake]
            yield

    @contextmanager
    def viewed(self) -> Iterator[Family]:
        """Run the measured follower, from when it has computed the views for the first time."""
        with self._following(FOLLOWER) as follower:
            self._watched.append(follower)
            family = Family(follower.pid)
            self._wait(self._answers, family)
            family.wait_until_quiet()
            yield family
            family.look()
            self.peaks_mb = family.peaks_mb
            self._watched.remove(follower)

    def execute(self, work: Work) -> None:
        """Change rows in one transaction: by statements, or by COPY of lines into tables."""
        with self.connection.transaction(), self.connection.cursor() as cursor:
            if isinstance(work, Sequence):
                for each in work:
                    self.seq += max(cursor.execute(each.encode()).rowcount, 0)
                return
            for table, lines in work.items():
                with cursor.copy(f"COPY {table} FROM STDIN DELIMITER '|'".encode()) as copy:
                    for line in lines:
                        copy.write(line)
                self.seq += cursor.rowcount

    def wait_for_mirrors(self) -> None:
        """Wait until the mirrors have every change."""
        self._wait(self._mirrors)

    def count_canaries(self) -> None:
        """Count what else the log has: each wait is then for what follows."""
        self.seq = max(self.seq, self._mirrors.seq())

    def wait_for(self, name: str, follower: Program, *families: Family) -> float:
        """Wait until another follower of the views has every change; return the seconds."""
        self._watched.append(follower)
        seconds = self._wait(self._in_delta(name), *families, look_seconds=_RARE_LOOK_SECONDS)
        self._watched.remove(follower)
        return seconds

    def idle_cores(self, family: Family) -> float:
        """Return what the follower uses while nothing happens."""
        family.wait_until_quiet()
        return family.cores(_IDLE_SECONDS)

    def cut(self, family: Family, work: Work, idle: float) -> Cut:
        """Change rows in one transaction; return what the follower of the views used for it."""
        family.look()
        used, began = family.cpu_seconds, time.monotonic()
        self.execute(work)
        seconds = self._wait(self._answers, family)
        time.sleep(_AFTERWARDS_SECONDS)
        family.look()
        lasted = time.monotonic() - began
        found = Cut(family.cpu_seconds - used - idle * lasted, seconds)
        say(f"a cut: {found.cpu_s:.2f} CPU-s, {found.seconds:.1f} s")
        return found

    def ways(self) -> dict[str, dict[str, Any]]:
        """Return how each view was computed in its last cut, as the follower has reported it."""
        reports = follower_reports.read(load(config_path(self._up.place, RUN)))
        return {view: asdict(work) for view, work in reports[FOLLOWER].views.items()}

    def recomputed(self) -> dict[str, dict[str, float]]:
        """Return the median CPU and wall seconds of computing each view completely."""
        command = [sys.executable, "-m", "benchmarks.view_recompute"]
        path, out = config_path(self._up.place, RUN), self._folder / "complete"
        log = self._folder / "complete.log"
        log.unlink(missing_ok=True)
        command += [str(path), FOLLOWER, str(out), str(_RECOMPUTES)]
        with Program(
            "the complete computation", command, log, environment=self._environment
        ) as ran:
            ran.wait(_TIMEOUT_SECONDS)
            line = next(each for each in ran.output().splitlines() if each.startswith("[{"))
        runs = orjson.loads(line)
        return {
            view: {
                figure: statistics.median(each[view][figure] for each in runs)
                for figure in ("cpu_s", "seconds")
            }
            for view in self.views
        }

    def check(self, view: str, follower: str = FOLLOWER) -> int:
        """Return how many rows a view has; BenchmarkError unless they are Postgres' answer."""
        place, name = str(self._folder / follower), f"views.{view}"
        found = read_as_of_arrow(place, [name]).tables[name]
        config = load(config_path(self._up.place, RUN))
        # Its query, with what decides between rows of its LIMIT.
        planned = plan(view, config.views, LogVersions(config)(_ALL))
        rows = found.select([*planned.columns])
        missing, extra = differing(self.connection, planned.asked[view], rows)
        if missing or extra:
            raise BenchmarkError(
                f"view {view} of {found.num_rows:,} rows: {missing:,} of Postgres' rows are"
                f" missing, {extra:,} should not be there",
                hint="no figure counts",
            )
        return len(rows)

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self._folder), "PYSPARK_PYTHON": sys.executable}

    def _following(self, name: str) -> Program:
        command = [*CDC, "follow", "--config", str(config_path(self._up.place, RUN))]
        return Program(
            f"the follower {name}",
            [*command, "--followers", name],
            self._folder / f"follow-{name}.log",
            environment=self._environment,
        )

    def _in_delta(self, name: str) -> DeltaStore:
        return DeltaStore(self._folder / name, 0)

    def _wait(self, store: Store, *families: Family, look_seconds: float = _LOOK_SECONDS) -> float:
        began, progress = time.monotonic(), Every(10.0)
        while (seq := store.seq()) < self.seq:
            for program in self._watched:
                program.check()
            progress.say(f"at {seq:,} of {self.seq:,}")
            for family in families:
                family.look()
            if time.monotonic() > began + _TIMEOUT_SECONDS:
                raise BenchmarkError("the follower does not catch up", hint="see its log")
            time.sleep(look_seconds)
        return time.monotonic() - began


def median(cuts: Sequence[Cut]) -> Cut:
    """Return the median of each figure."""
    return Cut(*(round(statistics.median(values), 3) for values in zip(*cuts, strict=True)))
