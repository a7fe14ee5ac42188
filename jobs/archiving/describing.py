"""What the archive holds, how large it is, how fast it grows, and what that lets Kafka forget."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import CDCError, ConfigError
from cdc.log import reader
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.upkeep import SMALL_BYTES
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from cdc.config import Config

# Growth is that of this many days.
_DAYS: Final = 7
_DAY_US: Final = 86_400_000_000
_MONTH_DAYS: Final = 30.4
_GIGABYTE: Final = 1e9


def describe(config: Config) -> dict[str, Any]:
    """Return the archive's figures; raise ConfigError if it does not exist."""
    archive = opened(config)
    if not archive.find():
        raise ConfigError(
            f"there is no archive at {archive.path}", hint="`cdc archive run` creates it"
        )
    position = archive.position()
    actions = pa.table(archive.table.get_add_actions())
    sizes = actions["size_bytes"]
    size = int(pc.sum(sizes).as_py() or 0)
    records = int(pc.sum(actions["num_records"]).as_py() or 0)
    newest = position.newest
    growth = _growth(archive.table, newest.committed_at_us if newest else 0)
    per_record = size / records if records else 0.0
    price = config.archive.gb_month_price
    return {
        "path": archive.path,
        "lsn": str(position.applied.lsn),
        "seq": position.applied.seq,
        "epoch": position.applied.epoch,
        "committed_at_us": position.applied.committed_at_us,
        "cuts": newest.number if newest else 0,
        "chain": newest.chain if newest else "",
        "digest": position.digest,
        **_lag(config, position.applied.seq),
        "records": records,
        "bytes": size,
        "bytes_per_record": round(per_record, 1),
        "files": len(sizes),
        "small_files": sum(each < SMALL_BYTES for each in sizes.to_pylist()),
        "records_per_day": round(growth),
        "bytes_per_day": round(growth * per_record),
        "price_per_month": round(size / _GIGABYTE * price, 4),
        "price_per_month_in_a_year": round(
            (size + 12 * _MONTH_DAYS * growth * per_record) / _GIGABYTE * price, 4
        ),
    }


def _growth(table: Any, newest_us: int) -> float:  # noqa: ANN401 - a DeltaTable
    """Return the records a day, by the commits of the last days."""
    since = newest_us - _DAYS * _DAY_US
    where = f"committed_at >= to_timestamp_micros({max(0, since)})"
    found = lake.read(table, ["committed_at"], where)["committed_at"]
    if not found.num_chunks or not len(found):
        return 0.0
    oldest = pc.min(found.cast(pa.int64())).as_py()
    days = max((newest_us - oldest) / _DAY_US, 1 / 24)
    return float(len(found) / days)


def _lag(config: Config, seq: int) -> dict[str, Any]:
    """Return how far the log is ahead; None where no broker answers."""
    try:
        tail = reader.read_frontier_tail(config, 1)
    except CDCError as error:
        return {"lag_events": None, "lag_seconds": None, "log": error.what}
    if not tail:
        return {"lag_events": 0, "lag_seconds": 0.0, "log": "no frontier"}
    record = tail[-1][0]
    lag = record.seq - seq
    age = time.time() - record.committed_at_us / 1e6
    return {
        "lag_events": lag,
        "lag_seconds": round(max(0.0, age), 1) if lag else 0.0,
        "log": str(record.lsn),
    }
