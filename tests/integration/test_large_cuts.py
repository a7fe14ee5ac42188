"""Large cuts of histories, rows without a key and altered tables: what small cuts write."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from random import Random
from typing import TYPE_CHECKING

import psutil
import pytest

from cdc import failpoints
from cdc.errors import Exit, UnavailableError
from lockstep.jobs.apply import large
from lockstep.jobs.apply.divided import Divided
from lockstep.jobs.cuts import pieces
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Altered, Changes
from lockstep.sinks.delta.layout import COMMIT_LSN, COMMITTED_AT, SEQ
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.followed import Followed, small_cuts
from tests.fixtures.seeds import first_seed
from tests.integration.test_following import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

HISTORY = ["public.users", "public.lines"]
# Each a cut of its own. Bodies are not sent where they stay, except to other keys.
WRITES = (
    (
        "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) FROM generate_series(1, 200) g",
        "INSERT INTO lines SELECT g % 7, g, 'n' || g FROM generate_series(1, 200) g",
        "INSERT INTO clicks SELECT g % 50, 'c' FROM generate_series(1, 200) g",
    ),
    (
        "UPDATE users SET name = name || 'u'",
        "UPDATE users SET name = name || 'v' WHERE id % 3 = 0",
        "UPDATE lines SET no = no + 10 WHERE id % 5 = 0",
        "DELETE FROM users WHERE id % 10 = 0",
        "DELETE FROM lines WHERE id % 4 = 0",
        "INSERT INTO clicks VALUES (1, 'c'), (1, 'd')",
        "DELETE FROM clicks WHERE id % 3 = 0 OR name = 'd'",
        "UPDATE clicks SET name = 'e' WHERE id % 3 = 1",
    ),
    (
        "UPDATE users SET name = 'before' WHERE id % 2 = 0",
        "UPDATE lines SET name = 'before' WHERE id % 2 = 0",
        "TRUNCATE lines",
        "INSERT INTO lines SELECT 1, g, 'between' FROM generate_series(1, 60) g",
        "TRUNCATE lines",
        "INSERT INTO lines SELECT 1, g, 'after' FROM generate_series(1, 60) g",
        "TRUNCATE clicks",
        "INSERT INTO clicks SELECT g, 'after' FROM generate_series(1, 60) g",
        "UPDATE users SET name = 'large', body = repeat('y', 200000) WHERE id = 5",
    ),
    (
        "UPDATE users SET name = 'last'",
        "UPDATE lines SET name = 'last'",
        "UPDATE clicks SET name = repeat('z', 200000) WHERE id < 3",
    ),
)


def versions(path: Path, name: str) -> list[str]:
    """Return every version of a mirror's rows; of equal rows without a key any may be deleted."""
    rows = read_as_of_arrow(str(path), [name]).tables[name]
    if name == "public.clicks":
        rows = rows.drop_columns([SEQ, COMMIT_LSN, COMMITTED_AT])
    return sorted(str(sorted(row.items())) for row in rows.to_pylist())


# Floats of which Postgres takes 0 and -0 for one key, and tables that the cut alters between rows:
# columns come, get other names and types, and one takes the name of another.
PRICES = "CREATE TABLE prices (at float8, n numeric(6,2), name text, PRIMARY KEY (at, n))"
ALTERED_HISTORY = ["public.users", "public.prices"]
ALTERING = (
    (
        "INSERT INTO users SELECT g, 'n' || g, repeat('x', 3000) FROM generate_series(1, 100) g",
        "INSERT INTO lines SELECT g % 7, g, 'n' || g FROM generate_series(1, 100) g",
        "INSERT INTO clicks SELECT g % 50, 'c' FROM generate_series(1, 100) g",
        "INSERT INTO prices SELECT g / 2.0, g, 'n' || g FROM generate_series(1, 60) g",
        "INSERT INTO prices VALUES ('0', 0, 'zero'), ('NaN', 'NaN', 'odd'), ('-inf', 1.5, 'odd')",
    ),
    (
        "UPDATE users SET name = 'before' WHERE id % 3 = 0",
        "UPDATE lines SET name = 'before' WHERE no % 3 = 0",
        "UPDATE clicks SET name = 'before' WHERE id % 3 = 0",
        "ALTER TABLE users RENAME name TO called; ALTER TABLE users ADD note text DEFAULT 'd'",
        "ALTER TABLE lines RENAME no TO number; ALTER TABLE lines ALTER id TYPE bigint",
        "ALTER TABLE clicks RENAME name TO label; ALTER TABLE clicks ADD n int DEFAULT 7",
        "UPDATE users SET called = called || 'after' WHERE id % 2 = 0",
        "UPDATE users SET note = NULL WHERE id % 5 = 0",
        "DELETE FROM users WHERE id % 7 = 0",
        "UPDATE lines SET number = number + 10 WHERE id % 5 = 0",
        "DELETE FROM lines WHERE number = 1",
        "UPDATE clicks SET n = 8 WHERE id % 2 = 0",
        "DELETE FROM clicks WHERE id = 5",
        "UPDATE prices SET at = '-0', name = 'minus' WHERE at = 0",
        "UPDATE prices SET name = name || 'u'",
        "UPDATE prices SET at = '0', name = 'plus' WHERE at = 0",
        "DELETE FROM prices WHERE at = 'NaN'; INSERT INTO prices VALUES ('NaN', 'NaN', 'new')",
    ),
    (
        "UPDATE users SET called = 'before'",
        "UPDATE prices SET name = 'before' WHERE n > 30",
        "ALTER TABLE users DROP note; ALTER TABLE users ADD note int DEFAULT 3",
        "ALTER TABLE prices RENAME at TO price; ALTER TABLE prices ALTER n TYPE numeric(8,2)",
        "ALTER TABLE lines ALTER number TYPE text",
        "UPDATE users SET note = 4 WHERE id % 4 = 0",
        "UPDATE prices SET name = 'after', n = n + 100 WHERE n < 20",
        "UPDATE prices SET price = '-0' WHERE price = 0",
        "UPDATE lines SET name = 'after'",
    ),
)


@pytest.mark.slow
def test_executors_write_what_small_cuts_write(
    spark: SparkSession,
    pipeline: NewPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With truncates, dead letters and unsent values; the driver gathers no change.

    A follower that ends between the tasks' files and their commit repeats the cut.
    """
    made = followed_twice(pipeline, tmp_path, monkeypatch, HISTORY, *TABLES)
    expect_alike(Followed(made, spark), tmp_path, monkeypatch, WRITES, killed_at=2)


@pytest.mark.slow
def test_executors_write_tables_that_the_cut_alters(
    spark: SparkSession,
    pipeline: NewPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And histories whose keys are floats and numbers with decimals; the driver gathers nothing."""
    made = followed_twice(pipeline, tmp_path, monkeypatch, ALTERED_HISTORY, *TABLES, PRICES)
    expect_alike(Followed(made, spark), tmp_path, monkeypatch, ALTERING, killed_at=1)
    users = read_as_of_arrow(str(tmp_path / "large"), ["public.users"]).tables["public.users"]
    assert {"called", "note"} < {*users.column_names}
    assert "name" not in users.column_names
    assert {3, 4} < {*users["note"].to_pylist()}, "3 is in no event"


@pytest.mark.slow
def test_nothing_is_committed_unless_tasks_take_all_events_that_were_counted(
    spark: SparkSession,
    pipeline: NewPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when files of the shuffle are lost, and read again from a log that has fewer by then."""
    made = followed_twice(pipeline, tmp_path, monkeypatch, [], *TABLES)
    everyone = Followed(made, spark)
    everyone.follow("large", "small")
    before = everyone.sink("large").open()
    assert before is not None
    made.database.execute(*WRITES[0])
    until, counted = everyone.lsn(), Divided.events
    with monkeypatch.context() as patched:
        patched.setattr(Divided, "events", lambda found, topic: counted(found, topic) + 1)
        error = everyone.run("large", until).take_turn()
    assert isinstance(error, UnavailableError), error
    assert "others had read before" in error.what
    after = everyone.sink("large").open()
    assert after is not None
    assert after.applied == before.applied
    everyone.follow("large", "small")
    for name in ("public.users", "public.lines"):
        assert versions(tmp_path / "large", name) == versions(tmp_path / "small", name)


@pytest.mark.slow
def test_a_cut_is_the_same_if_workers_are_killed_meanwhile(
    spark: SparkSession,
    pipeline: NewPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark tries a task up to four times, so it bears three kills wherever they are."""
    made = followed_twice(pipeline, tmp_path, monkeypatch, HISTORY, *TABLES)
    everyone = Followed(made, spark)
    everyone.follow("large", "small")
    chance, killed = Random(first_seed()), list[int]()
    for statements in WRITES:
        with made.database.connect() as connection, connection.transaction():
            for each in statements:
                connection.execute(each.encode())
        with killing_workers(spark, chance, 3, killed):
            everyone.follow("large")
        everyone.follow("small")
        for name in sorted(each.name for each in (tmp_path / "small").glob("public.*")):
            assert versions(tmp_path / "large", name) == versions(tmp_path / "small", name)
    assert killed


@contextmanager
def killing_workers(
    spark: SparkSession, chance: Random, most: int, killed: list[int]
) -> Iterator[None]:
    """Kill the session's Python workers, one at a time and at random moments; list them."""
    jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]
    over = threading.Event()

    def kill() -> None:
        left = most
        while left and not over.wait(chance.uniform(0.05, 0.5)):
            # The children of the daemon that forks them.
            workers = [each for each in jvm.children(recursive=True) if each.ppid() != jvm.pid]
            if workers:
                worker = chance.choice(workers)
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
                    killed.append(worker.pid)
                    left -= 1

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def followed_twice(
    pipeline: NewPipeline,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    history: list[str],
    *tables: str,
) -> PipelineUnderTest:
    """Return a pipeline with a follower of large cuts and one of small ones."""
    small_cuts(monkeypatch, 40)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 25)
    monkeypatch.setattr(large, "SORTED_BYTES", 4_000)
    made = pipeline(
        *tables,
        followers={
            name: {"delta": {"path": str(folder / name), "history": history}, "max_events": most}
            for name, most in (("large", 40), ("small", 100_000))
        },
        log={"kafka": {"message.max.bytes": 60_000}},
    )
    made.start().wait_ready()
    return made


def expect_alike(
    everyone: Followed,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: tuple[tuple[str, ...], ...],
    killed_at: int,
) -> None:
    """Expect both followers to write the same, and the sink of the large cuts to gather nothing."""
    everyone.follow("large", "small")
    gathered: list[str] = []
    write, alter = DeltaSink.write, DeltaSink.alter

    def recorded(sink: DeltaSink, changes: Changes) -> int:
        if changes.changes:
            gathered.append(changes.version.name)
        return write(sink, changes)

    def altered(sink: DeltaSink, its: Altered) -> None:
        gathered.append(its.version.name)
        alter(sink, its)

    for number, statements in enumerate(writes):
        with everyone.pipeline.database.connect() as connection, connection.transaction():
            for each in statements:
                connection.execute(each.encode())
        with monkeypatch.context() as patched:
            patched.setattr(DeltaSink, "write", recorded)
            patched.setattr(DeltaSink, "alter", altered)
            if number == killed_at:
                killed(everyone, patched)
            everyone.follow("large")
        everyone.follow("small")
        for name in sorted(each.name for each in (folder / "small").glob("public.*")):
            assert versions(folder / "large", name) == versions(folder / "small", name)
    assert gathered == []


class Killed(Exception):  # noqa: N818 - no error: the follower's death
    """The follower has died."""


def killed(everyone: Followed, patched: pytest.MonkeyPatch) -> None:
    """Run the follower until the tasks' files are written, and before they are in a commit."""
    until = everyone.lsn()
    reach = failpoints.reach

    def die(point: str) -> None:
        if point == "follow_written":
            raise Killed
        reach(point)

    with patched.context() as dying:
        dying.setattr(failpoints, "reach", die)
        assert everyone.run("large", until).run() == Exit.BUG
