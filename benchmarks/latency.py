"""latency: how long after its commit a read_committed reader of the log can see a row.

Single-row commits at 1,000 a second, first to warm up and then measured; ours as it runs with more
than one replica of each topic (`log.direct`), ours by librdkafka, then the peer as installed and
with its fastest settings, read by the same consumer. The floor is a reader of the slot that does
nothing. The figure is our p50. Less is better, so `of_floor` is the multiple of the floor, and
`of_peer` the fraction of the peer's fastest.

With `--stages` the daemon also runs traced, and each change's latency is split into stages
(`benchmarks.latency_stages`); then once more with librdkafka's requests logged, which slows it
down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks import (
    backlog,
    debezium,
    latency_stages,
    measure,
    peer_files,
    result,
    rows,
    servers,
    slots,
)
from benchmarks.arrivals import Arrivals, Percentiles
from benchmarks.commit_load import CONNECTIONS
from benchmarks.daemon import Daemon, trace_path
from benchmarks.failure import BenchmarkError
from benchmarks.programs import Program
from benchmarks.progress import Every, say
from benchmarks.topics import Topics

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from benchmarks.options import Options
    from benchmarks.servers import Servers
    from benchmarks.subject import Subject

NAME = "latency"
STAGES_NAME = "latency-stages"

# As installed, fsync on. synchronous_commit is the default too, and is named because it matters:
# with `off`, a commit is flushed, and so sent, only when the WAL writer runs.
POSTGRES = {"synchronous_commit": "on", "fsync": "on", "max_slot_wal_keep_size": "-1"}

# As with more than one replica of each topic, which a single broker cannot have.
_DIRECT = {"direct": "on"}
_QUIET_SECONDS = 20.0
_FLOOR_WARM_UP_SECONDS = 3.0
_FLOOR_SECONDS_MAX = 20.0
_LOAD_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Latency:
    """The figures of one subject's run."""

    subject: str
    percentiles: Percentiles
    cpu_s_per_million: float
    cores: float
    peak_rss_mb: float
    late_ms_max: float
    foreign_cores: float
    stages: dict[str, Any] | None = None  # of a traced daemon

    def details(self) -> dict[str, Any]:
        fields = asdict(self)
        if not self.stages:
            del fields["stages"]
        return {**fields.pop("percentiles"), **fields}


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    subjects = _subjects(options)
    with servers.running(NAME, POSTGRES, keep=options.keep) as up, up.connect() as connection:
        connection.execute(rows.CREATE_TABLE)
        backlog.publish(connection, (rows.TABLE,))
        floor = _floor(up, connection, options)
        say(f"floor: p50 {floor.p50_ms} ms, p99 {floor.p99_ms} ms")
        shown = [_measure(subject, up, connection, options) for subject in subjects]
        return _result(floor, shown, subjects, up, options)


def _subjects(options: Options) -> list[Subject]:
    subjects: list[Subject] = [Daemon(log=_DIRECT), Daemon("lockstep-librdkafka")]
    if options.stages:
        subjects.append(Daemon("lockstep-traced", log=_DIRECT, traced=True))
        subjects.append(Daemon("lockstep-librdkafka-traced", traced=True))
        subjects.append(Daemon("lockstep-requests", kafka={"debug": "protocol"}, traced=True))
    if options.peer:
        peer = peer_files.fetch()
        subjects += [] if options.stages else [debezium.default(peer)]
        subjects.append(debezium.fast(peer))
    return subjects


def _floor(up: Servers, connection: psycopg.Connection, options: Options) -> Percentiles:
    seconds = min(options.seconds, _FLOOR_SECONDS_MAX)
    skip = round(options.rate * _FLOOR_WARM_UP_SECONDS)
    total = skip + round(options.rate * seconds)
    connection.execute("TRUNCATE bench")
    with slots.created(connection, "floor") as slot:
        command = [sys.executable, "-m", "benchmarks.commit_reader", str(up.postgres_port), slot]
        with subprocess.Popen(
            [*command, str(skip), str(total)], stdout=subprocess.PIPE, text=True
        ) as reader:
            load = start_load(up, "floor", options.rate, total / options.rate)
            with load:
                out, _ = reader.communicate(timeout=total / options.rate + _LOAD_GRACE_SECONDS)
                load.wait(_LOAD_GRACE_SECONDS)
        if reader.returncode != 0:
            raise BenchmarkError("the commit reader failed", hint="its message is above")
    return Percentiles(**json.loads(out))


def _measure(
    subject: Subject, up: Servers, connection: psycopg.Connection, options: Options
) -> Latency:
    run_name = subject.name.replace("-", "_")
    topics = Topics(up.bootstrap)
    topic = subject.topic(run_name, rows.TABLE)
    connection.execute("TRUNCATE bench")
    with slots.created(connection, run_name) as slot:
        subject.prepare(up.place, run_name, (rows.TABLE,))
        measure.wait_until_quiet(_QUIET_SECONDS)
        with subject.start(up.place, run_name) as program:
            slots.wait_streaming(connection, slot, program)
            arrivals = Arrivals(up.bootstrap, topic, topics.partitions(topic))
            try:
                with _scheduling(program, up, run_name) if options.stages else nullcontext():
                    shown, window_us = _under_load(subject, program, arrivals, up, options)
            finally:
                arrivals.close()
        if isinstance(subject, Daemon) and subject.traced:
            shown = replace(shown, stages=_stages(arrivals, window_us, up, run_name))
        topics.delete_prefix(run_name)
    say(f"{subject.name}: p50 {shown.percentiles.p50_ms} ms, p99 {shown.percentiles.p99_ms} ms")
    return shown


def _under_load(
    subject: Subject, program: Program, arrivals: Arrivals, up: Servers, options: Options
) -> tuple[Latency, tuple[int, int]]:
    """Start the load, warm up, measure the rest of it, and require every row.

    Returns the measured window too: microseconds since 1970.
    """
    seconds = options.warm_up_seconds + options.seconds
    with start_load(up, subject.name, options.rate, seconds) as load:
        progress = Every(10.0)

        def until(deadline: float) -> bool:
            program.check()
            progress.say(f"{subject.name}: {arrivals.events:,} rows arrived")
            return time.monotonic() < deadline

        started = time.monotonic()
        arrivals.collect(lambda: until(started + options.warm_up_seconds))
        from_us, cpu = time.time_ns() // 1000, measure.cpu_seconds(program.pid)
        foreign = measure.Foreign(lambda: _own_seconds(program, load, up))
        arrivals.collect(lambda: until(started + seconds))
        to_us, cpu = time.time_ns() // 1000, measure.cpu_seconds(program.pid) - cpu
        foreign_cores = foreign.cores()
        arrivals.collect(load.running)
        load.wait(_LOAD_GRACE_SECONDS)
        committed = json.loads(load.output())
        arrivals.collect_all(committed["committed"])
    percentiles = arrivals.percentiles(from_us, to_us)
    latency = Latency(
        subject=subject.name,
        percentiles=percentiles,
        cpu_s_per_million=round(cpu / percentiles.events * 1e6, 2),
        cores=round(cpu / ((to_us - from_us) / 1e6), 3),
        peak_rss_mb=round(measure.peak_rss_mb(program.pid), 1),
        late_ms_max=committed["late_ms_max"],
        foreign_cores=foreign_cores,
    )
    return latency, (from_us, to_us)


def _scheduling(program: Program, up: Servers, run_name: str) -> Program:
    """Start recording how long the threads of each process wait for a core."""
    pids = {"subject": f"{program.pid}", "reader": f"{os.getpid()}", "broker": f"{up.kafka_pid}"}
    pids |= {"postgres": f"{up.postgres_pid}+"}
    command = [sys.executable, "-m", "benchmarks.scheduling", str(_waits_path(up, run_name))]
    command += [f"{name}={pid}" for name, pid in pids.items()]
    return Program("the scheduling log", command, up.place.folder / f"{run_name}-scheduling.log")


def _waits_path(up: Servers, run_name: str) -> Path:
    return up.place.folder / f"{run_name}-waits.jsonl"


def _stages(
    arrivals: Arrivals, window_us: tuple[int, int], up: Servers, run_name: str
) -> dict[str, Any]:
    """Return the latency of a traced daemon's changes by stage, and its causes."""
    trace = json.loads(trace_path(up.place, run_name).read_text())
    lines = _waits_path(up, run_name).read_text().splitlines()
    waits = latency_stages.windows([json.loads(line) for line in lines])
    changes = latency_stages.staged(arrivals.journeys(*window_us), trace)
    return {
        "stages": latency_stages.table(changes),
        "causes": latency_stages.causes(changes, trace, waits),
        "requests": latency_stages.requests(trace),
        "threads": trace["threads"],
    }


def start_load(up: Servers, name: str, rate: int, seconds: float) -> Program:
    command = [sys.executable, "-m", "benchmarks.commit_load"]
    command += [str(up.postgres_port), str(rate), str(seconds)]
    return Program("the commit load", command, up.place.folder / f"load-{name}.log")


def _own_seconds(program: Program, load: Program, up: Servers) -> float:
    own = measure.total_cpu_seconds([program.pid, load.pid, up.kafka_pid])
    return own + measure.family_cpu_seconds(up.postgres_pid) + time.process_time()


def _commits(rate: int) -> str:
    """Return how the load commits, because the start of the latency depends on it."""
    durable = ", ".join(f"{name}={POSTGRES[name]}" for name in ("fsync", "synchronous_commit"))
    return (
        f"one INSERT of one row a transaction, {CONNECTIONS} connections in turns, an open loop of"
        f" {rate:,} a second; {durable}; counted from Postgres' own commit time, before the flush"
    )


def _line(latency: Latency) -> dict[str, float]:
    shown = latency.percentiles
    return {"p50_ms": shown.p50_ms, "p99_ms": shown.p99_ms, "p999_ms": shown.p999_ms}


def _ratio(figure: str, ours: Latency, peer: Latency | None) -> float | None:
    """Return the fraction of the peer's figure, one of `_line`'s."""
    return round(_line(ours)[figure] / _line(peer)[figure], 3) if peer else None


def _result(
    floor: Percentiles,
    shown: list[Latency],
    subjects: list[Subject],
    up: Servers,
    options: Options,
) -> dict[str, Any]:
    peers = [latency for latency in shown if latency.subject.startswith("debezium")]
    ours, librdkafka = shown[:2]
    traced = [latency for latency in shown if latency.stages]
    quickest = min(peers, key=lambda latency: latency.percentiles.p50_ms) if peers else None
    return result.build(
        name=STAGES_NAME if options.stages else NAME,
        unit="ms",
        value=ours.percentiles.p50_ms,
        limit=None,
        floor=floor.p50_ms,
        peer=quickest.percentiles.p50_ms if quickest else None,
        cpu_s_per_million=ours.cpu_s_per_million,
        peak_rss_mb=ours.peak_rss_mb,
        versions=up.versions | (peer_files.versions() if peers else {}),
        details={
            "p50_ms": ours.percentiles.p50_ms,
            "p99_ms": ours.percentiles.p99_ms,
            "p999_ms": ours.percentiles.p999_ms,
            "max_ms": ours.percentiles.max_ms,
            "of_peer_p99": _ratio("p99_ms", ours, quickest),
            "librdkafka_of_peer": _ratio("p50_ms", librdkafka, quickest),
            "librdkafka_of_peer_p99": _ratio("p99_ms", librdkafka, quickest),
            "alongside": {latency.subject: _line(latency) for latency in shown},
            "commits": _commits(options.rate),
            "rate": options.rate,
            "seconds": options.seconds,
            "warm_up_seconds": options.warm_up_seconds,
            "floor_by": "a reader of the slot that does nothing with the rows",
            "servers": up.settings,
            "settings": dict(subjects[0].settings),
            "peer_settings": {
                each.name: dict(each.settings)
                for each in subjects
                if each.name.startswith("debezium")
            }
            or None,
            "runs": {
                "floor": asdict(floor),
                "ours": [latency.details() for latency in (ours, librdkafka, *traced)],
                "peer": [latency.details() for latency in peers],
            },
        },
    )
