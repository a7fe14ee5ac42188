"""key-search: how soon the console finds a key in a topic of 10 M events, without an archive.

The log is that of `archive`: inserts of `--rows` / 10 rows and nine updates of each, in one topic.
`cdc console` runs without the daemon, and a first search makes it index the topic. Then random keys
are searched as a page does, one after another, until all ten versions of each are found. The figure
is the 95th percentile of the times that this took.

- `build_s`: from the first search until everything is indexed; `cpu_s_per_million` is the console's
  CPU in this time, by events.
- `index_mb`: the size of the files; `rss_mb`: the highest resident memory of the console.
- `restart_s`: from the start of another console until a search says that everything is indexed.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import yaml

from benchmarks import backlog, measure, result, rows, servers, slots
from benchmarks.arrivals import nearest_rank
from benchmarks.console import NICE
from benchmarks.daemon import CDC, config_path
from benchmarks.failure import BenchmarkError
from benchmarks.follow_run import FIRST_ID
from benchmarks.latency import POSTGRES
from benchmarks.past import EVENTS, OF_A_KEY, RUN, Past
from benchmarks.programs import Program
from benchmarks.progress import Every, say
from tests.fixtures.console import ConsoleClient, port_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.options import Options

NAME: Final = "key-search"
_LIMIT_S: Final = 1.0
_SEARCHES: Final = 200
_P95: Final = 0.95
_SECONDS: Final = 7_200.0
_START_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5
_SAY_SECONDS: Final = 30.0
_MB: Final = 1e6


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
    ):
        connection.execute(rows.CREATE_TABLE)
        backlog.publish(connection, (rows.TABLE,))
        with slots.created(connection, RUN):
            past = Past(up, connection, options.rows or EVENTS)
            past.fill()
        past.configure(archive=False)
        index = past.folder / "index"
        path = config_path(up.place, RUN)
        config = yaml.safe_load(path.read_text())
        config["console"] = {"index_dir": str(index)}
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        found = _measured(past)
        found["details"]["index_mb"] = round(
            sum(each.stat().st_size for each in index.rglob("*.index")) / _MB, 1
        )
        return result.build(
            name=NAME,
            unit="s",
            limit=_LIMIT_S,
            floor=None,
            peer=None,
            versions=up.versions,
            **found,
        )


def _measured(past: Past) -> dict[str, Any]:
    chosen = random.Random(1)
    with _console(past, "console") as (program, client):
        first, took = _search(client, FIRST_ID)
        say(f"the first search: {took:.2f} s, {len(first['versions'])} versions")
        build_s = _until_indexed(program, client)
        cpu_s = measure.cpu_seconds(program.pid)
        times, read = list[float](), list[int]()
        for _ in range(_SEARCHES):
            key = FIRST_ID + chosen.randrange(past.keys)
            answer, took = _search(client, key)
            versions, events = len(answer["versions"]), answer["searched"]["events"]
            # On a busy machine one answer may not reach the beginning: the rest counts as well.
            while not answer["searched"]["complete"]:
                answer, more = _search(client, key, answer["searched"]["before"])
                versions, took = versions + len(answer["versions"]), took + more
                events += answer["searched"]["events"]
            if versions != OF_A_KEY:
                raise BenchmarkError(
                    f"of key {key} {versions} versions were found",
                    hint=f"{OF_A_KEY} are in the log; the search reports {answer['searched']}",
                )
            times.append(took)
            read.append(events)
        peak_mb = measure.peak_rss_mb(program.pid)
    began = time.monotonic()
    with _console(past, "again") as (program, client):
        _until_indexed(program, client)
        restart_s = time.monotonic() - began
    return {
        "value": nearest_rank(sorted(times), _P95),
        "cpu_s_per_million": cpu_s / past.events * 1e6,
        "peak_rss_mb": peak_mb,
        "details": {
            "events": past.events,
            "keys": past.keys,
            "searches": _SEARCHES,
            "p50_s": round(statistics.median(times), 3),
            "max_s": round(max(times), 3),
            "events_read": round(statistics.median(read)),
            "build_s": round(build_s, 1),
            "restart_s": round(restart_s, 1),
            "rss_mb": round(peak_mb, 1),
        },
    }


@contextmanager
def _console(past: Past, name: str) -> Iterator[tuple[Program, ConsoleClient]]:
    """Run the console, as nice as the one that `cdc run` serves, for the duration of the block."""
    config = str(config_path(past.up.place, RUN))
    command = [*NICE, *CDC, "console", "--listen", "127.0.0.1:0", "--config", config]
    with Program("the console", command, past.folder / f"{name}.log") as program:
        deadline = time.monotonic() + _START_SECONDS
        while (port := port_in(program.output())) is None:
            program.check()
            if time.monotonic() > deadline:
                raise BenchmarkError("the console does not start", hint=program.output())
            time.sleep(_LOOK_SECONDS)
        yield program, ConsoleClient(port)


def _search(client: ConsoleClient, key: int, before: str = "") -> tuple[dict[str, Any], float]:
    """Return an answer, and after how many seconds it was there."""
    began = time.monotonic()
    _, answer = client.get(f"/api/explain?table=public.{rows.TABLE}&key={key}&before={before}")
    took = time.monotonic() - began
    if answer["versions"] is None:
        raise BenchmarkError("the console refuses a search", hint=answer["error"])
    return answer, took


def _until_indexed(program: Program, client: ConsoleClient) -> float:
    """Wait until everything is indexed; return how many seconds that took."""
    began, progress = time.monotonic(), Every(_SAY_SECONDS)
    while True:
        answer, _ = _search(client, FIRST_ID)
        share = answer["searched"]["indexed"]
        if share == 100:
            return time.monotonic() - began
        program.check()
        progress.say(f"{share} % are indexed")
        if time.monotonic() - began > _SECONDS:
            raise BenchmarkError("the topic is not indexed", hint="see the console's log")
        time.sleep(_LOOK_SECONDS)
