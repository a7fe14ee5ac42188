"""costs: where each microsecond of the row path goes.

The stages of the path, each timed alone on recorded frames of drain-inserts (`benchmarks.stages`),
and a complete drain of the same frames; the cost of a value of each kind, the cost of a source
transaction, and the duration of a Kafka transaction. The page docs/COSTS.md is generated from the
result.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks import backlog, drains, kinds, result, servers, slots, stages
from benchmarks import rows as bench
from benchmarks.daemon import Daemon, config_path, write_config
from benchmarks.drain import Drain, measure_drain
from benchmarks.drain_inserts import Inserts
from benchmarks.progress import say
from benchmarks.raw_reader import parse_lsn
from benchmarks.recording import Recording, record
from benchmarks.topics import Topics
from cdc.config import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from benchmarks.options import Options
    from benchmarks.servers import Servers
    from cdc.config import Config

NAME: Final = "costs"
_ROWS: Final = 300_000
_KIND_ROWS: Final = 20_000


@dataclass(frozen=True)
class Path:
    """CPU microseconds per row of drain-inserts, by stage."""

    receive: float
    walk: float
    encode: float
    key: float  # part of encode
    partition: float
    hand_over: float
    send: float

    @property
    def total(self) -> float:
        return self.receive + self.walk + self.encode + self.partition + self.hand_over + self.send


def run(options: Options) -> dict[str, Any]:
    """Time stages and complete drains, and return the result."""
    rows = options.rows or _ROWS
    workload = Inserts()
    with (
        servers.running(NAME, drains.POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
    ):
        backlog.create(connection, workload, rows)
        loaded = backlog.preload(connection, workload, rows)
        drained = []
        for turn in range(1, options.runs + 1):
            drained.append(
                measure_drain(Daemon(), up, connection, workload, loaded, f"ours_{turn}")
            )
            say(f"complete drain: {drained[-1].cpu_s_per_million:.2f} CPU-us a row")
        path, cycle = _path(up, connection, parse_lsn(loaded.end_lsn))
        values = _kinds(up, connection, min(_KIND_ROWS, rows))
        transaction = _transaction(up, connection, min(_KIND_ROWS, rows))
    return _result(path, cycle, values, transaction, drained, up)


def _path(
    up: Servers, connection: psycopg.Connection, end_lsn: int
) -> tuple[Path, stages.CommitCycle]:
    subject = Daemon()
    topic = subject.topic(NAME, bench.TABLE)
    with slots.copied(connection, NAME):
        subject.prepare(up.place, NAME, (bench.TABLE,))
        config = _config(up, NAME)
        recording = record(config, end_lsn)
    say(f"recorded {recording.count:,} rows in {len(recording.chunks):,} chunks")
    rows = recording.rows[bench.TABLE]
    new = recording.encoder(bench.TABLE).new
    encode = stages.encode(new, rows)
    partition = stages.partition(new, rows)
    handed = stages.hand_over(recording, config, topic)
    path = Path(
        receive=recording.receive_s / recording.count * 1e6,
        walk=stages.feed(recording, topic) - encode - partition,
        encode=encode,
        key=encode - stages.encode(recording.encoder(bench.TABLE, key=()).new, rows),
        partition=partition,
        hand_over=handed.hand_over_us,
        send=handed.send_us,
    )
    cycle = stages.commit_cycle(config, topic)
    Topics(up.bootstrap).delete_prefix(NAME)
    return path, cycle


def _kinds(up: Servers, connection: psycopg.Connection, rows: int) -> dict[str, float]:
    """Return nanoseconds per value of each kind."""
    kinds.create(connection)
    with _recorded(up, connection, "kinds", lambda: kinds.load(connection, rows)) as recording:
        return stages.columns(recording)


def _transaction(up: Servers, connection: psycopg.Connection, rows: int) -> float:
    """Return microseconds per source transaction: a transaction per row, minus all rows in one."""
    together = lambda: bench.insert_at_once(connection, kinds.BARE, "{i} + 1000000", rows)  # noqa: E731
    apart = lambda: kinds.load_apart(connection, rows)  # noqa: E731
    spent = []
    for name, load_rows in (("together", together), ("apart", apart)):
        with _recorded(up, connection, name, load_rows) as recording:
            spent.append(stages.feed(recording, name))
    return spent[1] - spent[0]


@contextmanager
def _recorded(
    up: Servers, connection: psycopg.Connection, name: str, load_rows: Callable[[], None]
) -> Iterator[Recording]:
    """Yield a recording of what `load_rows` writes."""
    with slots.created(connection, name):
        load_rows()
        connection.execute("CHECKPOINT")
        end_lsn = parse_lsn(backlog.insert_lsn(connection))
        (up.place.folder / name).mkdir()
        write_config(up.place, name, kinds.TABLES)
        recording = record(_config(up, name), end_lsn)
    say(f"recorded {recording.count:,} rows of {name}")
    yield recording


def _config(up: Servers, run_name: str) -> Config:
    return load(config_path(up.place, run_name), os.environ)


def _result(
    path: Path,
    cycle: stages.CommitCycle,
    values: dict[str, float],
    transaction: float,
    drained: list[Drain],
    up: Servers,
) -> dict[str, Any]:
    total = result.median([each.cpu_s_per_million for each in drained])
    assert total is not None
    rows = drained[0].rows
    return result.build(
        name=NAME,
        unit="CPU-us a row",
        value=path.total,
        limit=None,
        floor=None,
        peer=None,
        cpu_s_per_million=total,
        peak_rss_mb=max(each.peak_rss_mb for each in drained),
        versions=up.versions,
        details={
            "rows": rows,
            "stages_us": {name: round(us, 2) for name, us in vars(path).items()},
            "total_us": round(total, 2),
            "postgres_us": _median_us([each.postgres_cpu_s for each in drained], rows),
            "broker_us": _median_us([each.broker_cpu_s for each in drained], rows),
            "value_ns": {kind: round(ns) for kind, ns in values.items()},
            "transaction_us": round(transaction, 2),
            "kafka_transaction": {name: round(each, 2) for name, each in cycle._asdict().items()},
            "settings": dict(Daemon().settings),
            "servers": up.settings,
            "runs": {"ours": [each.details() for each in drained]},
        },
    )


def _median_us(seconds: list[float], rows: int) -> float:
    return round((result.median(seconds) or 0.0) / rows * 1e6, 2)
