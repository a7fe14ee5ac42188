"""snapshot-delta: a table directly into its Delta mirror, compared with reading its rows.

Both read the same ranges in the same Spark session with the same data source, alternately; the
floor writes to Spark's `noop` sink, ours to a mirror, with its commit and the record of its ranges
in the log. The reader is also run over few large ranges and many small ones. A mirror's rows are
counted and summed afterwards.

No figure includes Spark's start-up: the first run of each warms it up and does not count. Memory is
the JVM's, which is driver and executor here, and the largest Python worker's: an executor has one
worker per core. On a machine that is not quiet, the CPU seconds by kind of process are more
reliable than rows per second.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psutil
import yaml
from msgspec.structs import replace as changed
from pyspark.sql import SparkSession

from benchmarks import drains, measure, result, rows, servers
from benchmarks.failure import BenchmarkError
from benchmarks.progress import say
from cdc.config import load
from cdc.operate.commands.setup import set_up
from cdc.runtime import spark as files
from cdc.runtime.progress import Terminal
from cdc.snapshot.initial import session as initial
from cdc.snapshot.initial.task import masks
from cdc.source.pinned import connect_for_rows
from lockstep.jobs.copying.data_source import NAME as SOURCE
from lockstep.jobs.copying.data_source import (
    CopiedTable,
    SnapshotSource,
    as_option,
    spark_schema,
    table_of,
)
from lockstep.jobs.copying.driving import InSession
from lockstep.jobs.snapshot import Driver
from lockstep.jobs.spark.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.options import Options
    from benchmarks.servers import Servers
    from cdc.config import Config
    from cdc.snapshot.initial.records import SnapshotPlan

NAME: Final = "snapshot-delta"

_ROWS: Final = 5_000_000
_CORES: Final = 2
_FEW, _MANY = 4, 40
_WARM_UPS: Final = 1
_OURS: Final = ("driver", "jvm", "workers")
_ALL: Final = (*_OURS, "postgres")


@dataclass
class Runs:
    """Rows per second of each run, by what was measured."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    jvm_mb: float = 0.0
    worker_mb: float = 0.0

    @contextmanager
    def timed(self, up: Servers, what: str, count: int) -> Iterator[None]:
        """Record how long the block takes for `count` rows, and the CPU by kind of process."""
        began, cpu = time.monotonic(), _cpu_seconds(up)
        yield
        rate = count / (time.monotonic() - began)
        used = dict.fromkeys(_ALL, 0.0)
        for (kind, pid), now in _cpu_seconds(up).items():
            used[kind] = round(used[kind] + now - cpu.get((kind, pid), 0.0), 2)
        self.rates.setdefault(what, []).append(rate)
        self.cpu_s.setdefault(what, []).append(used)
        say(f"{what}: {rate:,.0f} rows/s, CPU seconds {used}")

    def cpu(self, what: str, *kinds: str) -> float:
        """Return the median CPU seconds of some kinds of processes, without the warm-up run."""
        used = self.cpu_s[what][_WARM_UPS:]
        found = result.median([sum(each[kind] for kind in kinds) for each in used])
        assert found is not None
        return found

    def median(self, what: str) -> float:
        """Return the median without the warm-up run."""
        found = result.median(self.rates[what][_WARM_UPS:])
        assert found is not None
        return found

    def look(self) -> None:
        """Record the peaks of memory so far."""
        for process in psutil.Process().children(recursive=True):
            peak = measure.peak_rss_mb(process.pid)
            if _is_spark(process):
                self.jvm_mb = max(self.jvm_mb, peak)
            elif _is_worker(process):
                self.worker_mb = max(self.worker_mb, peak)


def run(options: Options) -> dict[str, Any]:
    """Run it and return the result."""
    count = options.rows or _ROWS
    runs = Runs()
    with servers.running(NAME, drains.POSTGRES, keep=options.keep) as up, up.connect() as sql:
        sql.execute(rows.CREATE_TABLE)
        say(f"filling a table with {count:,} rows")
        rows.insert_at_once(sql, rows.TABLE, rows.VALUES, count)
        sql.execute("VACUUM (ANALYZE, FREEZE) bench")
        sql.execute("CHECKPOINT")
        spark = session("benchmark", cores=_CORES, jars=files.jars(Terminal()))
        try:
            for turn in range(options.runs + _WARM_UPS):
                measure.wait_until_quiet(5.0)
                _turn(spark, up, runs, count, turn)
        finally:
            spark.stop()
        value, floor = runs.median("direct"), runs.median("noop")
        return result.build(
            name=NAME,
            unit="rows/s",
            value=value,
            limit=None,
            floor=floor,
            peer=None,
            cpu_s_per_million=runs.cpu("direct", *_OURS) / count * 1e6,
            peak_rss_mb=runs.jvm_mb + _CORES * runs.worker_mb,
            versions=up.versions | {"spark": spark.version},
            details={
                "rows": count,
                "cores": _CORES,
                "jvm_mb": round(runs.jvm_mb),
                "python_worker_mb": round(runs.worker_mb),
                "ranges": {
                    str(number): round(runs.median(f"noop in {number} ranges"))
                    for number in (_FEW, _MANY)
                },
                "cpu_s": runs.cpu_s,
                "of_floor_cpu": round(runs.cpu("noop", *_ALL) / runs.cpu("direct", *_ALL), 3),
                "servers": up.settings,
                "runs": {what: list(map(round, rates)) for what, rates in runs.rates.items()},
            },
        )


def _turn(spark: SparkSession, up: Servers, runs: Runs, count: int, turn: int) -> None:
    """Take a separate snapshot; measure at the point where a runner would copy it."""
    folder = up.place.folder / f"turn_{turn}"
    folder.mkdir()
    path = folder / "lockstep.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "pipeline": f"turn_{turn}",
                "source": {
                    "dsn": f"postgresql://postgres@127.0.0.1:{up.postgres_port}/bench",
                    "tables": ["public.bench"],
                },
                "log": {"bootstrap_servers": up.bootstrap},
                "http": {"listen": ""},
                "snapshot": {"mode": "initial", "max_parallel": _CORES, "runner": "spark"},
                "delta": {"path": str(folder / "lake")},
                "tables": {"public.bench": {"snapshot": "direct"}},
            }
        )
    )
    config = load(path)
    for _ in set_up(config):
        pass

    def measuring(plan: SnapshotPlan, _: object, left: list[int]) -> InSession:
        _read(spark, up, config, path, plan, runs, count)
        return _Measured(
            spark, config, path, plan, left, partial(runs.timed, up, "direct", count), runs
        )

    initial.take(config, Driver(path), measuring)
    lake = folder / "lake" / "public.bench"
    _check(spark, lake, count)
    with up.connect() as sql:
        sql.execute(f"SELECT pg_drop_replication_slot('{config.slot}')".encode())


class _Measured(InSession):
    """The job's own runner, timed."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        path: Path,
        plan: SnapshotPlan,
        left: list[int],
        timed: Callable[[], AbstractContextManager[None]],
        runs: Runs,
    ) -> None:
        self._timed, self._runs = timed, runs
        super().__init__(spark, config, path, plan, left)

    def _run(self, left: list[int]) -> None:
        with self._timed():
            super()._run(left)
        self._runs.look()


def _read(
    spark: SparkSession,
    up: Servers,
    config: Config,
    path: Path,
    plan: SnapshotPlan,
    runs: Runs,
    count: int,
) -> None:
    """Read the plan's rows and discard them: in few ranges, in many, and last in the plan's own.

    The plan's own come last, so that the floor is as warm as the runs compared with it.
    """
    spark.dataSource.register(SnapshotSource)
    table = table_of(plan, "public.bench")
    for what, cut in (
        *((f"noop in {number} ranges", _cut(table, number)) for number in (_FEW, _MANY)),
        ("noop", table),
    ):
        with closing(connect_for_rows(config)) as connection:
            schema = spark_schema(config, table.version, masks(config, connection, table.version))
        frame = spark.read.format(SOURCE).schema(schema)
        frame = frame.options(config=str(path), planned=as_option(cut))
        with runs.timed(up, what, count):
            frame.load().write.format("noop").mode("overwrite").save()


def _cut(table: CopiedTable, ranges: int) -> CopiedTable:
    """Return the table in about `ranges` ranges."""
    [(index, planned)] = table.tables.items()
    assert planned.pages is not None
    planned = changed(planned, pages_per_range=-(-planned.pages // ranges))
    return replace(table, tables={index: planned}, ranges=tuple(planned.ranges(index)))


def _check(spark: SparkSession, mirror: Path, count: int) -> None:
    """Raise unless the mirror holds every row once."""
    found = spark.read.format("delta").load(str(mirror))
    [row] = found.selectExpr("count(*)", "sum(id)", "count(DISTINCT _seq)").collect()
    if tuple(row) != (count, count * (count + 1) // 2, count):
        raise BenchmarkError(
            f"the mirror does not hold {count:,} rows once: {tuple(row)}",
            hint="look at the mirror in the folder that --keep leaves",
        )


def _cpu_seconds(up: Servers) -> dict[tuple[str, int], float]:
    """Return CPU seconds by kind of process and process.

    Spark ends workers that are idle for a minute and does not wait for them, so their seconds are
    lost.
    """
    used = {("driver", 0): sum(psutil.Process().cpu_times()[:2])}
    for process in psutil.Process().children(recursive=True):
        kind = "jvm" if _is_spark(process) else "workers" if _is_worker(process) else None
        if kind is not None:
            with suppress(psutil.Error):  # the process has ended
                used[kind, process.pid] = sum(process.cpu_times()[:2])
    return used | {("postgres", 0): measure.family_cpu_seconds(up.postgres_pid)}


def _is_spark(process: psutil.Process) -> bool:
    return "org.apache.spark.deploy.SparkSubmit" in _command(process)


def _is_worker(process: psutil.Process) -> bool:
    return "pyspark.daemon" in _command(process)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
