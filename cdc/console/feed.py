"""Follow the log in one thread, for every viewer: counts by table, and the newest events.

Reads the log alone, so a masked column is masked here. At most `MOST_PER_SECOND` events a second
are kept, an equal share of each table; all are counted, so a viewer learns how many are not shown.
The newest `_KEPT` are in memory: a viewer that is slower than the log skips events, and learns how
many.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from cdc.console.latency import Lateness
from cdc.errors import CDCError
from cdc.log import names
from cdc.log.sample import sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config
    from cdc.log.sample import Sample
    from cdc.log.tail import Arrived

log = logging.getLogger("cdc.console.feed")

# More than a person can read, and little for a browser.
MOST_PER_SECOND: Final = 200
_KEPT: Final = 2_000
_RATE_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 3.0
# Of a value and of a row: the page shows what fits, `cdc tail --json` and `cdc dead` have the rest.
_VALUE_CHARACTERS: Final = 400
_MOST_COLUMNS: Final = 100
# Of a key that can be asked for, in `/api/explain`'s address.
MOST_KEY_CHARACTERS: Final = 1_000
# A browser's numbers are doubles: of integers above this it shows, and asks for, another.
_MOST_INTEGER: Final = 1 << 53


class FeedEntry(NamedTuple):
    """One event for viewers; `number` counts what was kept, without gaps."""

    number: int
    table: str
    op: str
    key: str
    body: bytes


class TableFeed(NamedTuple):
    """What arrived of one table since the console started."""

    events: int = 0
    published_ms: int | None = None


class Filter(NamedTuple):
    """What a viewer wants to see: parts of names and keys, operations; empty is everything."""

    table: str = ""
    ops: frozenset[str] = frozenset()
    key: str = ""

    def matches(self, entry: FeedEntry) -> bool:
        return (
            (not self.ops or entry.op in self.ops)
            and self.table in entry.table
            and self.key in entry.key
        )


class Feed:
    """Follows until `close`."""

    def __init__(self, config: Config) -> None:
        """`start` makes it follow."""
        self.since_ms = time.time_ns() // 1_000_000
        self.error = ""  # why nothing can be read now
        self.arrived = 0
        self.kept = 0
        self._config = config
        self._entries = deque[FeedEntry](maxlen=_KEPT)
        self._tables: dict[str, TableFeed] = {}
        self._recent = deque[tuple[float, dict[str, int]]]()
        self._late = Lateness()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cdc-console-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; the thread ends after its current read."""
        self._over.set()

    def since(self, number: int, wanted: Filter, most: int) -> tuple[list[FeedEntry], int, int]:
        """Return kept events above `number`, where to go on, and how many were skipped.

        A number of -1 starts with the newest.
        """
        with self._lock:
            entries = [each for each in self._entries if each.number > number]
            last = self._entries[-1].number if self._entries else max(number, 0)
        skipped = entries[0].number - number - 1 if entries and number >= 0 else 0
        found = [each for each in entries if wanted.matches(each)]
        skipped += max(0, len(found) - most)
        return found[-most:], last, skipped

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return events, rate and last change by topic, of those that changed."""
        with self._lock:
            rates: dict[str, int] = {}
            for _, counts in self._recent:
                for topic, events in counts.items():
                    rates[topic] = rates.get(topic, 0) + events
            return {
                topic: {
                    "events": each.events,
                    "published_ms": each.published_ms,
                    "events_per_second": rates.get(topic, 0) / _RATE_SECONDS,
                }
                for topic, each in self._tables.items()
            }

    def take_late(self) -> Lateness:
        """Return how late the events were that were decoded since the last call."""
        with self._lock:
            found, self._late = self._late, Lateness()
        return found

    def rate(self) -> float:
        """Return how many events a second arrive, of all tables."""
        with self._lock:
            return sum(sum(counts.values()) for _, counts in self._recent) / _RATE_SECONDS

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                for each in sample(self._config, MOST_PER_SECOND):
                    self.note(each, time.monotonic())
                    if self._over.is_set():
                        return
            except CDCError as error:
                # The page shows it; afterwards it continues at the log's end.
                self.error = error.what
                log.debug("cannot follow the log", extra={"fields": {"error": error.what}})
            except Exception as error:
                self.error = f"a bug: {type(error).__name__}"
                log.exception("cannot follow the log")
            self._over.wait(_AGAIN_SECONDS)

    def note(self, found: Sample, now: float) -> None:
        """Take what one read found, at a monotonic time."""
        self.error = ""
        entries = [self._entry(each) for each in found.arrived]
        with self._lock:
            counts = {topic: each.events for topic, each in found.topics.items()}
            if counts:
                self._recent.append((now, counts))
            while self._recent and now - self._recent[0][0] > _RATE_SECONDS:
                self._recent.popleft()
            for topic, each in found.topics.items():
                before = self._tables.get(topic, TableFeed())
                self._tables[topic] = TableFeed(before.events + each.events, each.published_ms)
            self.arrived += sum(counts.values())
            for arrived in found.arrived:
                self._late.note(arrived.published_ms - arrived.event["ts_ms"])
            for entry in entries:
                self.kept += 1
                self._entries.append(entry._replace(number=self.kept))

    def _entry(self, arrived: Arrived) -> FeedEntry:
        event, source = arrived.event, arrived.event["source"]
        is_row = event["op"] != "m"
        table = names.table_name(self._config.prefix, arrived.topic) if is_row else ""
        key = orjson.loads(arrived.key) if arrived.key else None
        text = arrived.key.decode(errors="replace") if arrived.key else ""
        dead = source.get("dead")
        body = {
            "seq": source["seq"],
            "lsn": source["commit_lsn"],
            "at_ms": event["ts_ms"],
            "late_ms": max(0, arrived.published_ms - event["ts_ms"]),
            "op": event["op"],
            "table": table,
            "key": shortened(key),
            # As the log has it, to ask for the row.
            "key_text": text if 0 < len(text) <= MOST_KEY_CHARACTERS else None,
            "before": shortened(event.get("before")),
            "after": shortened(event.get("after")),
            "unchanged": list(source.get("unchanged", ())),
            "dead": dead and dead["columns"],
            "prefix": (event.get("message") or {}).get("prefix"),
        }
        return FeedEntry(0, table, event["op"], text, orjson.dumps(body))


def exact(value: object) -> object:
    """Return JSON in which the integers that a browser would round are text."""
    if isinstance(value, dict):
        return {name: exact(each) for name, each in value.items()}
    if isinstance(value, list):
        return [exact(each) for each in value]
    return str(value) if isinstance(value, int) and abs(value) > _MOST_INTEGER else value


def shortened(row: object) -> object:
    """Return a row whose values are short enough to look at; cut ones end with an ellipsis."""
    if not isinstance(row, dict):
        return row
    return {name: _short(value) for name, value in _first(row.items())}


def _first(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [each for _, each in zip(range(_MOST_COLUMNS), items, strict=False)]


def _short(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float)):
        return exact(value)
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"
