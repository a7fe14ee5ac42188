"""many-tables: what thousands of tables cost the daemon.

One transaction touches every one of 3,000 tables that the daemon has not seen yet; the figure is
the time from its commit until a read_committed reader can see the last of its events. The result
also has: how long `cdc setup` took, how much memory the daemon held, and the CPU per event where
transactions of 20 rows touch 20 of 500 tables, compared with transactions of 20 rows of one table.
Those tables were described before, so that only the cost of each transaction is counted. All events
must arrive, each exactly once.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

from benchmarks import daemon, drains, measure, result, servers
from benchmarks.failure import BenchmarkError
from benchmarks.progress import Every, say
from cdc.config import load
from cdc.log import reader, topics
from cdc.log.consumer import LogConsumer
from cdc.log.offsets import OffsetsQuestion

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from benchmarks.options import Options
    from benchmarks.programs import Program
    from cdc.config import Config
    from cdc.log.records import ResumeIdentity

NAME: Final = "many-tables"

_TABLES: Final = 3_000
_SPREAD: Final = 500
_ROWS_IN_TRANSACTION: Final = 20
_TRANSACTIONS: Final = 8_000
_LAPS: Final = 3
_LOOK_SECONDS: Final = 0.1
_TIMEOUT_SECONDS: Final = 900.0
# How many bytes a broker preallocates for each of the two indexes of a partition. With the default
# of 10 MB, thousands of partitions fill the page cache where the disk reads ahead by megabytes.
BROKER: Final = {"log.index.size.max.bytes": "65536"}
# The locks of one transaction: each table, its key's index and its rows.
_SETTINGS: Final = {**drains.POSTGRES, "max_locks_per_transaction": "1024"}
_CREATE: Final = """
    DO $$ BEGIN FOR i IN {first}..{last} LOOP
        EXECUTE format('CREATE TABLE {prefix}_%s (id bigint PRIMARY KEY, n int NOT NULL,'
            ' name text, price numeric(12,2), at timestamptz NOT NULL DEFAULT now(),'
            ' open bool, note text)', i);
    END LOOP; END $$"""
_TOUCH: Final = """
    DO $$ BEGIN FOR i IN 1..{count} LOOP
        EXECUTE format('INSERT INTO {prefix}_%s (id, n, name) VALUES ({id}, 1, ''row'')', i);
    END LOOP; END $$"""
_LOAD: Final = """
    DO $$ BEGIN
    FOR t IN 1..{transactions} LOOP
        FOR k IN 0..{last} LOOP
            EXECUTE format('INSERT INTO spread_%s (id, n, name, price, open) VALUES'
                ' ($1, 1, ''a name'', 12.5, true)', {table}) USING 1000000 * {lap} + 20 * t + k;
        END LOOP;
        COMMIT;
    END LOOP; END $$"""
_CREATE_AT_ONCE: Final = 500


def run(options: Options) -> dict[str, Any]:
    """Run it and return the result; `rows` are the number of tables."""
    tables = options.rows or _TABLES
    transactions = _TRANSACTIONS if options.rows is None else tables
    with (
        servers.running(NAME, _SETTINGS, keep=options.keep, broker=BROKER) as up,
        up.connect() as connection,
    ):
        create(connection, "many", tables)
        create(connection, "spread", _SPREAD)
        subject, run_name = daemon.Daemon(), "many"
        began_at = time.monotonic()
        subject.prepare(up.place, run_name, ("many_*", "spread_*"))
        setup_s = time.monotonic() - began_at
        say(f"set up {tables + _SPREAD:,} tables in {setup_s:.0f} s")
        config = load(daemon.config_path(up.place, run_name), {})
        with subject.start(up.place, run_name) as program:
            seen = _Seen(config, program)
            seen.until(0)
            idle_mb = measure.peak_rss_mb(program.pid)
            before = measure.cpu_seconds(program.pid)
            committed_at = touch(connection, "many", tables)
            seconds = seen.until(tables) - committed_at
            touched_cpu = measure.cpu_seconds(program.pid) - before
            peak_mb = measure.peak_rss_mb(program.pid)
            say(f"{tables:,} tables in one transaction: {seconds:.1f} s, {peak_mb:.0f} MB")
            touch(connection, "spread", _SPREAD)
            seen.until(tables + _SPREAD)
            spread = _compare(connection, seen, tables + _SPREAD, transactions)
        checked = _check(config, seen.identity)
    spread_cpu = spread["many"]["cpu_s"] / spread["many"]["events"] * 1e6
    return result.build(
        name=NAME,
        unit="s",
        value=seconds,
        limit=None,
        floor=None,
        peer=None,
        cpu_s_per_million=spread_cpu,
        peak_rss_mb=peak_mb,
        versions=up.versions,
        details={
            "tables": tables,
            "partitions": daemon.PARTITIONS,
            "events": checked,
            "setup_s": round(setup_s, 1),
            "touched_cpu_s": round(touched_cpu, 2),
            "rss_mb_before": round(idle_mb, 1),
            "rss_kb_per_table": round((peak_mb - idle_mb) * 1_000 / tables, 1),
            "of_one_table": round(
                spread["many"]["cpu_us_per_event"] / spread["one"]["cpu_us_per_event"], 2
            ),
            "spread": spread,
            "settings": dict(subject.settings),
            "servers": up.settings,
        },
    )


def create(connection: psycopg.Connection, prefix: str, count: int) -> None:
    """Create so many tables, which are named by the prefix and a number from 1 on."""
    for first in range(1, count + 1, _CREATE_AT_ONCE):
        last = min(count, first + _CREATE_AT_ONCE - 1)
        connection.execute(_CREATE.format(first=first, last=last, prefix=prefix).encode())


def touch(connection: psycopg.Connection, prefix: str, count: int) -> float:
    """Insert a row into each table, in one transaction; return the time after its commit."""
    return _commit(connection, _TOUCH.format(count=count, prefix=prefix, id=1))


def _commit(connection: psycopg.Connection, statement: str) -> float:
    """Run the statement in its own transaction; return the time after its commit."""
    connection.execute(statement.encode())
    return time.monotonic()


class _Seen:
    """Polls which events of the log can be read."""

    def __init__(self, config: Config, program: Program) -> None:
        self._config = config
        self._program = program
        self._admin = topics.admin(config)
        self.identity = self._resume()[0]

    @property
    def pid(self) -> int:
        return self._program.pid

    def until(self, seq: int) -> float:
        """Return the time at which all events up to `seq` could be read, in every partition."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        progress = Every(5.0)
        while True:
            self._program.check()
            self.identity, reached = self._resume()
            if reached >= seq and self._all_stable():
                return time.monotonic()
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"the log is at event {reached:,} of {seq:,} after {_TIMEOUT_SECONDS:.0f} s",
                    hint="look at the daemon's log in the folder that --keep leaves",
                )
            progress.say(f"event {reached:,} of {seq:,}")
            time.sleep(_LOOK_SECONDS)

    def _resume(self) -> tuple[ResumeIdentity, int]:
        found = reader.read_resume(self._config)
        assert found is not None
        return found[0], found[1].seq

    def _all_stable(self) -> bool:
        """Whether the last stable offset of every partition has reached its end."""
        observed = OffsetsQuestion(self._admin, self.identity.partitions).answer()
        return not observed.unanswered and all(
            span.stable == span.end for span in observed.spans.values()
        )


def _compare(
    connection: psycopg.Connection, seen: _Seen, seq: int, transactions: int
) -> dict[str, dict[str, float]]:
    """Return the CPU cost of an event in transactions over one table, and over 20 of 500."""
    shapes = {"one": "1", "many": f"1 + (t * 37 + k * 23) % {_SPREAD}"}
    found: dict[str, dict[str, float]] = {}
    events = transactions * _ROWS_IN_TRANSACTION
    # The shapes alternate. The first lap of each warms up and does not count: four writers see
    # their partitions for the first time.
    for lap, (shape, table) in enumerate([*shapes.items()] * _LAPS, start=1):
        statement = _LOAD.format(
            transactions=transactions, last=_ROWS_IN_TRANSACTION - 1, table=table, lap=lap
        )
        with _paused(seen.pid):  # so that it reads either shape as a backlog
            _commit(connection, statement)
            before, threads = measure.cpu_seconds(seen.pid), measure.thread_cpu_seconds(seen.pid)
            began_at = time.monotonic()
        seq += events
        over_at = seen.until(seq)
        cpu_s = measure.cpu_seconds(seen.pid) - before
        after = measure.thread_cpu_seconds(seen.pid)
        found[shape] = {
            "events": events,
            "cpu_s": round(cpu_s, 2),
            "cpu_us_per_event": round(cpu_s / events * 1e6, 1),
            "seconds": round(over_at - began_at, 1),
            **{
                f"{name}_us_per_event": round((after[name] - threads[name]) / events * 1e6, 1)
                for name in threads
            },
        }
        say(f"{events:,} events over {shape}: {cpu_s / events * 1e6:.1f} us of CPU each")
    return found


@contextmanager
def _paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _check(config: Config, identity: ResumeIdentity) -> int:
    """Return how many events there are; raise if one is missing or duplicated."""
    seqs: list[int] = []
    partitions = [(name, at) for name, count in identity.partitions.items() for at in range(count)]
    with closing(LogConsumer(config)) as consumer:
        for _, messages in consumer.pieces(consumer.look_up(partitions)):
            for message in messages:
                value = message.value() or b""
                at = value.index(b'"seq":') + len(b'"seq":')
                seqs.append(int(value[at : value.index(b"}", at)]))
    if sorted(seqs) != list(range(1, len(seqs) + 1)):
        raise BenchmarkError(
            f"{len(seqs):,} events do not have every seq once",
            hint="look at the daemon's log in the folder that --keep leaves",
        )
    return len(seqs)
