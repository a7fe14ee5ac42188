"""The log's changes as DataFrames, for applications: see `lockstep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.jobs import reading_as_of
from lockstep.jobs.compacting.bases import with_base
from lockstep.jobs.spark.changes_source import NAME, ChangesSource

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from cdc.events import LSN


class PublicSource(ChangesSource):
    """Its errors name the newest base."""

    remedy = staticmethod(with_base)


def register(spark: SparkSession) -> SparkSession:
    """Make `format("lockstep")` known to a session; return the session."""
    spark.dataSource.register(PublicSource)
    return spark


def session(name: str = "lockstep", *, cores: int = 2) -> SparkSession:
    """Return a session with Delta and `format("lockstep")`: the active one, or a small local one.

    Under spark-submit it is the submitted one. Delta's jars are fetched if they are missing; your
    own session needs what `cdc spark conf` and `cdc spark jars` print.
    """
    return register(reading_as_of.session(name, cores=cores))


def changes(
    spark: SparkSession,
    config: str | Path,
    tables: Iterable[str] = (),
    *,
    start: str | int | LSN | datetime = "beginning",
    end: str | int | LSN | datetime = "latest",
    net: bool = False,
) -> DataFrame:
    """Return the changes of tables (default: all) after one frontier, up to another.

    `start` and `end` are a frontier's seq, an LSN, a time with its zone, or "beginning", "earliest"
    and "latest": each means the newest frontier not above it. The columns are in docs/SPARK.md.
    With `net` there is one row for each key that changed. Raises GapError if the log no longer has
    all events in between; ConfigError for a table or position that it does not have.
    """
    options = _options(config, tables, start, net=net)
    return register(spark).read.format(NAME).options(**options, to=_text(end)).load()


def follow_changes(
    spark: SparkSession,
    config: str | Path,
    tables: Iterable[str] = (),
    *,
    start: str | int | LSN | datetime = "beginning",
    net: bool = False,
) -> DataFrame:
    """Return a stream of the same rows, from a frontier on. Every batch ends at a frontier.

    With a checkpoint it continues where the checkpoint is; without, at `start`, such as the
    frontier that your store has kept (column `frontier`).
    """
    options = _options(config, tables, start, net=net)
    return register(spark).readStream.format(NAME).options(**options).load()


def _options(
    config: str | Path, tables: Iterable[str], start: str | int | LSN | datetime, *, net: bool
) -> dict[str, str]:
    return {
        "config": str(config),
        "tables": ",".join(tables),
        "from": _text(start),
        "changes": "net" if net else "all",
    }


def _text(position: str | int | LSN | datetime) -> str:
    return position.isoformat() if hasattr(position, "isoformat") else str(position)
