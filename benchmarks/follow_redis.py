"""follow-redis: the log into Redis: keys per second when catching up, and commit to visible.

The figure is keys per second of a backlog, each with its version, exactly once; the result also has
the time from a commit to the frontier that shows it, at 500 single-row commits a second. The floor
is the same rows written to the same Redis by pipelined SET, without a version and without a log.
The run has no peer.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import redis

from benchmarks import follow_server
from benchmarks.failure import BenchmarkError
from benchmarks.follow_run import FOLLOWER
from benchmarks.follow_server import RUN, Workload, sink_alone
from cdc.playground.servers.stack import LocalStack
from lockstep.sinks.contract import Change, Column, Version
from lockstep.sinks.redis.sink import RedisSettings, RedisSink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME: Final = "follow-redis"
_ALONE_KEYS: Final = 300_000
_FLOOR_PIPELINE: Final = 500
_WRITTEN_AT_ONCE: Final = 20_000
_ROW: Final = b'{"id":%%d,"k":0,"payload":"%b","amount":"0.00"}' % (b"x" * 170)
_VERSION: Final = Version(
    1, "public", "bench", "bench", ("id",), (Column("id", "int8", 20, -1, nullable=False),), {}
)


class RedisStore:
    """A Redis server with an append-only file, as the embedded stack starts it."""

    follower = FOLLOWER

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self._client = redis.Redis.from_url(url, protocol=2, socket_timeout=60.0)
        self.section: dict[str, Any] = {"redis": {"url": url}}
        self.pids: tuple[int, ...] = (pid,)

    def seq(self) -> int:
        seq, applying = self._client.hmget(f"{RUN}:cdc:{self.follower}", "seq", "applying")
        return 0 if seq is None or applying else int(seq)

    def keys(self, pattern: str) -> int:
        """Return how many keys match a pattern."""
        return sum(1 for _ in self._client.scan_iter(pattern, count=10_000))

    def members(self, key: str) -> set[str]:
        """Return the members of a sorted set."""
        found: Any = self._client.zrange(key, 0, -1)
        return {each.decode() for each in found}

    def memory_bytes(self) -> int:
        """Return the memory that the server uses."""
        return int(self._client.info("memory")["used_memory"])

    def check(self, count: int) -> None:
        found = self.keys(f"{RUN}:public.*")
        if found != count:
            raise BenchmarkError(
                f"there are {found:,} keys for {count:,} rows", hint="the figure would not count"
            )

    def version(self) -> str:
        return str(self._client.info("server")["redis_version"])

    def alone(self, count: int) -> tuple[float, dict[str, float]]:
        keys = min(count, _ALONE_KEYS)
        return self._floor(keys), self._sink_alone(keys)

    def _floor(self, keys: int) -> float:
        """Return the keys per second of plain SETs of rows of the workload's size."""
        began = time.monotonic()
        for first in range(0, keys, _FLOOR_PIPELINE):
            with self._client.pipeline(transaction=False) as pipe:
                for number in range(first, first + _FLOOR_PIPELINE):
                    pipe.set(f"floor:public.bench:{number}", _ROW % number)
                pipe.execute()
        seconds = time.monotonic() - began
        self._client.flushall()
        return keys / seconds

    def _sink_alone(self, keys: int) -> dict[str, float]:
        sink = RedisSink(RedisSettings(self.url, "alone", "alone"))
        changes = [
            Change(b'{"id":%d}' % number, number, _ROW % number, 1, number, 0)
            for number in range(1, keys + 1)
        ]
        shown = sink_alone(sink, _VERSION, changes, _WRITTEN_AT_ONCE, self, "key")
        self._client.flushall()
        return shown

    def close(self) -> None:
        self._client.close()


@contextmanager
def running(folder: Path) -> Iterator[RedisStore]:
    """Run a Redis for the duration of the block."""
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


_WORKLOAD: Final = Workload(
    name=NAME,
    server="redis",
    each="key",
    limit=45_000.0,
    p50_limit_ms=300.0,
    p99_limit_ms=900.0,
    rows=1_500_000,
    floor_by="SET in pipelines of 500, from the same client library",
    running=running,
)
run: Final = partial(follow_server.run, _WORKLOAD)
