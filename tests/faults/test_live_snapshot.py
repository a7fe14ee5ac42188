"""Incremental snapshots while the daemon dies at any step of a chunk, or commits stay invisible."""

from __future__ import annotations

import signal
import threading

import psycopg

from cdc import failpoints
from cdc.operate.commands import snapshots
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import Load
from tests.integration.test_live_snapshot import begin, found, wait_state

# TOAST that an update does not send, and rows that the log has only from a snapshot.
_TABLES = (
    "CREATE TABLE users (id bigint PRIMARY KEY, n int NOT NULL, name text, big text)",
    "ALTER TABLE users ALTER big SET STORAGE EXTERNAL",
    "INSERT INTO users SELECT i, 1, 'u', repeat(md5(i::text), 80) FROM generate_series(1, 6000) i",
)
_OTHERS = (
    "CREATE TABLE pairs (b int, n int NOT NULL, a text, v numeric(12,2), PRIMARY KEY (a, b))",
    "CREATE TABLE whole (id int PRIMARY KEY, n int NOT NULL, big text)",
    "CREATE TABLE lines (id int, n int NOT NULL, note text, big text)",
    "CREATE TABLE named (id int PRIMARY KEY, n int NOT NULL, code text NOT NULL, at timestamptz)",
    *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("whole", "lines")),
    "CREATE SCHEMA aside",
    "CREATE TABLE aside.unpublished (id int, n int)",
    "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY, n int)",
)


def _begun(pipeline: NewPipeline) -> PipelineUnderTest:
    return pipeline(*_TABLES, *_OTHERS, batch={"max_events": 800, "max_wait_ms": 50})


def test_killed_at_every_step_of_a_chunk_it_goes_on(pipeline: NewPipeline) -> None:
    """Before and after each watermark, and around the commit that carries rows and progress."""
    line = _begun(pipeline)
    (number,) = snapshots.start(line.config, ["public.users"])
    places = [*failpoints.LIVE_NAMES, "before_commit", "after_flush", "after_commit"]
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


def test_a_commit_in_the_log_that_no_select_sees_yet_is_waited_for(
    killable_pipeline: NewPipeline,
) -> None:
    """Synchronous replication to a missing standby: flushed, decoded, and not visible."""
    line = _begun(killable_pipeline)
    line.start().wait_ready()
    with line.database.connect() as admin:

        def standby(name: str) -> None:
            admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
            admin.execute("SELECT pg_reload_conf()")
            wait_until(
                lambda: admin.execute("SHOW synchronous_standby_names").fetchone() == (name,),
                "the setting does not come",
            )

        admin.execute("SET synchronous_commit = local")
        standby("nobody")
        try:
            writer = threading.Thread(
                target=_write, args=(line, "UPDATE users SET n = 77, name = 'late' WHERE id = 5")
            )
            writer.start()
            topic = f"{line.config.prefix}.public.users"
            wait_until(lambda: line.resume()[1].seq >= 1, f"nothing came to {topic}")
            assert line.query("SELECT n FROM users WHERE id = 5") == (1,), "it is not visible"
            number = begin(line, "public.users")

            def waits() -> bool:
                record = found(line, number)
                return record is not None and "waits for transaction" in (record.why or "")

            wait_until(waits, "it does not say what it waits for")
            record = found(line, number)
            assert record is not None
            assert record.rows == 0, "no row may be published as it was before"
        finally:
            standby("")
        writer.join()
    wait_state(line, number)
    converge(line.config)


def _write(line: PipelineUnderTest, statement: str) -> None:
    with psycopg.connect(line.database.dsn, autocommit=True) as connection:
        connection.execute(statement.encode())
