"""follow-redis: the log into Redis: keys a second when catching up, and commit to visible.

The figure is keys a second of a backlog, each with its version, exactly once; beside it the time
from a commit to the frontier that shows it, at 500 single-row commits a second. The floor is the
same rows into the same Redis by pipelined SET, without a version and without a log. There is no
peer in the run.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import redis

from benchmarks import backlog, measure, result, rows, servers, slots
from benchmarks.failure import BenchmarkError
from benchmarks.follow_run import FOLLOWER, P50_LIMIT_MS, P99_LIMIT_MS, RATE, Followed, FollowRun
from benchmarks.latency import POSTGRES
from benchmarks.progress import say
from cdc.local.stack import LocalStack
from sinks.contract import Change, Changes, Column, Version
from sinks.redis.sink import RedisSink, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAME: Final = "follow-redis"
# What catching up is held to.
LIMIT_KEYS_PER_SECOND: Final = 30_000.0
_ROWS: Final = 1_500_000
_RUN: Final = "followed"
_ALONE_KEYS: Final = 300_000
_FLOOR_PIPELINE: Final = 500
_WRITTEN_AT_ONCE: Final = 20_000
_ROW: Final = b'{"id":%%d,"k":0,"payload":"%b","amount":"0.00"}' % (b"x" * 170)
_VERSION: Final = Version(
    1, "public", "bench", "bench", ("id",), (Column("id", "int8", 20, -1, nullable=False),), {}
)


class RedisStore:
    """A Redis server with an append-only file, as the embedded stack starts it."""

    def __init__(self, url: str, pid: int) -> None:
        self._url = url
        self._client = redis.Redis.from_url(url, protocol=2, socket_timeout=60.0)
        self.section: dict[str, Any] = {"redis": {"url": url}}
        self.pids: tuple[int, ...] = (pid,)

    def seq(self) -> int:
        seq, applying = self._client.hmget(f"{_RUN}:cdc:{FOLLOWER}", "seq", "applying")
        return 0 if seq is None or applying else int(seq)

    def check(self, count: int) -> None:
        found = sum(1 for _ in self._client.scan_iter(f"{_RUN}:public.*", count=10_000))
        if found != count:
            raise BenchmarkError(
                f"there are {found:,} keys for {count:,} rows", hint="the figure would not count"
            )

    def version(self) -> str:
        return str(self._client.info("server")["redis_version"])

    def floor(self, keys: int) -> float:
        """Return the keys a second of plain SETs of rows of the workload's size."""
        began = time.monotonic()
        for first in range(0, keys, _FLOOR_PIPELINE):
            with self._client.pipeline(transaction=False) as pipe:
                for number in range(first, first + _FLOOR_PIPELINE):
                    pipe.set(f"floor:public.bench:{number}", _ROW % number)
                pipe.execute()
        seconds = time.monotonic() - began
        self._client.flushall()
        return keys / seconds

    def sink_alone(self, keys: int) -> dict[str, float]:
        """Return what the sink does by itself in one process, with no log and no Spark."""
        sink = RedisSink(Settings(self._url, "alone", "alone"))
        sink.open()
        changes = [
            Change(b'{"id":%d}' % number, number, _ROW % number, 1, number, 0)
            for number in range(1, keys + 1)
        ]
        own, server = time.process_time(), measure.total_cpu_seconds(self.pids)
        began = time.monotonic()
        sink.begin(keys, [_VERSION])
        for first in range(0, keys, _WRITTEN_AT_ONCE):
            sink.write(Changes((_VERSION,), changes[first : first + _WRITTEN_AT_ONCE]))
        seconds = time.monotonic() - began
        own = time.process_time() - own
        server = measure.total_cpu_seconds(self.pids) - server
        sink.close()
        self._client.flushall()
        return {
            "keys_per_second": round(keys / seconds),
            "own_cpu_us_per_key": round(own / keys * 1e6, 2),
            "server_cpu_us_per_key": round(server / keys * 1e6, 2),
        }

    def close(self) -> None:
        self._client.close()


@contextmanager
def running(folder: Path) -> Iterator[RedisStore]:
    """Run a Redis for the length of the block."""
    stack = LocalStack(folder, tied=True)
    try:
        url = stack.up(["redis"]).redis_url
        assert url is not None
        store = RedisStore(url, stack["redis"].pid)
        try:
            yield store
        finally:
            store.close()
    finally:
        stack.down()


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    count = options.rows or _ROWS
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
        running(up.place.folder / "store") as store,
    ):
        floor = store.floor(min(count, _ALONE_KEYS))
        alone = store.sink_alone(min(count, _ALONE_KEYS))
        say(f"floor: {floor:,.0f} keys/s; the sink alone {alone}")
        connection.execute(rows.CREATE_TABLE)
        backlog.publish(connection, (rows.TABLE,))
        with slots.created(connection, _RUN):
            shown = FollowRun(_RUN, store, up, connection, options).measure(count)
        return _result(shown, floor, alone, store, up)


def _result(
    shown: Followed, floor: float, alone: dict[str, float], store: RedisStore, up: Servers
) -> dict[str, Any]:
    catch_up = shown.catch_up
    return result.build(
        name=NAME,
        unit="keys/s",
        value=catch_up.rows_per_second,
        limit=LIMIT_KEYS_PER_SECOND,
        floor=floor,
        peer=None,
        cpu_s_per_million=catch_up.cpu_s["follower"] / catch_up.rows * 1e6,
        peak_rss_mb=max(catch_up.peak_rss_mb.values()),
        versions={**up.versions, "redis": store.version()},
        details={
            "rate": RATE,
            "p50_limit_ms": P50_LIMIT_MS,
            "p99_limit_ms": P99_LIMIT_MS,
            **shown.details(),
            "sink_alone": alone,
            "floor_by": "SET in pipelines of 500, from the same client library",
            "servers": up.settings,
        },
    )
