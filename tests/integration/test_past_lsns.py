"""At random LSNs of a workload every store can be filled with what the source had there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from threading import Event, Lock, Thread

import psycopg
import pytest
import redis

from cdc.events import LSN
from cdc.operate.status import read_status
from cdc.source.export import Export
from lockstep.jobs.compacting.restoring import Restoring, start_of
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.generations.rebuilding import Rebuild
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.seeds import first_seed
from tests.fixtures.store_sqlite import SqliteStore
from tests.integration.test_bootstrap import TABLES, Past, State, _plain

STATES = int(os.environ.get("LOCKSTEP_PAST_STATES", "3"))
_MOST_WRITES = 25  # between two states


class Workload:
    """A client that writes without pause: rows, keys, large values; DDL and truncates, too."""

    def __init__(self, archived: Archived, chance: Random, pause_seconds: float = 0.0) -> None:
        self._archived, self._pipeline, self._chance = archived, archived.pipeline, chance
        self._pause_seconds = pause_seconds
        # Only at a frontier can a store be filled, and not each transaction ends at one. So none
        # is written from a snapshot's export until the log has a frontier there.
        self._writing = Lock()
        self.writes = self._columns = 0
        self._stopping = Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                with self._pipeline.database.connect() as connection:
                    while not self._stopping.is_set():
                        with self._writing:
                            self._write(connection)
                        self._stopping.wait(self._pause_seconds)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()
        assert not failed, failed

    def _write(self, connection: psycopg.Connection) -> None:
        roll, low = self._chance.random(), self._chance.randint(0, 200)
        if roll < 0.03:
            self._columns += 1
            added = f"ALTER TABLE users ADD COLUMN c{self._columns} text DEFAULT 'd'"
            query = f"{added}; UPDATE users SET name = 'ddl' WHERE id % 9 = 0"
            connection.execute(query.encode())
            # A daemon that lags can't know the older rows' value once there is another column.
            self._archived.log_reach()
        elif roll < 0.06:
            table = self._chance.choice(["quiet", "quiet", "users"])
            connection.execute(f"TRUNCATE {table}".encode())
        else:
            size = 150_000 if roll < 0.1 else 3_000 if roll < 0.4 else 5
            connection.execute(
                f"INSERT INTO users SELECT g, 'n', repeat(md5(random()::text), {size} / 32)"
                f" FROM generate_series({low}, {low + 4}) g ON CONFLICT (id) DO UPDATE SET"
                f" name = 'again'; UPDATE users SET id = -{self.writes + 1} WHERE id = {low + 1};"
                f" UPDATE users SET name = 'u{self.writes}' WHERE id % 7 = {low % 7};"
                f" DELETE FROM users WHERE id % 50 = {low % 50};"
                f" INSERT INTO quiet SELECT coalesce(max(id), 0) + 1, 'q' FROM quiet".encode()
            )
        self.writes += 1

    def has_written(self, many: int) -> bool:
        return self.writes >= many

    def state(self) -> tuple[LSN, State]:
        """Return a frontier's LSN, and what a snapshot that was exported there sees."""
        export, found = Export(self._pipeline.config), State()
        with closing(export), self._writing:
            export.create()
            with self._pipeline.database.connect() as connection:
                connection.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ")
                connection.execute(f"SET TRANSACTION SNAPSHOT '{export.snapshot}'".encode())
                for table in ("users", "quiet"):
                    query = f"SELECT id, row_to_json(t) FROM {table} t".encode()
                    found[table] = dict(connection.execute(query).fetchall())
                connection.execute(b"COMMIT")
            frontier = self._archived.log_reach()
        assert frontier >= export.lsn
        return frontier, found


@pytest.mark.commit("a state of the past in each store")
@pytest.mark.long("more states", again=True)
@pytest.mark.timeout(600 + 60 * STATES)
def test_each_store_is_filled_with_the_state_of_a_random_lsn(
    pipeline: NewPipeline,
    redis_client: redis.Redis,
    redis_url: str,
    opensearch_url: str,
    tmp_path: Path,
) -> None:
    """From base and archive alone: before, between and after bases; nothing is in the topics."""
    made = pipeline(
        *TABLES,
        followers={
            "cache": {"redis": {"url": redis_url}},
            "search": {"opensearch": {"url": opensearch_url}},
            "mirror": {"delta": {"path": str(tmp_path / "lake")}},
            "copy": {"sql": {"url": f"sqlite:///{tmp_path}/copy.db"}},
        },
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0, "bases_kept": 5},
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    kept, seed = Past(Archived(made), tmp_path, redis_client), first_seed("LOCKSTEP_PAST_STATES")
    workload, states = Workload(kept.archived, Random(seed)), list[tuple[LSN, State]]()
    with workload.running():
        for number in range(STATES):
            least = workload.writes + Random(seed + number).randint(2, _MOST_WRITES)
            wait_until(partial(workload.has_written, least), "the workload is stalled")
            states.append(workload.state())
            if number in {STATES // 3, 2 * STATES // 3}:
                kept.archived.reach()
                Compaction(made.config, None).run()
    kept.archived.reach()
    assert not read_status(made.config).incomplete_topics
    made.daemon.term()
    kept.forget()
    assert any(rows["users"] for _, rows in states)
    for lsn, wanted in states:
        for name in ("cache", "search", "mirror"):
            rebuild = kept.rebuild(name)
            assert isinstance(rebuild, Rebuild)
            outcome = rebuild.as_of(lsn)
            found = kept.at(name, outcome.generation)
            assert differences(found, wanted) == {}, (name, lsn, seed)
            kept.sink(name).drop(outcome.generation)  # type: ignore[attr-defined]
        assert differences(_in_sqlite(kept, lsn), wanted) == {}, ("copy", lsn, seed)


def differences(found: State, wanted: State) -> dict[tuple[str, int], tuple[object, object]]:
    """Return the rows that are not the same in two states, each with the columns that differ."""
    differ: dict[tuple[str, int], tuple[object, object]] = {}
    for table in wanted:
        for key in found[table].keys() | wanted[table].keys():
            mine, its = found[table].get(key, {}), wanted[table].get(key, {})
            names = {each for each in mine.keys() | its.keys() if mine.get(each) != its.get(each)}
            if names or mine.keys() != its.keys():
                differ[table, key] = (
                    {each: mine.get(each) for each in names} if mine else None,
                    {each: its.get(each) for each in names} if its else None,
                )
    return differ


def _in_sqlite(kept: Past, lsn: LSN) -> State:
    """Return what a new database of the follower of one generation has, as of an LSN."""
    (kept.folder / "copy.db").unlink(missing_ok=True)
    start = start_of(kept.config, "copy", lsn)
    with closing(kept.sink("copy")) as sink:
        sink.open()
        Restoring(kept.config, "copy", start, None, print).fill(sink, 1, joins=False)
    store, found = SqliteStore(kept.folder / "copy.db"), State()
    schema = store.query("SELECT name FROM sqlite_schema WHERE type = 'table'")
    present = {row["name"] for row in schema}
    for table in ("users", "quiet"):
        rows = store.query(f"SELECT * FROM {table}") if table in present else []
        found[table] = {row["id"]: _plain(row) for row in rows}
    return found
