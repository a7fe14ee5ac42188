"""archive, compact, rebuild, history: the log kept, compacted, and read again from there.

The daemon writes inserts of `--rows` / 10 rows and then nine updates of each into the log. Each
figure is of a command as a user runs it, from its start to its end, Spark's included.

- `archive`: events per second of `cdc archive run --once` in a local session; `of_one_worker` is
  the time on a standalone Spark cluster of one worker, which has one processor, by that on two of
  them with one each, from the commit of the first cut to that of the last; `bytes_of_log` is the
  archive's bytes by those of the topics' segments.
- `compact`: events per second of `cdc archive compact`, the base's size, and the time of a second
  one after an update of a hundredth of the rows.
- `rebuild`: seconds of `cdc rebuild` of a Delta follower from the base; `of_full_archive` and
  `of_snapshot` divide it by that from the archive alone, and from rows that are read again.
- `history`: seconds of `cdc history` of one key; the median of the runs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
import yaml
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from benchmarks import backlog, result, rows, servers, slots
from benchmarks.daemon import CDC, PARTITIONS, Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.follow_run import FIRST_ID, fill
from benchmarks.latency import POSTGRES
from benchmarks.programs import Program
from benchmarks.progress import Every, say
from benchmarks.topics import Topics
from tests.fixtures.spark_cluster import standalone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAMES: Final = ("archive", "compact", "rebuild", "history")
RUN: Final = "past"
EVENTS: Final = 10_000_000
OF_A_KEY: Final = 10
_SECONDS: Final = 7_200.0
_LOOK_SECONDS: Final = 0.2
# Where only commits are timed: each look reads some hundred files, on cores that are measured.
_SELDOM_SECONDS: Final = 2.0
_SAY_SECONDS: Final = 30.0
_ARCHIVE_LIMIT: Final = 60_000.0
_HISTORY_LIMIT_S: Final = 2.0
_UPDATE: Final = "UPDATE bench SET k = k + 1, payload = reverse(payload) WHERE id % {of} = {part}"
_PARTS: Final = 100
# How many cuts a log becomes; smaller ones than this would not be written by executors.
_CUTS: Final = 10
_LEAST_CUT: Final = 100_000
_SECRET: Final = "5ec4e7" * 10  # rows are read again on a signed request


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    seconds: float
    cpu_s: float
    peak_rss_mb: float


class Past:
    """A pipeline whose log holds the events, and its archive."""

    def __init__(self, up: Servers, connection: psycopg.Connection, events: int) -> None:
        self.up, self._connection = up, connection
        self.keys = events // OF_A_KEY
        self.events = self.keys * OF_A_KEY
        self.folder = up.place.folder / RUN
        self.archive = up.place.folder / "archive"
        self.daemon = Daemon()
        self._topics = Topics(up.bootstrap)

    def fill(self) -> None:
        """Write all events into the log."""
        self.daemon.prepare(self.up.place, RUN, (rows.TABLE,))
        self.configure(archive=True)
        with self.running():
            say(f"filling the log with {self.events:,} events of {self.keys:,} keys")
            fill(self._connection, self.keys)
            progress = Every(_SAY_SECONDS)
            for number in range(1, OF_A_KEY):
                for part in range(_PARTS):
                    progress.say(f"update {number} of {OF_A_KEY - 1}, {part} %")
                    self._connection.execute(_UPDATE.format(of=_PARTS, part=part).encode())
            self.until_in_log(self.events)

    def update(self) -> int:
        """Update a hundredth of the rows, and wait until the log has it; return how many."""
        self._connection.execute(_UPDATE.format(of=_PARTS, part=0).encode())
        self.events += self.keys // _PARTS
        self.until_in_log(self.events)
        return self.keys // _PARTS

    def configure(self, *, archive: bool, lake: str = "lake") -> None:
        """Write the configuration with or without the archive, and the follower's folder."""
        path = config_path(self.up.place, RUN)
        config = yaml.safe_load(path.read_text())
        config["followers"] = {"mirror": {"delta": {"path": str(self.folder / lake)}}}
        config["control"] = {"secret": _SECRET}
        config["archive"] = {
            "path": str(self.archive),
            "every_seconds": 0,
            "max_events": max(self.events // _CUTS, _LEAST_CUT),
        }
        if not archive:
            config["archive"] = {}
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    @contextmanager
    def running(self) -> Iterator[Program]:
        """Run the daemon for the duration of the block."""
        with self.daemon.start(self.up.place, RUN) as program:
            yield program

    def until_in_log(self, events: int) -> None:
        """Wait until the frontiers count so many events."""
        deadline, progress = time.monotonic() + _SECONDS, Every(_SAY_SECONDS)
        while self._seq() < events:
            progress.say("waiting until the daemon has written them to the log")
            if time.monotonic() > deadline:
                raise BenchmarkError("the events are not in the log", hint="see the daemon's log")
            time.sleep(_LOOK_SECONDS)

    def _seq(self) -> int:
        frontiers = self._topics.read(f"{RUN}.cdc.frontier")
        return max((orjson.loads(each.value() or b"{}")["seq"] for each in frontiers), default=0)

    def command(
        self, *given: str, program: list[str] | None = None, look_seconds: float = _LOOK_SECONDS
    ) -> Ran:
        """Run a command of ours to its end; sample its CPU time and memory every `look_seconds`."""
        path = str(config_path(self.up.place, RUN))
        command = [*(program or [*CDC, *given]), "--config", path]
        began = time.monotonic()
        with Program(
            " ".join(given),
            command,
            self.folder / "command.log",
            environment={
                **os.environ,
                "TMPDIR": str(self.folder),
                "PYSPARK_PYTHON": sys.executable,
            },
        ) as ran:
            family, progress = Family(ran.pid), Every(_SAY_SECONDS)
            while ran.running() and time.monotonic() < began + _SECONDS:
                family.look()
                progress.say(f"{' '.join(given)}: {time.monotonic() - began:.0f} s so far")
                time.sleep(look_seconds)
            seconds = time.monotonic() - began
            ran.wait(1.0)
        say(f"{' '.join(given)}: {seconds:.1f} s")
        return Ran(seconds, family.cpu_seconds, max(family.peaks_mb.values(), default=0.0))

    def rebuilt(self, lake: str, *, archive: bool = True) -> Ran:
        """Fill a lake of its own: a rebuild compares with the rows of the generation before."""
        self.configure(archive=archive, lake=lake)
        return self.command("rebuild", "mirror")

    def on_cluster(self, workers: int) -> float:
        """Archive the log on a standalone cluster of so many workers with one core each.

        Returns the seconds from the commit of the first cut to that of the last.
        """
        shutil.rmtree(self.archive, ignore_errors=True)
        folder = self.up.place.folder / f"spark-{workers}"
        folder.mkdir()
        with standalone(folder, *[1] * workers, pinned=True) as cluster:
            program = [*cluster.submitting("archive"), "--once"]
            self.command("archive", f"on {workers}", program=program, look_seconds=_SELDOM_SECONDS)
        _, first, *others = sorted((self.archive / "_delta_log").glob("*.json"))
        between = others[-1].stat().st_mtime - first.stat().st_mtime
        say(f"between the commits of {1 + len(others)} cuts: {between:.1f} s")
        return between

    def forget(self) -> None:
        """Delete the table's events from the topics."""
        ends = [TopicPartition(f"{RUN}.public.{rows.TABLE}", n, -1) for n in range(PARTITIONS)]
        admin = AdminClient({"bootstrap.servers": self.up.bootstrap})
        for done in admin.delete_records(ends).values():
            done.result(timeout=_SECONDS)
        self.command("topics", "acknowledge", "--yes")

    def log_bytes(self) -> int:
        """Return the size of the segments of the pipeline's topics."""
        found = self.up.place.folder.rglob(f"{RUN}.*/*.log")
        return sum(each.stat().st_size for each in found)

    def archive_bytes(self, folder: str = "") -> int:
        """Return the size of the archive's files, or of those in its folder of bases."""
        return sum(each.stat().st_size for each in (self.archive / folder).glob("part-*"))


def run(name: str, options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    measures: dict[str, Callable[[Past, Options], dict[str, Any]]] = {
        "archive": _archive, "compact": _compact, "rebuild": _rebuild, "history": _history,
    }  # fmt: skip
    with (
        servers.running(name, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
    ):
        connection.execute(rows.CREATE_TABLE)
        backlog.publish(connection, (rows.TABLE,))
        with slots.created(connection, RUN):
            past = Past(up, connection, options.rows or EVENTS)
            past.fill()
            found = measures[name](past, options)
        ran: Ran = found.pop("ran")
        return result.build(
            name=name,
            floor=None,
            peer=None,
            cpu_s_per_million=ran.cpu_s / past.events * 1e6,
            peak_rss_mb=ran.peak_rss_mb,
            versions=up.versions,
            **{"limit": None, **found},
        )


def _archive(past: Past, _: Options) -> dict[str, Any]:
    if past.events < 2 * _LEAST_CUT:
        raise BenchmarkError("too few events for two cuts", hint=f"--rows {2 * _LEAST_CUT} or more")
    one, two = (past.on_cluster(workers) for workers in (1, 2))
    shutil.rmtree(past.archive)
    ran = past.command("archive", "run", "--once")
    return {
        "unit": "events/s",
        "value": past.events / ran.seconds,
        "limit": _ARCHIVE_LIMIT,
        "ran": ran,
        "details": {
            "events": past.events,
            "log_bytes_per_event": round(past.log_bytes() / past.events, 1),
            "of_one_worker": round(one / two, 2),
            "bytes_of_log": round(past.archive_bytes() / past.log_bytes(), 3),
        },
    }


def _compact(past: Past, _: Options) -> dict[str, Any]:
    past.command("archive", "run", "--once")
    ran, events = past.command("archive", "compact"), past.events
    base_bytes = past.archive_bytes("_bases")
    with past.running():
        updated = past.update()
    past.command("archive", "run", "--once")
    again = past.command("archive", "compact")
    return {
        "unit": "events/s",
        "value": events / ran.seconds,
        "ran": ran,
        "details": {
            "events": events,
            "keys": past.keys,
            "base_bytes": base_bytes,
            "seconds": round(ran.seconds, 1),
            "incremental_events": updated,
            "incremental_s": round(again.seconds, 1),
        },
    }


def _rebuild(past: Past, _: Options) -> dict[str, Any]:
    past.command("archive", "run", "--once")
    past.forget()
    full = past.rebuilt("full")
    past.command("archive", "compact")
    ran = past.rebuilt("base")
    with past.running():
        past.update()  # once that is in the log the daemon streams
        snapshot = past.rebuilt("snapshot", archive=False)
    return {
        "unit": "s",
        "value": ran.seconds,
        "ran": ran,
        "details": {
            "rows": past.keys,
            "events": past.events,
            "of_full_archive": round(ran.seconds / full.seconds, 2),
            "of_snapshot": round(ran.seconds / snapshot.seconds, 2),
            "full_archive_s": round(full.seconds, 1),
            "snapshot_s": round(snapshot.seconds, 1),
            "cpu_s": round(ran.cpu_s, 1),
            "full_archive_cpu_s": round(full.cpu_s, 1),
            "snapshot_cpu_s": round(snapshot.cpu_s, 1),
        },
    }


def _history(past: Past, options: Options) -> dict[str, Any]:
    past.command("archive", "run", "--once")
    key = str(FIRST_ID + past.keys // 2)
    ran = [past.command("history", f"public.{rows.TABLE}", key) for _ in range(options.runs)]
    return {
        "unit": "s",
        "value": statistics.median(each.seconds for each in ran),
        "limit": _HISTORY_LIMIT_S,
        "ran": ran[0],
        "details": {"events": past.events, "runs": [round(each.seconds, 2) for each in ran]},
    }


RUNS: Final = {name: partial(run, name) for name in NAMES}
