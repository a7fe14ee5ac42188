"""A database, a log and six stores, with a daemon and followers in which to inject faults.

Watchers read Redis, OpenSearch, Postgres, SQLite and topics all the time, as
clients would, and check every state that they see against its own digest.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import psycopg
import pytest
import requests

from tests.faults import follower_types
from tests.faults.follower_copies import SHOWN_CHARACTERS, Copies
from tests.faults.follower_http import HttpProxy
from tests.faults.follower_rows import DDL, TABLES, State, database_rows, differences, findings
from tests.faults.follower_stores import (
    Delta,
    OpenSearch,
    Postgres,
    Reading,
    Redis,
    Sqlite,
    Topics,
)
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.servers import Database
from tests.fixtures.store_postgres import url_of

if TYPE_CHECKING:
    from cdc.playground.servers.stack import LocalStack

CONVERGE_SECONDS: Final = 1_200.0
# So that some cuts are of one transaction that is larger than this, and others of many.
_MAX_EVENTS: Final = 2_000
_LOOK_SECONDS: Final = 0.2


class StoreWatcher(threading.Thread):
    """Reads a store over and over; `wrong` lists what no state of the database explains."""

    def __init__(self, name: str, read: Callable[[], Reading | None]) -> None:
        super().__init__(name=f"watch {name}", daemon=True)
        self.wrong: list[str] = []
        self.readings = 0
        self.frontiers: set[tuple[int, int]] = set()
        self._store, self._read = name, read
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            reading = self._read()
            if reading is not None:
                self.readings += 1
                self.frontiers.add((reading.generation, reading.seq))
                self.wrong += [
                    f"{self._store} at seq {reading.seq}, generation {reading.generation}: {each}"
                    for each in findings(reading.state)
                ]

    def close(self) -> None:
        self._over.set()
        self.join()


class World(Copies):
    """All parts of one campaign; `close` leaves nothing running."""

    def __init__(
        self, new: NewPipeline, stack: LocalStack, copied: Database, folder: Path, seed: int
    ) -> None:
        """`copied` is an empty database, which a follower writes to."""
        super().__init__(folder, random.Random(f"{seed}/followers"))
        self.stack = stack
        ends = stack.up(["redis", "opensearch"])
        port = stack["opensearch"].port
        assert ends.redis_url
        assert ends.opensearch_url
        assert port
        self.http = HttpProxy(port, seed)
        self.mirrors = folder / "mirrors"
        stores: dict[str, dict[str, Any]] = {
            "mirror": {"delta": {"path": str(self.mirrors)}},
            "cache": {"redis": {"url": ends.redis_url}},
            "search": {"opensearch": {"url": self.http.url}},
            "copy": {"sql": {"url": url_of(copied)}},
            "file": {"sql": {"url": f"sqlite:///{folder / 'copy.db'}"}},
            "stream": {"topic": {}},
        }
        self.line = new(
            DDL,
            batch={"max_wait_ms": 30},
            source={"tables": ["public.*", f"{follower_types.SCHEMA}.*"]},
            snapshot={"mode": "initial", "runner": "local"},
            followers={
                name: {"max_events": _MAX_EVENTS, **store} for name, store in stores.items()
            },
        )
        with self.line.database.connect() as connection:
            follower_types.make(connection)
        self.line.set_up()
        prefix = self.line.config.prefix
        self.redis = Redis(ends.redis_url, prefix, "cache")
        self.search = OpenSearch(ends.opensearch_url, prefix, "search")
        self.delta = Delta(self.mirrors)
        self.postgres = Postgres(copied.dsn)
        self.sqlite = Sqlite(folder / "copy.db")
        self.topics = Topics(self.line.bootstrap, f"{prefix}-stream")
        self.watches = [
            StoreWatcher("redis", self.redis.read),
            StoreWatcher("opensearch", self.search.read),
            StoreWatcher("postgres", self.postgres.read),
            StoreWatcher("sqlite", self.sqlite.read),
            StoreWatcher("topics", self.topics.read),
        ]

    # -- the daemon and the followers -----------------------------------------------------------

    def begin(self) -> None:
        """Start the daemon, the followers and the watchers."""
        self.line.start()
        self.follow()
        for watch in self.watches:
            watch.start()

    def repair(self) -> None:
        """Repair everything, and continue with one copy without failpoints."""
        self.http.repair()
        self.stack.up(["postgres", "kafka", "redis", "opensearch"])
        self.leave_one()

    # -- what must hold -------------------------------------------------------------------------

    def source(self) -> State:
        """Return what the database holds now."""
        state: State = {table: [] for table in TABLES}
        with psycopg.connect(self.line.database.dsn) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            for table, row in database_rows(connection):
                state[table].append(row)
        return state

    def converged(self) -> dict[str, list[str]]:
        """Wait until each store has the newest transaction; return by store how they differ."""
        source = self.source()
        (clock,) = source["clock"]
        stores: dict[str, Callable[[], Reading | None]] = {
            "delta": self.delta.read,
            "redis": self.redis.read,
            "opensearch": self.search.read,
            "postgres": self.postgres.read,
            "sqlite": self.sqlite.read,
            # Another reader than the watcher's, which is in its thread.
            "topics": Topics(self.line.bootstrap, f"{self.line.config.prefix}-stream").read,
        }
        self.delta.forget()
        reported = {}
        for name, read in stores.items():
            newest: Reading | None = None

            def there(read: Callable[[], Reading | None] = read) -> bool:
                nonlocal newest
                self.look()
                newest = read()
                return newest is not None and newest.state["clock"] == [clock]

            try:
                wait_until(there, f"{name} is not there", CONVERGE_SECONDS, pause=0.5)
            except pytest.fail.Exception:
                print(self.copies[0].log[-SHOWN_CHARACTERS:])  # noqa: T201 - why it is not
                raise
            assert newest is not None
            reported[name] = [*differences(newest.state, source), *findings(newest.state)]
        return reported

    def wrong_types(self) -> list[str]:
        """Return where stores differ from what is documented, in the table of all types."""
        config, name = self.line.config, f"{follower_types.SCHEMA}.every"
        client, prefix = self.redis.client, config.prefix
        cached = [orjson.loads(client.get(each)) for each in client.keys(f"{prefix}:{name}:*")]
        query = {"size": 1_000, "query": {"match_all": {}}}
        found = requests.post(f"{self.search.url}/{prefix}-{name}/_search", json=query, timeout=30)
        sources = [each["_source"] for each in orjson.loads(found.content)["hits"]["hits"]]
        topics = Topics(self.line.bootstrap, f"{prefix}-stream")
        wait_until(lambda: topics.read() and topics.rows(name), "the topic has no rows")
        return [
            *follower_types.wrong_json("redis", {each["id"]: each for each in cached}, config),
            *follower_types.wrong_json("opensearch", {e["id"]: e for e in sources}, config),
            *follower_types.wrong_json("topics", {e["id"]: e for e in topics.rows(name)}, config),
            *follower_types.wrong_mirror(self.mirrors, config),
        ]

    def wrong(self) -> Iterator[str]:
        """Yield what watchers have seen that no state of the database explains."""
        for watch in self.watches:
            yield from watch.wrong

    def close(self) -> None:
        for watch in self.watches:
            if watch.is_alive():
                watch.close()
        self.end_copies()
        self.http.close()
