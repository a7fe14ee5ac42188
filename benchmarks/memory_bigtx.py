"""memory-bigtx: how much memory and disk a transaction of 2 GB takes.

Two shapes that cost memory in different places: many small rows (objects and headers per row) and
fewer rows of 8 kB that do not compress (bytes waiting for the broker). The large rows run a second
time streamed while the transaction is open, so that the daemon spills them to disk. The figure is
the highest peak of its resident memory; the result also has the peak size on disk. All rows must
arrive exactly once, as in a drain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks import backlog, drains, result, servers
from benchmarks.contents import EachIdOnce
from benchmarks.daemon import Daemon
from benchmarks.drain import Drain, measure_drain
from benchmarks.drain_bigtx import BigTransaction
from benchmarks.progress import say
from benchmarks.workload import Clock

if TYPE_CHECKING:
    import psycopg

    from benchmarks.options import Options
    from benchmarks.workload import Workload

NAME: Final = "memory-bigtx"

_TABLE: Final = "large"
# The size of a pool, in the server's memory, of half rows of hex digits. A row is two of them, so
# that it is cheap to make and differs from the rows near it: lz4 can remove only a digit's spare
# bits.
_HALVES: Final = 512
_INSERT: Final = f"""
    DO $$
    DECLARE halves text[]; first int; second int;
    BEGIN
        SELECT array_agg(half) INTO halves FROM (
            SELECT string_agg(md5(a || '/' || b), '') AS half
            FROM generate_series(1, {_HALVES}) a, generate_series(1, 125) b GROUP BY a
        ) made;
        FOR i IN 1..{{rows}} LOOP
            first := mod(i, {_HALVES});
            second := mod(i + 31 * (i / {_HALVES}), {_HALVES});
            INSERT INTO {_TABLE} VALUES (i, halves[1 + first] || halves[1 + second]);
        END LOOP;
    END $$"""


class SmallRows(BigTransaction):
    """The rows of drain-bigtx, many more of them."""

    name = f"{NAME}-small"
    row_bytes = 240
    subjects: Final = {"small": Daemon()}


class LargeRows:
    """Rows of 8 kB, which Postgres stores out of line and uncompressed."""

    name = f"{NAME}-large"
    tables = (_TABLE,)
    rows = 0  # by size
    row_bytes = 8_050
    subjects: Final = {"large": Daemon(), "large_streamed": drains.STREAMED}
    clock = Clock.SLOT_TAKEN
    in_progress = True

    def create(self, connection: psycopg.Connection, rows: int) -> None:  # noqa: ARG002 - empty
        connection.execute("CREATE TABLE large (id bigint PRIMARY KEY, payload text)")
        connection.execute("ALTER TABLE large ALTER COLUMN payload SET STORAGE EXTERNAL")

    def load(self, connection: psycopg.Connection, rows: int) -> None:
        connection.execute(_INSERT.format(rows=rows).encode())

    def contents(self, connection: psycopg.Connection, rows: int) -> dict[str, EachIdOnce]:  # noqa: ARG002
        return {_TABLE: EachIdOnce(_TABLE, rows)}


def run(options: Options) -> dict[str, Any]:
    """Run both shapes and return the result."""
    shown: dict[str, Drain] = {}
    details: dict[str, Any] = {}
    versions: dict[str, str] = {}
    wal_bytes: dict[str, int] = {}
    for shape in (SmallRows(), LargeRows()):
        rows = round(options.megabytes * 1e6 / shape.row_bytes)
        with (
            servers.running(shape.name, drains.POSTGRES, keep=options.keep) as up,
            up.connect() as connection,
        ):
            say(f"{shape.name}: one transaction of {rows:,} rows")
            backlog.create(connection, shape, rows)
            loaded = backlog.preload(connection, shape, rows)
            for way, subject in shape.subjects.items():
                shown[way] = _drain(shape, subject, loaded, up, connection)
                wal_bytes[way] = loaded.wal_bytes
            versions, details["servers"] = up.versions, up.settings
    cpu = result.median([drained.cpu_s_per_million for drained in shown.values()])
    assert cpu is not None
    return result.build(
        name=NAME,
        unit="MB",
        value=max(drained.peak_rss_mb for drained in shown.values()),
        limit=None,
        floor=None,
        peer=None,
        cpu_s_per_million=cpu,
        peak_rss_mb=max(drained.peak_rss_mb for drained in shown.values()),
        versions=versions,
        details={
            "megabytes": options.megabytes,
            "peak_files_mb": round(max(each.peak_files_mb for each in shown.values()), 1),
            "settings": dict(Daemon().settings),
            **details,
            "wal_bytes": wal_bytes,
            "runs": {way: drained.details() for way, drained in shown.items()},
        },
    )


def _drain(
    shape: Workload,
    subject: Daemon,
    loaded: backlog.Backlog,
    up: servers.Servers,
    connection: psycopg.Connection,
) -> Drain:
    run_name = subject.name.replace("-", "_")
    drained = measure_drain(subject, up, connection, shape, loaded, run_name)
    say(
        f"{shape.name}, {subject.name}: peak {drained.peak_rss_mb:.0f} MB of memory,"
        f" {drained.peak_files_mb:.0f} MB on disk, {drained.rows_per_second:,.0f} rows/s"
    )
    return drained
