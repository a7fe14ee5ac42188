"""follow-delta: random updates of the log into one large mirror, and commit to readable.

The mirror has five million rows before the follower starts, written by a direct snapshot. The
follower then catches up with a backlog of updates of random rows, and follows 500 single-row
commits a second. The figure is updates per second of the backlog. The floor is the same rows
appended to a Delta table, with no log and no lookup. The peer, in the same run and on a copy of the
same mirror, is the job from Delta's documentation: Structured Streaming, with a MERGE of the newest
change of each key in each batch.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.csv as pc
from deltalake import CommitProperties, DeltaTable, QueryBuilder, write_deltalake

from benchmarks import backlog, result, rows, servers, slots
from benchmarks.failure import BenchmarkError
from benchmarks.follow_run import FIRST_ID, RATE, Followed, FollowRun
from benchmarks.latency import POSTGRES
from benchmarks.programs import Program
from benchmarks.progress import say
from cdc.errors import ConfigError
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.delta import lake as delta_lake
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.delta.rows import EXACT_TYPE

if TYPE_CHECKING:
    import psycopg

    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAME: Final = "follow-delta"
LIMIT_ROWS_PER_SECOND: Final = 80_000.0
# Milliseconds. Higher than for other stores: a mirror is not a cache.
LIMIT_P50_MS: Final = 900.0
MIRROR_ROWS: Final = 5_000_000
_UPDATES: Final = 1_500_000
_RUN: Final = "mirrored"
_TRANSACTION_ROWS: Final = 10_000
_FLOOR_ROWS: Final = 300_000
# Odd and not a multiple of five, so that each row of a round number of rows occurs once.
_STEP: Final = 2_654_435_761
_PEER_SECONDS: Final = 900.0


class DeltaStore:
    """A lake, whose readers read at the newest frontier."""

    pids: tuple[int, ...] = ()

    def __init__(self, path: Path, more: int) -> None:
        """`more`: how many rows of the mirror the run does not count."""
        self._path, self._more = path, more
        self.section: dict[str, Any] = {"delta": {"path": str(path)}}

    def seq(self) -> int:
        table = delta_lake.opened(str(self._path / "_frontiers"), {})
        return (
            0
            if table is None
            else delta_lake.generation_and_seq(table.transaction_version(_APPLIED))[1]
        )

    def check(self, count: int) -> None:
        try:
            found = read_as_of_arrow(str(self._path), [f"public.{rows.TABLE}"])
        except ConfigError as error:
            raise BenchmarkError("the lake has no frontier", hint=str(error)) from error
        many = found.tables[f"public.{rows.TABLE}"].num_rows
        if many != count + self._more:
            raise BenchmarkError(
                f"the mirror has {many:,} rows, not {count + self._more:,}",
                hint="the figure would not count",
            )


_APPLIED: Final = "lockstep/applied"


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    count = options.rows or _UPDATES
    mirror_rows = MIRROR_ROWS if options.rows is None else 10 * count
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
    ):
        lake, copy = up.place.folder / "lake", up.place.folder / "copy"
        mirror = lake / f"public.{rows.TABLE}"
        connection.execute(rows.CREATE_TABLE)
        say(f"a table and its mirror of {mirror_rows:,} rows")
        fill_table(connection, mirror_rows)
        mirror_of(connection, up.place.folder, mirror)
        shutil.copytree(mirror, copy)
        floor = floor_of(mirror, up.place.folder / "floor")
        backlog.publish(connection, (rows.TABLE,))
        # The backlog's changes are updates and add no row: only the load inserts rows.
        store = DeltaStore(lake, mirror_rows - count)
        with slots.created(connection, _RUN):
            update = Updates(mirror_rows)
            shown = FollowRun(_RUN, store, up, connection, options, fill=update).measure(count)
        peer = _peer(up, copy, count) if options.peer else None
        return _result(shown, floor, peer, mirror_rows, up)


def fill_table(connection: psycopg.Connection, count: int) -> None:
    values = rows.VALUES.format(i="i")
    connection.execute(
        f"INSERT INTO bench SELECT {values}"
        f" FROM generate_series({FIRST_ID}::bigint, {FIRST_ID + count - 1}) i".encode()
    )


class Updates:
    """Updates random rows, each at most once, in transactions of a few thousand."""

    def __init__(self, mirror_rows: int) -> None:
        self._complete = mirror_rows

    def __call__(self, connection: psycopg.Connection, count: int) -> None:
        for first in range(0, count, _TRANSACTION_ROWS):
            last = min(first + _TRANSACTION_ROWS, count) - 1
            connection.execute(
                "UPDATE bench SET k = k + 1, payload = reverse(payload), created_at ="
                f" clock_timestamp() FROM (SELECT {FIRST_ID} + (i::numeric * {_STEP} %"
                f" {self._complete})::bigint AS chosen FROM generate_series({first}, {last}) i) few"
                " WHERE id = chosen".encode()
            )


def mirror_of(connection: psycopg.Connection, folder: Path, path: Path) -> None:
    """Write the table's rows into its mirror, as a direct snapshot does."""
    file = folder / "rows.csv"
    query = (
        "COPY (SELECT id, k, payload, amount, to_char(created_at AT TIME ZONE 'UTC',"
        ' \'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\') AS created_at FROM bench) TO STDOUT (FORMAT csv,'
        " HEADER)"
    )
    with file.open("wb") as sink, connection.cursor().copy(query) as copied:
        for chunk in copied:
            sink.write(chunk)
    types = {
        "id": pa.int64(),
        "k": pa.int32(),
        "payload": pa.string(),
        "amount": pa.decimal128(12, 2),
        "created_at": pa.timestamp("us", "UTC"),
    }
    ours = {
        "_seq": pa.int64(),
        "_commit_lsn": pa.int64(),
        "_committed_at": pa.timestamp("us", "UTC"),
        "_exact": EXACT_TYPE,
    }
    schema = pa.schema([*types.items(), *ours.items()])
    read = pc.open_csv(
        file,
        read_options=pc.ReadOptions(block_size=64 << 20),
        convert_options=pc.ConvertOptions(column_types=types),
    )
    facts = {"pipeline": _RUN, "generation": 1, "lsn": "0/1", "frontier": "0/1"}
    properties = CommitProperties(custom_metadata={"userMetadata": delta_layout.metadata(**facts)})
    for part in read:
        many = part.num_rows
        places = [pa.repeat(pa.scalar(0, pa.int64()), many)] * 2
        at = [pa.repeat(pa.scalar(0, ours["_committed_at"]), many), pa.nulls(many, EXACT_TYPE)]
        table = pa.Table.from_arrays([*part.columns, *places, *at], schema=schema)
        write_deltalake(path, table, mode="append", commit_properties=properties)
    file.unlink()


def floor_of(mirror: Path, path: Path) -> float:
    """Return the rows per second of plain appends of the mirror's own rows."""
    query = f"SELECT * FROM t LIMIT {_FLOOR_ROWS}"
    found = pa.table(QueryBuilder().register("t", DeltaTable(mirror)).execute(query).read_all())
    began = time.monotonic()
    for _ in range(3):
        write_deltalake(path, found, mode="append")
    return float(3 * found.num_rows / (time.monotonic() - began))


def _peer(up: Servers, copy: Path, count: int) -> dict[str, float]:
    """Return the figures of the documented job with the same topic and a copy of the mirror."""
    topic = f"{_RUN}.public.{rows.TABLE}"
    command = [sys.executable, "-m", "benchmarks.merge_job"]
    command += [up.bootstrap, topic, str(copy), str(count)]
    with Program("the MERGE job", command, up.place.folder / "merge.log") as job:
        job.wait(_PEER_SECONDS)
        found: dict[str, float] = orjson.loads(job.output().splitlines()[-1])
    say(f"the MERGE job: {found}")
    return found


def _result(
    shown: Followed, floor: float, peer: dict[str, float] | None, mirror_rows: int, up: Servers
) -> dict[str, Any]:
    catch_up = shown.catch_up
    return result.build(
        name=NAME,
        unit="rows/s",
        value=catch_up.rows_per_second,
        limit=LIMIT_ROWS_PER_SECOND,
        floor=floor,
        peer=None if peer is None else peer["rows_per_second"],
        cpu_s_per_million=catch_up.cpu_s["follower"] / catch_up.rows * 1e6,
        peak_rss_mb=max(catch_up.peak_rss_mb.values()),
        versions=up.versions,
        details={
            "mirror_rows": mirror_rows,
            "rate": RATE,
            "p50_limit_ms": LIMIT_P50_MS,
            **shown.details(),
            "floor_by": "the same rows appended by delta-rs, 300,000 at a time",
            "peer_by": "Structured Streaming and MERGE in each batch, as Delta documents it",
            "peer": peer,
            "servers": up.settings,
        },
    )
