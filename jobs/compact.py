"""Log compaction as a Spark app: `spark-submit jobs/compact.py --config lockstep.yaml`.

Makes a base at the archive's newest frontier: see `jobs.compacting.running`. Small tables are
compacted in this process; Spark starts for large ones.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import echo, next_step, print_json, with_config
from lockstep.jobs.apply import app
from lockstep.jobs.compacting.reporting import report
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.spark.starting import session_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.compacting.layout import BaseRecord


@click.command("compact", epilog="\b\nExample:\n  python jobs/compact.py --config lockstep.yaml")
@with_config
@json_option
def main(config: Config, *, as_json: bool) -> None:
    """Make a base at the archive's newest frontier; see `cdc archive compact`."""
    app.begin(config)

    @cache
    def spark() -> SparkSession:
        return session_of(f"lockstep compaction of {config.pipeline}", config, ())

    record, is_new = Compaction(config, spark).run()
    report(config)
    if as_json:
        print_json(described(record) | {"made": is_new})
    else:
        _print(record, is_new=is_new)
    if spark.cache_info().currsize:
        with suppress(Exception):  # the JVM may have received the same signal
            spark().stop()


def described(record: BaseRecord) -> dict[str, Any]:
    """Return what a base is, for JSON."""
    return {
        "number": record.number,
        "lsn": record.lsn,
        "seq": record.seq,
        "committed_at_us": record.committed_at_us,
        "chain": record.chain,
        "rows": record.rows,
        "tables": [each._asdict() for each in record.tables],
    }


def _print(record: BaseRecord, *, is_new: bool) -> None:
    at = datetime.fromtimestamp(record.committed_at_us / 1e6, UTC)
    what = "made" if is_new else "nothing was archived since"
    echo(f"base {record.number} ({what}) at {record.lsn}, seq {record.seq}, {at:%F %T} UTC")
    deletes = sum(table.deletes for table in record.tables)
    echo(f"{record.rows:,} events of {len(record.tables):,} tables, {deletes:,} of them deletes")
    next_step("`cdc rebuild FOLLOWER` starts from it; `cdc prove` checks it")


if __name__ == "__main__":
    app.run(main)
