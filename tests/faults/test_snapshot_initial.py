"""Faults in an initial snapshot: kills between any two steps, rewrites, a zombie, a lost server.

Writers run all the time, and in the end the folded log equals the database.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest

from cdc.config import Config
from cdc.errors import CDCError, Exit, Policy
from cdc.log import reader
from cdc.playground.servers.stack import LocalStack
from cdc.snapshot.initial import handover, topic
from cdc.snapshot.initial.records import SnapshotState
from cdc.source.export import slot_name
from cdc.verify.topics import prove
from tests.fixtures.converge import converge
from tests.fixtures.daemon import Daemon, NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES as LOADED
from tests.fixtures.load import Load
from tests.integration.test_incremental_snapshot import begin, wait_state

# Room for a loaded machine: processes are started again and again here.
_SECONDS = 120.0
_RANGES: dict[str, object] = {
    "mode": "initial",
    "runner": "local",
    "range_bytes": 65_536,
    "max_parallel": 2,
}
_FULL = (
    *LOADED,
    "INSERT INTO users SELECT i, 0, 'old', repeat('x', 300) FROM generate_series(100, 4000) i",
    "INSERT INTO lines SELECT i, 0, 'old', NULL FROM generate_series(1, 500) i",
)


def state(line: PipelineUnderTest) -> SnapshotState:
    found = topic.read_state(line.config)
    assert found is not None
    return found


def rows(daemon: Daemon) -> int:
    return int((daemon.health().get("snapshot") or {}).get("rows", 0))


def _copies(line: PipelineUnderTest, daemon: Daemon, generation: int) -> bool:
    return state(line).generation >= generation and rows(daemon) > 200


def _started_after(line: PipelineUnderTest, generation: int) -> bool:
    return state(line).generation > generation


@pytest.mark.commit("each step of the initial snapshot")
def test_killed_between_any_two_steps_it_ends_with_the_database(pipeline: NewPipeline) -> None:
    """One kill after another on one pipeline, each at another point."""
    line = pipeline(*_FULL, source={"tables": ["public.*"]}, snapshot=_RANGES)
    with Load(line.database.dsn, seed=3, truncates=0) as load:
        wait_until(lambda: load.commits > 10, "nothing is written")
        for point in ("after_export", "after_plan"):
            line.start(point).wait_exit(_SECONDS)
        assert (state(line).stage, state(line).generation) == ("running", 1)
        # Tasks that die again and again still make progress, range by range.
        slow = line.write("slow.yaml", snapshot={**_RANGES, "rows_per_second": 500})
        daemon = line.start("after_range_commit:4", slow)
        wait_until(lambda: "copying again" in daemon.log, "no task was killed", _SECONDS)
        daemon.kill()
        assert state(line).generation == 2
        line.database.execute("DELETE FROM users WHERE id BETWEEN 200 AND 300")
        line.start("after_leftovers").wait_exit(_SECONDS)
        copied = state(line)
        assert (copied.stage, copied.generation) == ("running", 3)
        # Only the end is missing: no new generation is needed.
        line.start("before_handover").wait_exit(_SECONDS)
        line.start("after_handover").wait_exit(_SECONDS)
        assert (state(line).stage, state(line).generation) == ("done", 3)
        line.start().wait_ready(_SECONDS)
        after = load.commits
        wait_until(lambda: load.commits > after + 20, "nothing is written")
    converge(line.config)
    # Rows of all three generations, and the deletes, are in digests.
    proof = prove(line.config)
    assert (proof.findings, proof.undigested) == ((), 0)


@pytest.mark.long("a minute of repeated attempts")
def test_a_rewrite_under_the_snapshot_starts_it_again(pipeline: NewPipeline) -> None:
    """TRUNCATE, VACUUM FULL, a type change, DROP: an old snapshot would see too few rows."""
    # 27 s for each generation: even on a loaded machine the rewrite comes while rows are copied.
    slow = {**_RANGES, "rows_per_second": 1500, "max_parallel": 1}
    line = pipeline(
        "CREATE TABLE big (id int PRIMARY KEY, v varchar(200))",
        "CREATE TABLE dropped (id int PRIMARY KEY, v text)",
        *(f"INSERT INTO {t} SELECT i, 'v' FROM generate_series(1, 20000) i"
          for t in ("big", "dropped")),
        source={"tables": ["public.*"]},
        snapshot=slow,
    )  # fmt: skip
    daemon = line.start()
    for number, statement in enumerate(
        (
            "TRUNCATE dropped",
            "VACUUM FULL big",
            "ALTER TABLE big ALTER v TYPE int USING length(v)",
            "ALTER TABLE big RENAME v TO w; ALTER TABLE big ADD v int",
        ),
        start=1,
    ):
        wait_until(partial(_copies, line, daemon, number), "no rows", _SECONDS)
        with line.database.connect() as connection:
            connection.execute(statement.encode())
        wait_until(partial(_started_after, line, number), statement, _SECONDS)
    file = line.write("fast.yaml", snapshot=_RANGES)
    assert daemon.term() == Exit.OK
    assert "since the snapshot was taken" in daemon.log
    line.start(config_file=file).wait_ready(_SECONDS)
    line.database.execute("UPDATE big SET v = 1 WHERE id < 10")
    converge(line.config)


@pytest.mark.long("a minute of repeated attempts")
def test_a_table_that_is_truncated_again_and_again_is_named_and_read_in_the_stream(
    pipeline: NewPipeline,
) -> None:
    """Each time all would be copied again, without end; the remedy in the error solves that."""
    fill = "INSERT INTO queue SELECT i, 'v' FROM generate_series(1, 20000) i"
    line = pipeline(
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        "CREATE TABLE queue (id int PRIMARY KEY, v text)",
        "INSERT INTO big SELECT i, 'v' FROM generate_series(1, 20000) i",
        fill,
        source={"tables": ["public.*"]},
        snapshot={**_RANGES, "rows_per_second": 1500, "max_parallel": 1},
    )
    daemon = line.start()
    for number in range(1, 6):
        wait_until(partial(_copies, line, daemon, number), "no rows", _SECONDS)
        line.database.execute("TRUNCATE queue", fill)
    output = ("public.queue was rewritten", "5th time in a row", "snapshot: none", "cdc snapshot")
    line.ends(daemon, Exit.CONFIG, *output)
    tables = {"public.queue": {"snapshot": "none"}}
    file = line.write("apart.yaml", snapshot=_RANGES, tables=tables)
    line.start(config_file=file).wait_ready(_SECONDS)
    reading = begin(line, "public.queue")
    line.database.execute("TRUNCATE queue", fill)
    assert wait_state(line, reading).state == "done"
    converge(line.config)


@pytest.mark.long("test_snapshot_zombie has a sample of it")
def test_a_frozen_coordinator_and_its_tasks_are_fenced(pipeline: NewPipeline) -> None:
    """Its export is ended from outside, another takes over; the thawed one writes nothing more."""
    line = pipeline(
        *_FULL,
        source={"tables": ["public.*"]},
        snapshot={**_RANGES, "rows_per_second": 1500},
    )
    fast = line.write("fast.yaml", snapshot=_RANGES)
    with Load(line.database.dsn, seed=4, truncates=0):
        zombie = line.start()
        wait_until(lambda: rows(zombie) > 200, "no rows", _SECONDS)
        zombie.freeze()
        ended = (
            "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
            " WHERE slot_name = %s"
        )
        line.query(ended, slot_name(line.config))
        heir = line.start(config_file=fast)
        heir.wait_ready(_SECONDS)
        assert (state(line).stage, state(line).generation) == ("done", 2)
        zombie.thaw()
        zombie.wait_state("standby", _SECONDS)
        heir.wait_ready(_SECONDS)
    converge(line.config)
    assert state(line).generation == 2


@pytest.mark.long("test_snapshot_zombie has a sample of it")
def test_a_hand_over_that_hung_comes_too_late(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read that the snapshot is its own, and commits after another has taken over."""
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)",
                    snapshot=_RANGES)  # fmt: skip
    line.start("before_handover").wait_exit(_SECONDS)
    plan = topic.read(line.config).plan
    assert plan is not None
    reached, go_on = threading.Event(), threading.Event()
    read_resume = reader.read_resume

    def hang(config: Config) -> object:
        reached.set()
        go_on.wait(_SECONDS)
        return read_resume(config)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patched:
        patched.setattr(reader, "read_resume", hang)
        late = pool.submit(handover.write, line.config, plan, plan.token)
        assert reached.wait(_SECONDS)
        line.start("before_handover").wait_exit(_SECONDS)
        go_on.set()
        with pytest.raises(CDCError) as refused:
            late.result(_SECONDS)
    assert refused.value.policy is Policy.BACKOFF
    assert (state(line).stage, state(line).generation) == ("running", 1)
    assert state(line).token != plan.token
    line.start().wait_ready(_SECONDS)
    converge(line.config)


@pytest.mark.long("half a minute; the campaign of snapshots kills Postgres")
def test_a_database_that_restarts_starts_a_generation_and_leaves_no_stale_row(
    killable_pipeline: NewPipeline, killable_stack: LocalStack
) -> None:
    line = killable_pipeline(
        *_FULL,
        source={"tables": ["public.*"]},
        snapshot={**_RANGES, "rows_per_second": 1500},
    )
    with Load(line.database.dsn, seed=6, truncates=0):
        daemon = line.start()
        wait_until(lambda: rows(daemon) > 500, "no rows", _SECONDS)
        killable_stack["postgres"].kill()
        killable_stack.start("postgres")
        # Explicitly, so that rows of the first generation are certain to be deleted.
        line.database.execute("DELETE FROM users WHERE id > 1000", "TRUNCATE lines")
        wait_until(lambda: state(line).generation > 1, "no new generation", _SECONDS)
        daemon.wait_ready(_SECONDS)
    converge(line.config)
    assert "a new generation" in daemon.log


def test_what_would_hide_rows_stops_it_with_an_explanation(pipeline: NewPipeline) -> None:
    """A role without the right to read, and a row-level security policy."""
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i FROM generate_series(1, 20) i",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY few ON t USING (id < 10)",
        snapshot=_RANGES,
    )
    role = f"reader_{line.database.name}"
    line.database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    try:
        dsn = psycopg.conninfo.make_conninfo(line.database.dsn, user=role)
        file = line.write("reader.yaml", source__dsn=dsn)
        refused = partial(line.ends, seconds=_SECONDS)
        denied = "permission denied for table t"
        refused(line.start(config_file=file), Exit.PERMISSION, denied)
        line.database.execute(f"GRANT SELECT ON t TO {role}")
        policy = "row-level security policy"
        refused(line.start(config_file=file), Exit.PERMISSION, policy, "BYPASSRLS")
    finally:
        line.database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
