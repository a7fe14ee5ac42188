"""resnapshot-live: an incremental snapshot of a changing table, and its effect on the stream.

A million rows, older than the log; single-row commits into the same table at 1,000 a second, first
alone, then during `cdc snapshot`. The figure is snapshot rows per second in the log, as a
read_committed consumer gets them; the result also has the stream's latency before and during the
snapshot, when it was worst, and which process used the CPU. The floor is the server's own COPY of
the same rows, in key order, discarded. The run has no peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks import backlog, measure, result, rows, servers, slots
from benchmarks.arrivals import Arrivals
from benchmarks.commit_load import CONNECTIONS
from benchmarks.daemon import CDC, Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.latency import POSTGRES
from benchmarks.programs import Program
from benchmarks.progress import Every, say
from benchmarks.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAME = "resnapshot-live"
# The limit for the latency, in milliseconds.
P99_LIMIT_MS = 200.0

_ROWS = 1_000_000
# First id of the rows that exist before the load; the load's ids count from 1.
_FIRST_ID = 100_000_000
_RUN = "resnapshot"
_QUIET_SECONDS = 20.0
_LOAD_GRACE_SECONDS = 60.0
# The result lists the worst stretches of changes slower than this.
_SLOW_MS = 100.0
_SLOWEST = 5


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    count = options.rows or _ROWS
    subject = Daemon()
    with servers.running(NAME, POSTGRES, keep=options.keep) as up, up.connect() as connection:
        connection.execute(rows.CREATE_TABLE)
        say(f"filling the table with {count:,} rows")
        values = rows.VALUES.replace("{i}", "i")
        connection.execute(
            f"INSERT INTO bench SELECT {values} FROM generate_series({_FIRST_ID}::bigint,"
            f" {_FIRST_ID + count - 1}) i".encode()
        )
        connection.execute("VACUUM ANALYZE bench")
        backlog.publish(connection, (rows.TABLE,))
        floor = _floor(connection, count)
        topics = Topics(up.bootstrap)
        topic = subject.topic(_RUN, rows.TABLE)
        with slots.created(connection, _RUN) as slot:
            subject.prepare(up.place, _RUN, (rows.TABLE,))
            measure.wait_until_quiet(_QUIET_SECONDS)
            with subject.start(up.place, _RUN) as program:
                slots.wait_streaming(connection, slot, program)
                arrivals = Arrivals(up.bootstrap, topic, topics.partitions(topic))
                try:
                    shown = _measured(program, arrivals, up, options, count)
                finally:
                    arrivals.close()
        return _result(shown, floor, subject, up, options, count)


def _floor(connection: psycopg.Connection, count: int) -> float:
    query = b"COPY (SELECT * FROM bench ORDER BY id) TO STDOUT (FORMAT binary)"
    seconds = []
    for _ in range(3):
        began_at = time.monotonic()
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            for _ in copy:
                pass
        seconds.append(time.monotonic() - began_at)
    say(f"floor: {count / min(seconds):,.0f} rows/s")
    return count / min(seconds)


def _measured(
    program: Program, arrivals: Arrivals, up: Servers, options: Options, count: int
) -> dict[str, Any]:
    """Start the load, then request the snapshot; return the figures of both."""
    load_seconds = options.warm_up_seconds + options.seconds
    command = [sys.executable, "-m", "benchmarks.commit_load"]
    command += [str(up.postgres_port), str(options.rate), str(load_seconds)]
    with Program("the commit load", command, up.place.folder / "load.log") as load:
        progress = Every(10.0)

        def print_progress() -> None:
            program.check()
            progress.say(f"{arrivals.events:,} changes and {arrivals.copied:,} rows arrived")

        def until(deadline: float) -> bool:
            print_progress()
            return time.monotonic() < deadline

        def still_loading() -> bool:
            print_progress()
            return load.running()

        started = time.monotonic()
        half = started + options.warm_up_seconds / 2
        arrivals.collect(lambda: until(half))
        alone_from_us = time.time_ns() // 1000
        arrivals.collect(lambda: until(started + options.warm_up_seconds))
        arrivals.away_ms()
        from_us = time.time_ns() // 1000
        cpu = _Cpu(program, load, up)
        shown = _read_again(arrivals, up, count, still_loading)
        to_us = time.time_ns() // 1000
        shown |= cpu.shown(count + options.rate * shown["seconds"])
        shown["reader_away_ms_max"] = arrivals.away_ms()
        arrivals.collect(load.running)
        load.wait(_LOAD_GRACE_SECONDS)
        committed = json.loads(load.output())
        arrivals.collect_all(committed["committed"])
    slow = arrivals.slowest(from_us, to_us, _SLOW_MS)
    worst = sorted(slow, key=lambda each: -each.max_ms)[:_SLOWEST]
    return shown | {
        "meanwhile": arrivals.percentiles(from_us, to_us),
        "alone": arrivals.percentiles(alone_from_us, from_us),
        "slowest": [asdict(each) for each in sorted(worst, key=lambda each: each.at_s)],
        "peak_rss_mb": measure.peak_rss_mb(program.pid),
        "late_ms_max": committed["late_ms_max"],
    }


def _read_again(
    arrivals: Arrivals, up: Servers, count: int, go_on: Callable[[], bool]
) -> dict[str, Any]:
    """Run `cdc snapshot` and record arrivals until all rows have arrived; return the times.

    The rows of the load are excluded, because each may arrive only once.
    """
    config = str(config_path(up.place, _RUN))
    command = [*CDC, "snapshot", "public.bench", "--where", f"id >= {_FIRST_ID}", "-c", config]
    began_at = time.monotonic()
    at: dict[str, float] = {}

    def note(name: str) -> None:
        at.setdefault(name, round(time.monotonic() - began_at, 2))

    with Program("the command", command, up.place.folder / "command.log") as asking:

        def wanting() -> bool:
            if "command_s" not in at and not asking.running():
                note("command_s")
            if arrivals.copied:
                note("first_row_s")
            return arrivals.copied < count and go_on()

        arrivals.collect(wanting)
        seconds = time.monotonic() - began_at
        asking.wait(_LOAD_GRACE_SECONDS)
    if arrivals.copied < count:
        raise BenchmarkError(
            f"{arrivals.copied:,} of {count:,} rows arrived while the load ran",
            hint="give it more --seconds, or fewer --rows",
        )
    return {"rows_per_second": count / seconds, "seconds": round(seconds, 2), **at}


class _Cpu:
    """CPU seconds of every process that takes part: two cores are quickly used up."""

    def __init__(self, program: Program, load: Program, up: Servers) -> None:
        self._program, self._load, self._up = program, load, up
        self._before, self._began_at = self._now(), time.monotonic()
        self._foreign = measure.Foreign(lambda: sum(self._now().values()))

    def _now(self) -> dict[str, float]:
        threads = measure.thread_cpu_seconds(self._program.pid)
        return {
            **{f"daemon_{name}": seconds for name, seconds in threads.items()},
            "postgres": measure.family_cpu_seconds(self._up.postgres_pid),
            "broker": measure.cpu_seconds(self._up.kafka_pid),
            "load": measure.cpu_seconds(self._load.pid),
            "reader": time.process_time(),
            "command": sum(os.times()[2:4]),  # once it has ended
        }

    def shown(self, events: float) -> dict[str, Any]:
        """Return the CPU used by each process; the daemon's also per event."""
        seconds = time.monotonic() - self._began_at
        used = {name: cpu - self._before[name] for name, cpu in self._now().items()}
        ours = sum(cpu for name, cpu in used.items() if name.startswith("daemon_"))
        return {
            "cpu_s_per_million": ours / events * 1e6,
            "cores": round(ours / seconds, 3),
            "cpu_s": {name: round(cpu, 2) for name, cpu in used.items()},
            "foreign_cores": self._foreign.cores(),
        }


def _result(
    shown: dict[str, Any],
    floor: float,
    subject: Daemon,
    up: Servers,
    options: Options,
    count: int,
) -> dict[str, Any]:
    alone, meanwhile = shown.pop("alone"), shown.pop("meanwhile")
    say(f"{shown['rows_per_second']:,.0f} rows/s, p99 {meanwhile.p99_ms} ms")
    return result.build(
        name=NAME,
        unit="rows/s",
        value=shown["rows_per_second"],
        limit=None,
        floor=floor,
        peer=None,
        cpu_s_per_million=shown["cpu_s_per_million"],
        peak_rss_mb=shown["peak_rss_mb"],
        versions=up.versions,
        details={
            "p50_ms": meanwhile.p50_ms,
            "p99_ms": meanwhile.p99_ms,
            "p99_limit_ms": P99_LIMIT_MS,
            "p99_below_limit": meanwhile.p99_ms < P99_LIMIT_MS,
            "p50_ms_alone": alone.p50_ms,
            "p99_ms_alone": alone.p99_ms,
            "rows": count,
            "rate": options.rate,
            "warm_up_seconds": options.warm_up_seconds,
            "commits": f"one INSERT of one row a transaction into the same table,"
            f" {CONNECTIONS} connections in turns, an open loop of {options.rate:,} a second",
            "floor_by": "COPY of the same rows in the key's order to nowhere, alone",
            "servers": up.settings,
            "settings": dict(subject.settings),
            "runs": {
                "ours": [
                    {
                        **{k: v for k, v in shown.items() if k != "rows_per_second"},
                        "meanwhile": asdict(meanwhile),
                        "alone": asdict(alone),
                    }
                ]
            },
        },
    )
