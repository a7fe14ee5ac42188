"""follow-restart: all of a followers' job is killed under load; how long until stores are current.

Three followers (Redis, OpenSearch, Delta) in one job, at 300 commits a second. All processes of the
job are killed with SIGKILL, and it is started again at once. A store is current when a reader finds
in it something newer than the kill, and everything that was in the log a second before. The figure
is the median, in seconds, over ten kills, until the last of the three is current.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from bisect import bisect_right
from contextlib import ExitStack, suppress
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import yaml

from benchmarks import backlog, follow_redis, follow_search, result, rows, servers, slots
from benchmarks.daemon import Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family, below
from benchmarks.follow_delta import DeltaStore
from benchmarks.follow_run import FollowRun, Store
from benchmarks.follow_server import RUN
from benchmarks.latency import POSTGRES
from benchmarks.programs import Program
from benchmarks.progress import say
from cdc.config import load
from cdc.log.frontier_tail import FrontierTail

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.options import Options

NAME: Final = "follow-restart"
LIMIT_SECONDS: Final = 5.0
LIMIT_WORST_SECONDS: Final = 8.0
_RATE: Final = 300
_KILLS: Final = 10
_FRESH_SECONDS: Final = 1.0
# Between two kills: long enough for Spark's queries to have taken over.
_BETWEEN_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.02
_WAIT_SECONDS: Final = 300.0
_LOAD_SECONDS: Final = 3_600.0


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
        ExitStack() as running,
    ):
        folder = up.place.folder
        cache = running.enter_context(follow_redis.running(folder / "redis"))
        search = running.enter_context(follow_search.running(folder / "search"))
        cache.follower, search.follower = "cache", "search"
        stores: dict[str, Store] = {
            "cache": cache,
            "search": search,
            "mirror": DeltaStore(folder / "lake", 0),
        }
        connection.execute(rows.CREATE_TABLE)
        backlog.publish(connection, (rows.TABLE,))
        with slots.created(connection, RUN):
            return _Restarts(RUN, cache, up, connection, options).result(stores)


class _LogSeqs:
    """The seqs of the log's frontiers and when each was first seen, read in a thread."""

    def __init__(self, config: Path) -> None:
        self._tail = FrontierTail(load(config), 0, 0)
        self._seen: list[tuple[float, int]] = [(0.0, 0)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.is_set():
            for record, _ in self._tail.arrivals(0.2):
                self._seen.append((time.monotonic(), record.seq))

    def at(self, moment: float) -> int:
        """Return the newest seq that was in the log at that time (monotonic)."""
        return self._seen[bisect_right(self._seen, (moment, sys.maxsize)) - 1][1]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._tail.close()


class _Restarts(FollowRun):
    """The run: one job, killed again and again."""

    def result(self, stores: dict[str, Store]) -> dict[str, Any]:
        place, subject = self._up.place, Daemon()
        subject.prepare(place, RUN, (rows.TABLE,))
        path = config_path(place, RUN)
        config = yaml.safe_load(path.read_text())
        config["followers"] = {name: store.section for name, store in stores.items()}
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        kills = _KILLS if self._options.rows is None else 3
        command = [sys.executable, "-m", "benchmarks.commit_load"]
        command += [str(self._up.postgres_port), str(_RATE), str(_LOAD_SECONDS)]  # to the end
        peaks: dict[str, float] = {}
        with (
            subject.start(place, RUN),
            Program("the commit load", command, place.folder / "load.log") as commits,
            ExitStack() as closing,
        ):
            log = _LogSeqs(path)
            closing.callback(log.close)
            follower = self._follower()
            closing.callback(lambda: _kill(follower))
            first = self._until_current(stores, log, follower)
            say(f"first start: {first}")
            found = []
            for number in range(kills):
                self._rest(follower, peaks)
                _kill(follower)
                follower = self._follower()
                found.append(self._until_current(stores, log, follower))
                commits.check()
                say(f"kill {number + 1}: {found[-1]}")
        worst = [max(each.values()) for each in found]
        return result.build(
            name=NAME,
            unit="s",
            value=median(worst),
            limit=LIMIT_SECONDS,
            floor=None,
            peer=None,
            cpu_s_per_million=0.0,
            peak_rss_mb=max(peaks.values()),
            versions=self._up.versions,
            details={
                "rate": _RATE,
                "kills": kills,
                "p50_s": round(median(worst), 2),
                "max_s": round(max(worst), 2),
                "max_limit_s": LIMIT_WORST_SECONDS,
                "first_start_s": first,
                "each_s": found,
                "servers": self._up.settings,
            },
        )

    def _rest(self, follower: Program, peaks: dict[str, float]) -> None:
        """Let the job run on for a while."""
        family, until = Family(follower.pid), time.monotonic() + _BETWEEN_SECONDS
        while time.monotonic() < until:
            follower.check()
            time.sleep(1.0)
        family.look()
        for name, peak in family.peaks_mb.items():
            peaks[name] = max(peaks.get(name, 0.0), peak)

    def _until_current(
        self, stores: dict[str, Store], log: _LogSeqs, follower: Program
    ) -> dict[str, float]:
        """Return the seconds until each store was current."""
        began, found = time.monotonic(), dict[str, float]()
        before = log.at(began)
        while len(found) < len(stores):
            follower.check()
            for name, store in stores.items():
                wanted = max(before + 1, log.at(time.monotonic() - _FRESH_SECONDS))
                if name not in found and store.seq() >= wanted:
                    found[name] = round(time.monotonic() - began, 2)
            if time.monotonic() > began + _WAIT_SECONDS:
                raise BenchmarkError(f"only {list(found)} are current", hint="see the job's log")
            time.sleep(_LOOK_SECONDS)
        return found


def _kill(follower: Program) -> None:
    """Kill all processes of the job."""
    for pid in below(follower.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    follower.kill()
