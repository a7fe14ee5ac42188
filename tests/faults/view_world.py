"""Views of every supported kind in Delta, Redis and Postgres, by the follower's real processes.

Delta has all views; each is in Redis or in Postgres, too, and two are in both. Every frontier of
Delta's is read; Redis and Postgres are read all the time, and every state that was seen is kept.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import psycopg
import redis
from psycopg.rows import dict_row

from cdc.events import LSN
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.faults.follower_copies import SHOWN_CHARACTERS, Copies
from tests.faults.follower_stores import Delta, redis_state
from tests.faults.view_history import ALL, CLOCK, DDL, History, Reading
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.servers import Database
from tests.fixtures.store_postgres import url_of

if TYPE_CHECKING:
    from cdc.playground.servers.stack import LocalStack

# A cut of all views in three stores takes a minute of two processors, and a busy machine has less.
_CONVERGE_SECONDS: Final = 2_700.0
_LOOK_SECONDS: Final = 0.5
_SECONDS: Final = 30.0
_NOT_COMPILED: Final = (
    "spark.sql.codegen.wholeStage false\nspark.sql.codegen.factoryMode NO_CODEGEN\n"
)
# One copy of so many compiles queries, as it is for users.
_COMPILED_OF: Final = 6
_NAMES: Final = [name for name in ALL if name != CLOCK]


class DeltaViews:
    """Every frontier that the views in Delta have had."""

    def __init__(self, path: Path, views: list[str]) -> None:
        self._path, self._views = path, views
        self._seen: set[tuple[int, int]] = set()

    def newest(self) -> Reading | None:
        rows = self._frontiers()
        return self._at(rows[-1]) if rows else None

    def new(self) -> list[Reading]:
        """Return the states that were not returned before."""
        found = [
            row for row in self._frontiers() if (row["generation"], row["seq"]) not in self._seen
        ]
        self._seen |= {(row["generation"], row["seq"]) for row in found}
        return [self._at(row) for row in found]

    def _frontiers(self) -> list[dict[str, Any]]:
        rows = Delta(self._path).frontiers()
        return sorted(rows, key=lambda row: (row["generation"], row["seq"], row["lsn"]))

    def _at(self, row: dict[str, Any]) -> Reading:
        places = [f"views.{view}" for view in self._views]
        found = read_as_of_arrow(str(self._path), places, lsn=LSN(row["lsn"]))
        at = found.applied
        assert (at.generation, at.seq) == (row["generation"], row["seq"])
        views = {
            view: found.tables[place].to_pylist()
            for view, place in zip(self._views, places, strict=True)
        }
        return Reading("delta", at.generation, at.seq, LSN(at.lsn), views)


class RedisViews:
    """A follower's keys, read in one moment."""

    def __init__(self, url: str, prefix: str, follower: str, views: list[str]) -> None:
        self.client: Any = redis.Redis.from_url(url, socket_timeout=_SECONDS, retry=None)
        self._prefix, self._main, self._views = prefix, f"{prefix}:cdc:{follower}", views

    def newest(self) -> Reading | None:
        """Return the state; None where it is at no frontier."""
        found = redis_state(self.client, self._main, f"{self._prefix}:views.*")
        if found is None:
            return None
        reported, rows = found
        views: dict[str, list[dict[str, Any]]] = {view: [] for view in self._views}
        for key, value in rows:
            view = key.decode().removeprefix(f"{self._prefix}:views.").partition(":")[0]
            if view != "definitions":
                views[view].append(orjson.loads(value))
        generation, seq = int(reported[b"generation"]), int(reported[b"seq"])
        return Reading("redis", generation, seq, LSN.parse(reported[b"lsn"].decode()), views)


class PostgresViews:
    """A follower's tables, read in one transaction."""

    def __init__(self, dsn: str, views: list[str]) -> None:
        self._dsn, self._views = dsn, views

    def newest(self) -> Reading | None:
        """Return the state; None before the first cut."""
        query = "SELECT generation, seq, lsn FROM lockstep_frontiers"
        try:
            with psycopg.connect(self._dsn, row_factory=dict_row) as connection:
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                applied = connection.execute(query).fetchone()
                if applied is None or applied["seq"] is None:
                    return None
                views = {
                    view: connection.execute(f'SELECT * FROM views."{view}"'.encode()).fetchall()
                    for view in self._views
                }
        except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
            return None
        lsn = LSN.parse(applied["lsn"])
        return Reading("postgres", applied["generation"], applied["seq"], lsn, views)


class ViewWatcher(threading.Thread):
    """Reads a store over and over; keeps every state, and what two readings contradict in."""

    def __init__(self, name: str, read: Callable[[], Reading | None]) -> None:
        super().__init__(name=f"watch views in {name}", daemon=True)
        self.store, self._read = name, read
        self._over, self._lock = threading.Event(), threading.Lock()
        self._states: dict[tuple[int, int], str] = {}
        self._new = list[Reading]()
        self.wrong = list[str]()
        self.readings = 0

    def run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            reading = self._read()
            if reading is not None:
                self.take(reading)

    def take(self, reading: Reading) -> None:
        """Keep a state, unless it is known."""
        rows = repr({name: sorted(map(repr, rows)) for name, rows in reading.views.items()})
        with self._lock:
            self.readings += 1
            at = (reading.generation, reading.seq)
            if at not in self._states:
                self._new.append(reading)
            elif self._states[at] != rows:
                self.wrong.append(f"{reading.store} has had two states at seq {reading.seq}")
            self._states[at] = rows

    def new(self) -> list[Reading]:
        """Return the states that were not returned before."""
        with self._lock:
            found, self._new = self._new, []
        return found

    def close(self) -> None:
        self._over.set()
        self.join()


class ViewWorld(Copies):
    """All parts of the campaign; `close` leaves nothing running."""

    def __init__(
        self,
        new: NewPipeline,
        stack: LocalStack,
        copied: Database,
        folder: Path,
        seed: int,
        names: Sequence[str] = _NAMES,
    ) -> None:
        """`copied` is an empty database, which a follower writes to; `names`: only these views."""
        super().__init__(folder, random.Random(f"{seed}/views"))
        url = stack.up(["redis"]).redis_url
        assert url
        lake, views = folder / "lake", folder / "views"
        # What one view names must be declared, not in the same store.
        cached, copied_views = [*names[::2], CLOCK], [*names[1::2], *names[:4:2], CLOCK]
        self.line = new(
            *DDL,
            batch={"max_wait_ms": 30},
            views={
                name: {"sql": view.sql, "key": list(view.key), "refresh": view.refresh}
                for name, view in ALL.items()
            },
            followers={
                "lake": {"delta": {"path": str(lake)}},
                "answers": {
                    "mirror": "lake",
                    "views": [*names, CLOCK],
                    "delta": {"path": str(views)},
                },
                "cache": {"mirror": "lake", "views": cached, "redis": {"url": url}},
                "copy": {
                    "mirror": "lake",
                    "views": copied_views,
                    "sql": {"url": url_of(copied)},
                },
            },
        )
        prefix = self.line.config.prefix
        self.delta = DeltaViews(views, [*names, CLOCK])
        self.redis = RedisViews(url, prefix, "cache", cached)
        self.postgres = PostgresViews(copied.dsn, copied_views)
        self.watches = [
            ViewWatcher("redis", self.redis.newest),
            ViewWatcher("postgres", self.postgres.newest),
        ]
        self.views = len(names) + 1
        self.history = History(self.line.database)

    def environment(self) -> dict[str, str]:
        """Let most copies not compile their queries, which takes longer than running them."""
        conf = self.folder / "spark"
        conf.mkdir(exist_ok=True)
        (conf / "spark-defaults.conf").write_text(_NOT_COMPILED)
        return {} if self._started % _COMPILED_OF == 0 else {"SPARK_CONF_DIR": str(conf)}

    def begin(self) -> None:
        """Start the daemon, the followers and the watchers."""
        self.line.start().wait_ready()
        self.follow()
        for watch in self.watches:
            watch.start()

    def converged(self) -> None:
        """Wait until each store has the newest transaction, and has been read there."""
        newest = len(self.history.transactions)
        for store in (self.delta, self.redis, self.postgres):
            found: Reading | None = None

            def there(read: Callable[[], Reading | None] = store.newest) -> bool:
                nonlocal found
                self.look()
                found = read()
                return found is not None and found.transaction == newest

            try:
                what = f"{type(store).__name__} is not at transaction {newest}"
                wait_until(there, what, _CONVERGE_SECONDS, pause=0.5)
            except BaseException:
                print(self.copies[0].log[-SHOWN_CHARACTERS:])  # noqa: T201 - why it is not
                raise
            for watch in self.watches:
                if found is not None and watch.store == found.store:
                    watch.take(found)

    def readings(self) -> list[Reading]:
        """Return the states of all stores that were not returned before."""
        return [*self.delta.new(), *(each for watch in self.watches for each in watch.new())]

    def close(self) -> None:
        for watch in self.watches:
            if watch.is_alive():
                watch.close()
        self.end_copies()
