"""Several mirrors as of one frontier: what the database held at one LSN.

`read_as_of` returns Spark DataFrames, `read_as_of_arrow` Arrow tables without Spark. Both take the
follower's newest frontier that is not above the requested one, and read each mirror at its version
at that frontier (docs/DELTA.md, "Frontiers"). `vacuum_hours` limits how far back this works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.log import names
from lockstep.sinks.delta import frontier_rows as delta_frontiers
from lockstep.sinks.delta import lake as delta_lake

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from lockstep.sinks.contract import Applied

T = TypeVar("T")


def session(name: str = "lockstep reader", *, cores: int = 2) -> SparkSession:
    """Return a Spark session for `read_as_of`: the active one, or a small local one.

    It has Delta's jars, which are fetched if missing. Your own session needs what `cdc spark conf`
    and `cdc spark jars` print.
    """
    from lockstep.jobs.spark.session import with_jars  # noqa: PLC0415 - pyspark takes a second

    return with_jars(name, cores=cores)


@dataclass(frozen=True)
class TablesAsOf(Generic[T]):
    """Tables by name, and their common frontier."""

    applied: Applied
    tables: Mapping[str, T]


def read_as_of(
    spark: SparkSession,
    path: str,
    tables: Iterable[str],
    *,
    lsn: LSN | str | None = None,
    time: datetime | None = None,
    storage: Mapping[str, str] | None = None,
) -> TablesAsOf[DataFrame]:
    """Return DataFrames of the tables `schema.table` below `path`, at one frontier.

    The newest frontier, or the newest not above `lsn` or the commit time `time`. ConfigError if
    there is none that old, or it has no such table.
    """
    if "delta" not in (spark.conf.get("spark.sql.extensions", "") or "").lower():
        raise ConfigError(
            "this Spark session does not have Delta Lake",
            hint="take `lockstep.session()`, or start yours with the output of `cdc spark conf` and"
            " `cdc spark jars`",
        )
    row = _row(path, lsn, time, storage)
    places = {name: _place(row.versions, name) for name in tables}
    return TablesAsOf(
        row.applied,
        {
            name: spark.read.format("delta")
            .option("versionAsOf", row.versions[place])
            .load(f"{path.rstrip('/')}/{place}")
            for name, place in places.items()
        },
    )


def read_as_of_arrow(
    path: str,
    tables: Iterable[str],
    *,
    lsn: LSN | str | None = None,
    time: datetime | None = None,
    storage: Mapping[str, str] | None = None,
) -> TablesAsOf[pa.Table]:
    """Return the same as Arrow tables, by delta-rs."""
    row = _row(path, lsn, time, storage)
    found = {}
    for name in tables:
        place = _place(row.versions, name)
        table = delta_lake.opened(f"{path.rstrip('/')}/{place}", storage or {}, row.versions[place])
        if table is None:
            raise _missing(name, row.versions)
        found[name] = delta_lake.read(table, delta_lake.arrow_schema(table).names)
    return TablesAsOf(row.applied, found)


def _row(
    path: str,
    lsn: LSN | str | None,
    time: datetime | None,
    storage: Mapping[str, str] | None,
) -> delta_frontiers.FrontierRow:
    if time is not None and time.tzinfo is None:
        raise ConfigError(f"{time} names no moment: it has no time zone", hint="add tzinfo=UTC")
    table = delta_lake.opened(f"{path.rstrip('/')}/{delta_frontiers.NAME}", storage or {})
    row = None
    if table is not None:
        asked = LSN.parse(lsn) if isinstance(lsn, str) else lsn
        row = delta_frontiers.as_of(table, asked, time and time.astimezone(UTC))
    if row is None:
        raise ConfigError(
            f"{path} has no frontier{'' if lsn is None and time is None else ' so old'}",
            hint="name the path of a Delta follower that has applied something, and a place within"
            " its `vacuum_hours`",
        )
    return row


def _place(versions: Mapping[str, int], name: str) -> str:
    """Return the folder of a table, which has its topic's name."""
    for place in versions:
        if name in (place, names.table_name("", f".{place}")):
            return place
    raise _missing(name, versions)


def _missing(name: str, versions: Mapping[str, int]) -> ConfigError:
    return ConfigError(
        f"there is no mirror of {name} at that frontier",
        hint=f"there are {', '.join(sorted(versions)) or 'none'}",
    )
