"""A database, a log and eight stores, with a daemon and followers in which to inject faults.

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

from cdc.events import LSN
from cdc.operate.status import read_status
from lockstep.sinks.delta.layout import DELETED
from tests.faults import follower_types
from tests.faults.follower_copies import SHOWN_CHARACTERS, Copies
from tests.faults.follower_http import HttpProxy
from tests.faults.follower_past import NOTED, Past, triggers
from tests.faults.follower_rows import (
    DDL,
    REWRITTEN,
    TABLES,
    TICKS,
    State,
    database_rows,
    differences,
    findings,
)
from tests.faults.follower_stores import (
    Delta,
    OpenSearch,
    Postgres,
    Reading,
    Redis,
    Sqlite,
    Topics,
)
from tests.fixtures.commands import completed
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.servers import Database
from tests.fixtures.store_postgres import url_of

if TYPE_CHECKING:
    from cdc.playground.servers.stack import LocalStack
    from tests.faults.follower_load import FollowerLoad

CONVERGE_SECONDS: Final = 1_200.0
# So that some cuts are of one transaction that is larger than this, and others of many.
_MAX_EVENTS: Final = 2_000
_LOOK_SECONDS: Final = 0.2
# Tables in a round: `shapes` and those that are rewritten, the latter perhaps once more.
_MOST_READ_AGAIN: Final = 1 + 2 * len(REWRITTEN)
# Which rows of two followers' mirrors are those of the database: of a history the valid ones, and
# those that are not marked as deleted.
_HISTORIES: Final = (*NOTED, "clock")
_VALID: Final = dict.fromkeys(_HISTORIES, "_current")
_UNMARKED: Final = dict.fromkeys(TABLES, "coalesce(_deleted, false) = false")


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
        keyed = ["public.*", f"{follower_types.SCHEMA}.*"]
        stores: dict[str, dict[str, Any]] = {
            "mirror": {"delta": {"path": str(self.mirrors)}},
            "past": {
                "tables": ["public.*", TICKS],
                "delta": {
                    "path": str(folder / "past"),
                    "history": [f"public.{name}" for name in _HISTORIES],
                },
            },
            "marked": {
                "tables": ["public.*"],
                "delta": {"path": str(folder / "marked"), "deletes": "soft"},
            },
            "cache": {"redis": {"url": ends.redis_url}},
            "search": {"opensearch": {"url": self.http.url}},
            "copy": {"sql": {"url": url_of(copied)}},
            "file": {"sql": {"url": f"sqlite:///{folder / 'copy.db'}"}},
            "stream": {"topic": {}},
        }
        self.line = new(
            DDL,
            batch={"max_wait_ms": 30},
            source={"tables": [*keyed, TICKS]},
            snapshot={"mode": "initial", "runner": "local"},
            followers={
                name: {"max_events": _MAX_EVENTS, "tables": keyed, **store}
                for name, store in stores.items()
            },
        )
        with self.line.database.connect() as connection:
            follower_types.make(connection)
            connection.execute(triggers().encode())
        self.line.set_up()
        prefix = self.line.config.prefix
        self.redis = Redis(ends.redis_url, prefix, "cache")
        self.search = OpenSearch(ends.opensearch_url, prefix, "search")
        self.delta = Delta(self.mirrors)
        self.past = Delta(folder / "past", _VALID)
        self.marked = Delta(folder / "marked", _UNMARKED)
        self._past = Past()
        self.postgres = Postgres(copied.dsn)
        self.sqlite = Sqlite(folder / "copy.db")
        self.topics = Topics(self.line.bootstrap, f"{prefix}-stream")
        self.load: FollowerLoad | None = None  # of the current round
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
        with self.line.database.connect() as connection:
            self._past.begin(connection)
        self.line.start()
        self.follow()
        for watch in self.watches:
            watch.start()

    def repair(self) -> None:
        """Repair everything, and continue with one copy without failpoints."""
        self.http.repair()
        self.stack.up(["postgres", "kafka", "redis", "opensearch"])
        self.leave_one()

    def alter(self, *statements: str) -> None:
        """Change the tables that are read again after the round, in one transaction."""
        tables = ", ".join(REWRITTEN)

        def done() -> bool:
            try:
                with psycopg.connect(self.line.database.dsn, connect_timeout=5) as connection:
                    # The load writes to them, too, in any order.
                    connection.execute(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE".encode())
                    for each in statements:
                        connection.execute(each.encode())
            except psycopg.OperationalError:
                return False
            return True

        wait_until(done, f"{tables} are not altered")

    def read_again(self) -> list[str]:
        """Read again the tables whose topics are incomplete; return their names."""
        with psycopg.connect(self.line.database.dsn, autocommit=True) as connection:
            (end,) = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ()
        names: list[str] = []

        def confirmed() -> bool:
            self.look()
            return LSN.parse(self.line.slot()) >= LSN.parse(end)

        wait_until(confirmed, "the log does not have all changes", CONVERGE_SECONDS)
        with self.line.database.connect() as connection:
            self._past.read(connection)
        while incomplete := read_status(self.line.config).incomplete_topics:
            names += [each.name for each in incomplete]
            # Of DDL before a truncate, too, after which nothing is wrong.
            assert len(names) <= _MOST_READ_AGAIN, f"incomplete again: {names}"
            for each in incomplete:
                read = completed(
                    self.line.config_file, "snapshot", each.name, "--replace", "--wait"
                )
                assert read.returncode == 0, f"{each.name}: {read.stderr.decode()}"
                table = each.name.removeprefix("public.")
                if table in NOTED:
                    self._past.read_again(table)
        return names

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
            "past": self.past.read,
            "marked": self.marked.read,
            "redis": self.redis.read,
            "opensearch": self.search.read,
            "postgres": self.postgres.read,
            "sqlite": self.sqlite.read,
            # Another reader than the watcher's, which is in its thread.
            "topics": Topics(self.line.bootstrap, f"{self.line.config.prefix}-stream").read,
        }
        for mirrors in (self.delta, self.past, self.marked):
            mirrors.forget()
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
        reported["versions"] = self._wrong_versions()
        return reported

    def _wrong_versions(self) -> list[str]:
        """Return how histories, and rows that are marked as deleted, differ from what was noted."""
        with self.line.database.connect() as connection:
            self._past.read(connection)
        known, wrong = self._past.transactions(self.past.rows("clock"))
        if wrong:
            return wrong
        frontiers = [row["lsn"] for row in self.marked.frontiers()]
        for table in NOTED:
            wrong += self._past.wrong_history(table, self.past.rows(table), known)
            marked = (row for row in self.marked.rows(table) if row[DELETED])
            wrong += self._past.wrong_deleted(table, marked, known, frontiers)
        return wrong

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
