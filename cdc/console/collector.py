"""Measure the pipeline in one thread, for every viewer: what `cdc status` finds, again and again.

An answer is bytes that were made when it was measured, so it costs the same with one table or a
thousand. While nobody looks, it measures rarely. A measurement that does not end (a server that
accepts and does not answer) makes the last one old: after `STALE_SECONDS` it counts for nothing,
and the page must not show it as the present.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from cdc.config import stores
from cdc.console.flow import Measured, point
from cdc.console.incidents import Incidents
from cdc.events import table_name
from cdc.operate.retention import Gauge
from cdc.operate.status import StatusReader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config
    from cdc.console.feed import Feed
    from cdc.operate.status import Status
    from cdc.snapshot.incremental.records import IncrementalRecord

log = logging.getLogger("cdc.console.collector")

STALE_SECONDS: Final = 15.0
_EVERY_SECONDS: Final = 2.0
# While no request has come for a while: a page that is opened then is measured for at once.
_RESTING_SECONDS: Final = 30.0
_UNWATCHED_SECONDS: Final = 30.0
# The least share of the time in which it does nothing: measuring opens connections.
_PAUSES: Final = 3.0
_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS


class Measurement(NamedTuple):
    """One measurement, as the bytes that requests get."""

    at: float  # monotonic, when it ended
    status: bytes
    tables: bytes
    chart: bytes

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.at


def encoded(value: object) -> bytes:
    """Return JSON as the commands print it: LSNs as text."""
    return orjson.dumps(value, default=str, option=_OPTIONS)


class Collector:
    """Measures until `close`; `newest` is the last result, None before the first."""

    def __init__(self, config: Config, feed: Feed) -> None:
        """Start at once."""
        self.newest: Measurement | None = None
        self.failed = ""  # why the last try gave no result: a bug, by its class
        self._config = config
        self._feed = feed
        self._measured = Measured()
        self._incidents = Incidents()
        self._gauge = Gauge()
        # One for all measurements: it keeps its connections.
        self._reader = StatusReader(config)
        self._asked_at = time.monotonic()
        self._wake = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="cdc-console", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current measurement, which is not waited for."""
        self._over = True
        self._wake.set()

    def asked(self) -> Measurement | None:
        """Return the newest result for a viewer, who is then measured for."""
        resting = time.monotonic() - self._asked_at > _UNWATCHED_SECONDS
        self._asked_at = time.monotonic()
        if resting:
            self._wake.set()
        return self.newest

    def _run(self) -> None:
        with closing(self._reader):
            self._repeat()

    def _repeat(self) -> None:
        while not self._over:
            began = time.monotonic()
            try:
                self.newest, self.failed = self._measure(), ""
            except Exception as error:
                # The result gets older, and the page says so; servers are no exceptions here.
                if not self.failed:
                    log.exception("cannot measure")
                self.failed = type(error).__name__
            took = time.monotonic() - began
            resting = time.monotonic() - self._asked_at > _UNWATCHED_SECONDS
            pause = max(_RESTING_SECONDS if resting else _EVERY_SECONDS, _PAUSES * min(took, 1.0))
            self._wake.wait(pause)
            self._wake.clear()

    def _measure(self) -> Measurement:
        status = self._reader.read()
        now = time.monotonic()
        self._measured.add(point(now, status, self._feed.take_late()))
        self._incidents.add(status)
        fields = {
            "status": status.fields(),
            "rates": self._measured.rates(),
            "slot": self._slot(now, status),
            "incidents": self._incidents.listed(),
            "stale": stale(self._config, status),
        }
        chart = encoded(self._measured.chart())
        changes = self._feed.tables()
        rows = [each | {"changes": changes.get(each["topic"])} for each in tables(status)]
        listed = encoded({"since_ms": self._feed.since_ms, "tables": rows})
        return Measurement(now, encoded(fields), listed, chart)

    def _slot(self, now: float, status: Status) -> dict[str, Any] | None:
        """Return what the slot keeps, and how long that lasts at the rate measured here."""
        if status.slot is None or status.server is None:
            return None
        retention = self._gauge.observe(now, status.server.wal_lsn, status.slot)
        kept, safe = status.slot.retained_bytes, status.slot.safe_wal_bytes
        return {
            "retained_bytes": kept,
            "limit_bytes": None if safe is None or kept is None else kept + max(0, safe),
            "lost_in_seconds": retention.lost_in_seconds,
            "wal_bytes_per_second": retention.wal_bytes_per_second,
            "stalled_seconds": retention.stalled_seconds,
        }


def tables(status: Status) -> list[dict[str, Any]]:
    """Return each table of the log: its versions, its snapshot, and whether its topic is complete.

    Sorted by name. A table that is no longer captured is among them as long as the log has its
    schema records.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in status.schemas:
        name = table_name(record.schema, record.table)
        entry = found.setdefault(
            (record.schema, record.table), {"name": name, "topic": record.topic, "versions": 0}
        )
        entry["versions"] += 1
        entry |= {
            "key": list(record.key),
            "columns": len(record.columns),
            "since": str(record.from_lsn),
        }
    incomplete = {each.name: each.what for each in status.incomplete_topics}
    snapshots = _initial(status, found)
    snapshots |= {
        each.name: each.summary | {"kind": "incremental", "percent": _percent(each)}
        for each in status.incremental_snapshots
        if each.active
    }
    for entry in found.values():
        entry["incomplete"] = incomplete.get(entry["name"])
        entry["snapshot"] = snapshots.get(entry["name"])
    return [found[name] for name in sorted(found)]


def stale(config: Config, status: Status) -> dict[str, list[str]]:
    """Return the tables of each follower whose topics are incomplete: what its store has of them.

    A follower without such tables is left out.
    """
    incomplete = {each.name for each in status.incomplete_topics if each.captured}
    if not incomplete:
        return {}
    known = {
        (record.schema, record.table): name
        for record in status.schemas
        if (name := table_name(record.schema, record.table)) in incomplete
    }
    found = {
        follower: sorted(name for table, name in known.items() if stores.follows(each, *table))
        for follower, each in config.followers.items()
    }
    return {follower: names for follower, names in found.items() if names}


def _initial(status: Status, names: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Return how far the initial snapshot is with each table, by its name; nothing once it is done.

    What the daemon reports of its tables. Where it does not answer, only that they are not copied
    yet: rows of a snapshot count for nothing before all of them are there.
    """
    if status.snapshot is None or status.snapshot.stage == "done":
        return {}
    report = (status.daemon or {}).get("snapshot") or {}
    known = {each["table"]: each for each in report.get("tables", ())}
    copied = {
        table_name(schema, table): known.get(f"{schema}.{table}", {}) for schema, table in names
    }
    return {
        name: {
            "kind": "initial",
            "state": status.snapshot.stage,
            "rows": each.get("rows", 0),
            "percent": each.get("percent"),
            "why": None,
        }
        for name, each in copied.items()
    }


def _percent(record: IncrementalRecord) -> float | None:
    """Return how much of its table a snapshot has read, by Postgres' estimate of the rows.

    None of chosen rows, whose number is not known. It is below 100 while it works, whatever the
    estimate.
    """
    if not record.estimate or record.estimate < 0 or record.where or record.keys or record.withheld:
        return None
    return round(min(99.0, 100 * record.rows / record.estimate), 1)
