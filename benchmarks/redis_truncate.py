"""redis-truncate: a table of ten rows is truncated in a Redis of ten million other keys.

The figure is the time of the cut with the truncate, in milliseconds: the median of the runs, each
of which fills the table again. The sink writes without a log and without Spark, which do not
depend on the keyspace. The other keys are another table's rows, written by the same sink.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks import measure, result, servers
from benchmarks.failure import BenchmarkError
from benchmarks.follow_redis import running
from benchmarks.progress import Every, say
from cdc.events import LSN
from lockstep.sinks.contract import Applied, Change, Changes, Column, Version
from lockstep.sinks.redis.sink import RedisSettings, RedisSink

if TYPE_CHECKING:
    from benchmarks.options import Options

NAME: Final = "redis-truncate"
LIMIT_MS: Final = 50.0
_KEYS: Final = 10_000_000
_SMALL_ROWS: Final = 10
_WRITTEN_AT_ONCE: Final = 20_000
_ID: Final = (Column("id", "int8", 20, -1, nullable=False),)
_LARGE: Final = Version(1, "public", "large", "large", ("id",), _ID, {})
_SMALL: Final = Version(2, "public", "small", "small", ("id",), _ID, {})


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    keys = options.rows or _KEYS
    with servers.folder_of(NAME, keep=options.keep) as folder, running(folder / "store") as store:
        sink = RedisSink(RedisSettings(store.url, "truncates", "truncates"))
        sink.open()
        seq = _fill(sink, keys)
        memory = store.memory_bytes()
        took, cpu = list[float](), list[float]()
        for _ in range(options.runs):
            seq = _write(sink, _SMALL, range(_SMALL_ROWS), seq)
            used, began = measure.total_cpu_seconds(store.pids), time.monotonic()
            seq = _cut(sink, seq + 1, Changes((_SMALL,), [], seq + 1))
            took.append((time.monotonic() - began) * 1_000)
            cpu.append(measure.total_cpu_seconds(store.pids) - used)
        left = [len(list(sink.contents(_SMALL))), store.keys("truncates:public.large:*")]
        sink.close()
        if left != [0, keys]:
            raise BenchmarkError(f"rows are left, or too few: {left}", hint="no figure counts")
        value = statistics.median(took)
        return result.build(
            name=NAME,
            unit="ms",
            value=value,
            limit=LIMIT_MS,
            floor=None,
            peer=None,
            cpu_s_per_million=statistics.median(cpu) / _SMALL_ROWS * 1e6,
            peak_rss_mb=memory / (1 << 20),
            versions={"redis": store.version()},
            details={
                "keys": keys,
                "truncated_rows": _SMALL_ROWS,
                "store_bytes_per_key": round(memory / keys),
                "runs": [round(each, 2) for each in took],
            },
        )


def _fill(sink: RedisSink, keys: int) -> int:
    say(f"{keys:,} keys of another table")
    progress, seq = Every(10.0), 0
    for first in range(0, keys, _WRITTEN_AT_ONCE):
        seq = _write(sink, _LARGE, range(first, min(first + _WRITTEN_AT_ONCE, keys)), seq)
        progress.say(f"{seq:,} keys")
    return seq


def _write(sink: RedisSink, version: Version, ids: range, seq: int) -> int:
    """Write rows with these ids as one cut; return its seq."""
    changes = [
        Change(b'{"id":%d}' % number, seq + at, b'{"id":%d}' % number, version.schema_id, LSN(0), 0)
        for at, number in enumerate(ids, 1)
    ]
    return _cut(sink, seq + len(ids), Changes((version,), changes))


def _cut(sink: RedisSink, seq: int, changes: Changes) -> int:
    sink.begin(seq, [changes.version])
    sink.write(changes)
    sink.commit(Applied.beginning(NAME, 1)._replace(epoch=1, lsn=LSN(seq), seq=seq))
    return seq
