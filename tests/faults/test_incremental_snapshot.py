"""Incremental snapshots while the daemon dies at any step of a chunk, or commits stay invisible."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from cdc import failpoints
from cdc.operate.commands import snapshots, tables
from cdc.snapshot.incremental import topic as live_topic
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import Load
from tests.integration.test_incremental_snapshot import begin, found, wait_state
from tests.integration.test_masks import caught_up, everything

# TOAST that an update does not send, and rows that the log has only from a snapshot.
_TABLES = (
    "CREATE TABLE users (id bigint PRIMARY KEY, n int NOT NULL, name text, big text)",
    "ALTER TABLE users ALTER big SET STORAGE EXTERNAL",
    "INSERT INTO users SELECT i, 1, 'u', repeat(md5(i::text), 80) FROM generate_series(1, 6000) i",
)
_OTHERS = (
    "CREATE TABLE pairs (b int, n int NOT NULL, a text, v numeric(12,2), PRIMARY KEY (a, b))",
    "CREATE TABLE full_rows (id int PRIMARY KEY, n int NOT NULL, big text)",
    "CREATE TABLE lines (id int, n int NOT NULL, note text, big text)",
    "CREATE TABLE named (id int PRIMARY KEY, n int NOT NULL, code text NOT NULL, at timestamptz)",
    *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("full_rows", "lines")),
    "CREATE SCHEMA elsewhere",
    "CREATE TABLE elsewhere.unpublished (id int, n int)",
    "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY, n int)",
)

_COMMITTING = "SELECT count(*)::int FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


def _started(pipeline: NewPipeline) -> PipelineUnderTest:
    return pipeline(*_TABLES, *_OTHERS, batch={"max_events": 800, "max_wait_ms": 50})


@pytest.mark.commit("each step of a chunk")
def test_killed_at_every_step_of_a_chunk_it_continues(pipeline: NewPipeline) -> None:
    """Before and after each watermark, and around the commit that carries rows and progress."""
    line = _started(pipeline)
    (number,) = snapshots.start(line.config, ["public.users"])
    places = [*failpoints.CHUNK_NAMES, "before_commit", "after_flush", "after_commit"]
    with Load(line.database.dsn, seed=11, truncates=0.0) as load:
        for place in places:
            record = found(line, number)
            assert record is None or record.active, "it must not be over before the last place"
            daemon = line.start(f"{place}:2")
            wait_until(lambda: daemon.process.poll() is not None, f"it never came to {place}")  # noqa: B023 - called at once
            assert daemon.process.returncode == -signal.SIGKILL
        line.start().wait_ready()
        assert wait_state(line, number).rows > 0
        seen = load.commits
        wait_until(lambda: load.commits > seen + 30, "no load")
    converge(line.config)


@pytest.mark.long("kills at every step of a chunk are in the first tier")
def test_a_commit_in_the_log_that_no_select_sees_yet_is_waited_for(
    killable_pipeline: NewPipeline,
) -> None:
    """Flushed, decoded, and not visible."""
    line = _started(killable_pipeline)
    line.start().wait_ready()
    with missing_standby(line):
        writer = threading.Thread(
            target=_write, args=(line, "UPDATE users SET n = 77, name = 'late' WHERE id = 5")
        )
        writer.start()
        topic = f"{line.config.prefix}.public.users"
        wait_until(lambda: line.resume()[1].seq >= 1, f"nothing came to {topic}")
        assert line.query("SELECT n FROM users WHERE id = 5") == (1,), "it is not visible"
        number = begin(line, "public.users")
        wait_until(lambda: waits(line, number), "it does not say what it waits for")
        record = found(line, number)
        assert record is not None
        assert record.rows == 0, "no row may be published as it was before"
    writer.join()
    wait_state(line, number)
    converge(line.config)


def test_a_table_whose_addition_is_decoded_and_not_visible_yet_is_waited_for(
    killable_pipeline: NewPipeline,
) -> None:
    """Its command is in the transaction that publishes it; another that is absent is refused."""
    line = _started(killable_pipeline)
    line.start().wait_ready()
    line.database.execute(
        "CREATE TABLE late (id int PRIMARY KEY, n int)",
        "INSERT INTO late SELECT i, i FROM generate_series(1, 500) i",
    )
    with missing_standby(line):
        adding = threading.Thread(target=tables.add, args=(line.config, ["public.late"]))
        adding.start()
        wait_until(
            lambda: any(waits(line, each.id) for each in live_topic.read(line.config)),
            "it does not say what it waits for",
        )
        (record,) = live_topic.read(line.config)
        assert "public.late is not published yet" in (record.why or "")
        assert record.active
    adding.join()
    assert wait_state(line, record.id).rows == 500
    refused = begin(line, "public.nowhere")
    assert "does not exist" in (wait_state(line, refused, "failed").why or "")
    wait_state(line, begin(line, "public.users"))
    converge(line.config)


def test_a_partition_that_no_lookup_sees_yet_shows_nothing_that_its_root_hides(
    killable_pipeline: NewPipeline,
) -> None:
    """It is created with its first row, in one transaction: what it is a part of is looked up."""
    line = killable_pipeline(
        "CREATE TABLE split (id int PRIMARY KEY, secret text) PARTITION BY RANGE (id)",
        "CREATE TABLE split_1 PARTITION OF split FOR VALUES FROM (0) TO (10)",
        source={"partitions": "leaf"},
        tables={"public.split": {"mask": {"secret": {"fixed": "x"}}}},
    )
    line.start().wait_ready()
    made = (
        "BEGIN; CREATE TABLE split_2 PARTITION OF split FOR VALUES FROM (10) TO (20);"
        " INSERT INTO split VALUES (11, 'whispered'); COMMIT"
    )
    with missing_standby(line):
        writer = threading.Thread(target=_write, args=(line, made))
        writer.start()
        wait_until(lambda: line.query(_COMMITTING)[0] >= 1, "it does not wait")
        time.sleep(2.0)  # far longer than a lookup takes
        assert line.resume()[1].seq == 0, "its row is in the log"
    writer.join()
    caught_up(line, 1)
    assert b"whispered" not in everything(line)


def waits(line: PipelineUnderTest, number: str) -> bool:
    record = found(line, number)
    return record is not None and "waits for transaction" in (record.why or "")


@contextmanager
def missing_standby(line: PipelineUnderTest) -> Iterator[None]:
    """Make every commit wait for a synchronous standby that does not exist."""
    with line.database.connect() as admin:

        def standby(name: str) -> None:
            admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
            admin.execute("SELECT pg_reload_conf()")
            wait_until(
                lambda: admin.execute("SHOW synchronous_standby_names").fetchone() == (name,),
                "the setting does not come",
            )
            # The checkpointer makes commits wait, once it has read the setting, too.
            admin.execute("CHECKPOINT")

        admin.execute("SET synchronous_commit = local")
        standby("nobody")
        try:
            yield
        finally:
            standby("")


def _write(line: PipelineUnderTest, statement: str) -> None:
    with psycopg.connect(line.database.dsn, autocommit=True) as connection:
        connection.execute(statement.encode())
