"""console: how soon the console answers where there are 1,000 tables, and its cost to the daemon.

The daemon has `--tables` tables with a row each, and streams `--rate` single-row commits a second
into one more. In turns `cdc console` runs next to it, as nice as the one that `cdc run` serves,
with a page open that asks what a browser's asks and follows the live tail, and does not. The page
would be on another machine: it gets what the rest leaves. The figure is the 95th
percentile of the times that the page's requests took; `of_cpu` and `of_p99` are the daemon's CPU,
and the commits' 99th percentile until a reader sees them, with the console by those without, the
medians over the turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks import latency, many_tables, measure, result, rows, servers, slots
from benchmarks.arrivals import Arrivals, nearest_rank
from benchmarks.daemon import CDC, PARTITIONS, Daemon, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.programs import Program
from benchmarks.progress import Every, say
from benchmarks.topics import Topics
from tests.fixtures.console import port_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAME: Final = "console"
_RUN: Final = "console"
_POSTGRES: Final = {**latency.POSTGRES, "max_locks_per_transaction": "1024"}
_TURNS: Final = 5
_TURN_SECONDS: Final = 30.0
# After the console has started, or ended, before a turn counts.
_WARM_UP_SECONDS: Final = 10.0
_ANSWER_LIMIT_MS: Final = 50.0
_CPU_LIMIT: Final = 1.02
_P99_LIMIT: Final = 1.05
_START_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 60.0
NICE: Final = ("nice", "-n", "10")  # as `cdc.console.child`
_NICEST: Final = ("nice", "-n", "19")


@dataclass
class Turn:
    """One stretch of the load, with the console or without."""

    console: bool
    from_us: int
    to_us: int
    cores: float
    p99_ms: float = 0.0


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    broker = many_tables.BROKER
    with (
        servers.running(NAME, _POSTGRES, keep=options.keep, broker=broker) as up,
        up.connect() as connection,
    ):
        connection.execute(rows.CREATE_TABLE)
        many_tables.create(connection, "many", options.tables)
        subject = Daemon()
        subject.prepare(up.place, _RUN, (rows.TABLE, "many_*"))
        many_tables.touch(connection, "many", options.tables)
        with subject.start(up.place, _RUN) as program:
            slots.wait_streaming(connection, _RUN, program)
            topics, topic = Topics(up.bootstrap), subject.topic(_RUN, rows.TABLE)
            with closing(Arrivals(up.bootstrap, topic, topics.partitions(topic))) as arrivals:
                turns, took_ms, shown = _turns(up, program, arrivals, options)
            peak_mb = measure.peak_rss_mb(program.pid)
    return _result(turns, took_ms, shown, peak_mb, up, options)


def _turns(
    up: Servers, program: Program, arrivals: Arrivals, options: Options
) -> tuple[list[Turn], dict[str, list[float]], int]:
    """Return the turns, how long each path's answers took, and how many changes were shown."""
    seconds = min(options.seconds, _TURN_SECONDS)
    many, took_ms, shown = 2 * _TURNS + 1, dict[str, list[float]](), 0
    with latency.start_load(
        up, NAME, options.rate, many * (2 * _WARM_UP_SECONDS + seconds)
    ) as load:
        found: list[Turn] = []
        for number in range(many):
            # It begins and ends without, so that what drifts is in both.
            if number % 2 == 0:
                found.append(_turn(program, arrivals, seconds, console=False))
                continue
            with _page(up, arrivals) as page:
                found.append(_turn(program, arrivals, seconds, console=True))
            seen = json.loads(page.output())
            shown += seen["shown"]
            for path, each in seen["took_ms"].items():
                took_ms.setdefault(path, []).extend(each)
            say(f"turn {number} of {many - 1}: {found[-1].cores:.3f} cores with the console")
        arrivals.collect(load.running)
        load.wait(_GRACE_SECONDS)
        arrivals.collect_all(json.loads(load.output())["committed"])
    for turn in found:
        turn.p99_ms = arrivals.percentiles(turn.from_us, turn.to_us).p99_ms
    return found, took_ms, shown


def _turn(program: Program, arrivals: Arrivals, seconds: float, *, console: bool) -> Turn:
    _collect(arrivals, _WARM_UP_SECONDS)
    from_us, cpu = time.time_ns() // 1000, measure.cpu_seconds(program.pid)
    _collect(arrivals, seconds)
    program.check()
    to_us, cpu = time.time_ns() // 1000, measure.cpu_seconds(program.pid) - cpu
    return Turn(console, from_us, to_us, cpu / ((to_us - from_us) / 1e6))


def _collect(arrivals: Arrivals, seconds: float) -> None:
    until, progress = time.monotonic() + seconds, Every(10.0)

    def go_on() -> bool:
        progress.say(f"{arrivals.events:,} rows arrived")
        return time.monotonic() < until

    arrivals.collect(go_on)


@contextmanager
def _page(up: Servers, arrivals: Arrivals) -> Iterator[Program]:
    """Run the console, and a page of it, for the duration of the block."""
    folder = up.place.folder / _RUN
    name = f"{time.monotonic_ns()}"
    config = str(config_path(up.place, _RUN))
    command = [*NICE, *CDC, "console", "--listen", "127.0.0.1:0", "--config", config]
    with Program("the console", command, folder / f"console-{name}.log") as console:
        deadline = time.monotonic() + _START_SECONDS
        while (port := port_in(console.output())) is None:
            console.check()
            if time.monotonic() > deadline:
                raise BenchmarkError("the console does not start", hint=console.output())
            _collect(arrivals, 0.2)
        visiting = [*_NICEST, sys.executable, "-m", "benchmarks.console_page", str(port)]
        with Program("the page", visiting, folder / f"page-{name}.json") as page:
            yield page


def _result(
    turns: list[Turn],
    took_ms: dict[str, list[float]],
    shown: int,
    peak_mb: float,
    up: Servers,
    options: Options,
) -> dict[str, Any]:
    answers = sorted(each for path in took_ms.values() for each in path)
    if not answers or not shown:
        raise BenchmarkError("the console has shown nothing", hint="see its log: --keep leaves it")
    with_it = [turn for turn in turns if turn.console]
    without = [turn for turn in turns if not turn.console]

    def ratio(figure: Callable[[Turn], float]) -> float:
        ours, alone = (statistics.median(map(figure, each)) for each in (with_it, without))
        return round(ours / alone, 3)

    return result.build(
        name=NAME,
        unit="ms",
        value=nearest_rank(answers, 0.95),
        limit=_ANSWER_LIMIT_MS,
        floor=None,
        peer=None,
        cpu_s_per_million=statistics.median(t.cores for t in without) / options.rate * 1e6,
        peak_rss_mb=peak_mb,
        versions=up.versions,
        details={
            "of_cpu": ratio(lambda turn: turn.cores),
            "of_cpu_limit": _CPU_LIMIT,
            "of_p99": ratio(lambda turn: turn.p99_ms),
            "of_p99_limit": _P99_LIMIT,
            "tables": options.tables,
            "partitions": PARTITIONS,
            "rate": options.rate,
            "answers": {path: _answers(sorted(each)) for path, each in took_ms.items()},
            "changes_shown": shown,
            "runs": {
                "with": [_line(turn) for turn in with_it],
                "without": [_line(turn) for turn in without],
            },
            "servers": up.settings,
        },
    )


def _line(turn: Turn) -> dict[str, float]:
    return {"cores": round(turn.cores, 3), "p99_ms": turn.p99_ms}


def _answers(ordered: list[float]) -> dict[str, float]:
    return {
        "many": len(ordered),
        "p50_ms": nearest_rank(ordered, 0.5),
        "p95_ms": nearest_rank(ordered, 0.95),
    }
