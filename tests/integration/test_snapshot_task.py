"""A task of a snapshot on real servers: complete rows once, in bounded memory, or an error."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from cdc.errors import CDCError, FencedError, Policy, RewrittenError, SnapshotLostError
from cdc.log import names, reader
from cdc.log.dead_letters import DeadLetterAssembler
from cdc.log.publisher import Publisher
from cdc.snapshot.initial import generation_plan, topic
from cdc.snapshot.initial.records import SnapshotPlan, SnapshotState
from cdc.snapshot.initial.task import CopyTask, run_task
from cdc.source.export import Export
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.topic_settings import set_limit
from tests.fixtures.witness import records_of

INITIAL: dict[str, Any] = {"mode": "initial", "max_parallel": 1, "range_bytes": 8_192}
# A task's memory in MB, for any table: Python with the clients takes some 60 MB, the rest is
# chunks, batches of the producer, and what waits for the brokers. docs/OPERATIONS.md states it.
TASK_MB = 160


def export(line: PipelineUnderTest) -> Export:
    """Export a snapshot for a plan of the pipeline's tables."""
    made = Export(line.config)
    made.create()
    return made


def planned(line: PipelineUnderTest, made: Export, generation: int = 1) -> SnapshotPlan:
    """Write a plan to the log, as the coordinator does."""
    config, known = line.config, topic.read(line.config)
    resumed = reader.read_resume(config)
    assert resumed is not None
    state = SnapshotState(
        pipeline=config.pipeline, stage="running", generation=generation, token=f"t{generation}",
        tasks=config.snapshot.max_parallel,
    )  # fmt: skip
    found = generation_plan.plan(config, made, state, known, resumed)
    publisher = Publisher(config, "snapshot")
    publisher.open()
    generation_plan.write(config, publisher, state, found)
    return found.plan


@contextmanager
def planned_snapshot(line: PipelineUnderTest) -> Iterator[SnapshotPlan]:
    made = export(line)
    try:
        yield planned(line, made)
    finally:
        made.close()


def rows(line: PipelineUnderTest, table: str = "t") -> list[dict[str, Any]]:
    """Return the committed events of a table."""
    wanted = names.data_topic(line.config.prefix, "public", table)
    return [r.event for r in records_of(line, lambda name: name == wanted) if r.value is not None]


def test_every_row_is_there_once_however_tasks_fence_each_other(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 400) i",
        snapshot=INITIAL,
    )
    config = line.config
    with planned_snapshot(line) as plan:
        assert len(list(plan.ranges())) > 3
        with CopyTask(config, plan, 0) as first:
            left = first.unfinished()
            first.copy(left[0])
            with CopyTask(config, plan, 0) as second:
                assert second.unfinished() == left[1:]
                second.copy(left[1])
                with pytest.raises(CDCError) as fenced:
                    first.copy(left[1])
                assert fenced.value.policy is Policy.BACKOFF
        assert [record.number for record in run_task(config, plan, 0)] == [
            each.number for each in left[2:]
        ]
        assert list(run_task(config, plan, 0)) == []
        events = rows(line)
        assert Counter(event["after"]["id"] for event in events) == Counter(range(1, 401))
        assert len({event["source"]["seq"] for event in events}) == len(events)
        done = topic.read(config).done(plan)
        assert sum(record.rows for record in done.values()) == len(events)
        # Another generation has started: a task with the old plan writes nothing.
        publisher = Publisher(config, "snapshot")
        publisher.open()
        state = topic.read_state(config)
        assert state is not None
        publisher.add(*topic.state_record(config, replace(state, token="another")))
        publisher.commit()
        with pytest.raises(FencedError, match="no longer being copied"), CopyTask(config, plan, 0):
            pass
    assert len(rows(line)) == len(events)


# What happens to a table between two of its ranges.
CHANGES = (
    "TRUNCATE {t}",
    "VACUUM FULL {t}",
    "ALTER TABLE {t} ALTER n TYPE bigint",
    "ALTER TABLE {t} DROP n, ADD n int",
    "ALTER TABLE {t} RENAME n TO m",
    "ALTER TABLE {t} RENAME TO other",
    "DROP TABLE {t}",
    "DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, n int)",
)


def test_a_table_changed_since_is_reported_and_no_more_of_it_is_written(
    pipeline: NewPipeline,
) -> None:
    tables = {f"t{number}": change for number, change in enumerate(CHANGES)}
    line = pipeline(
        *(f"CREATE TABLE {t} (id int PRIMARY KEY, n int)" for t in tables),
        *(f"INSERT INTO {t} SELECT i, i FROM generate_series(1, 900) i" for t in tables),
        snapshot=INITIAL,
    )
    with planned_snapshot(line) as plan:
        named = {plan.schemas[t.schema_id].table: n for n, t in enumerate(plan.tables)}
        for table, change in tables.items():
            with CopyTask(line.config, plan, 0) as task:
                mine = [each for each in task.unfinished() if each.table == named[table]]
                written = task.copy(mine[0]).rows
                # A column that the snapshot's rows do not have does not matter.
                line.database.execute(f"ALTER TABLE {table} ADD later int DEFAULT 7")
                written += task.copy(mine[1]).rows
                line.database.execute(change.format(t=table))
                with pytest.raises(RewrittenError, match=table):
                    task.copy(mine[2])
            assert len(rows(line, table)) == written


def test_a_missing_snapshot_is_reported(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", snapshot=INITIAL
    )
    with planned_snapshot(line) as plan:
        pass
    with pytest.raises(SnapshotLostError), CopyTask(line.config, plan, 0) as task:
        task.copy(task.unfinished()[0])
    assert rows(line) == []


def test_a_row_too_large_for_its_topic_is_a_dead_letter_of_the_same_transaction(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        # Whichever chunk it is in, the row in the middle is too large.
        "INSERT INTO t SELECT i, repeat(md5(i::text), CASE i WHEN 5 THEN 90000 ELSE 30 END)"
        " FROM generate_series(1, 9) i",
        snapshot=INITIAL,
    )
    with planned_snapshot(line) as plan:
        set_limit(line.bootstrap, names.data_topic(line.config.prefix, "public", "t"), 1_100_000)
        records = list(run_task(line.config, plan, 0))
    assert sum(record.rows for record in records) == 9
    events = {event["after"]["id"]: event for event in rows(line)}
    pointer = events[5]["source"].pop("dead")
    assert (pointer["columns"], events[5]["op"]) == (["v"], "r")
    letters = DeadLetterAssembler()
    for record in records_of(line, lambda name: name == names.dead_topic(line.config.prefix)):
        letters.add(record.key, record.value)
    complete = orjson.loads(letters.take(pointer["id"]))
    assert len(complete["after"]["v"]) == 90_000 * 32
    assert complete["source"] == events[5]["source"]
    assert all("dead" not in events[number]["source"] for number in (1, 4, 6, 9))


def test_a_task_holds_little_however_large_its_range_is(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat(md5(i::text), 7) FROM generate_series(1, 150000) i",
        snapshot={**INITIAL, "range_bytes": 1 << 30},
    )
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe(duplex=False)
    with planned_snapshot(line) as plan:
        process = spawning.Process(target=_copy, args=(theirs, line.config, plan))
        process.start()
        theirs.close()
        copied, ranges, peak_kib = ours.recv()
        process.join()
    assert (copied, ranges) == (150_000, 1)
    assert peak_kib * 1_024 / 1e6 < TASK_MB


def _copy(pipe: Any, config: Any, plan: SnapshotPlan) -> None:  # noqa: ANN401 - a process' arguments
    records = list(run_task(config, plan, 0))
    # Not getrusage's peak, which starts from that of the parent process.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    pipe.send((sum(record.rows for record in records), len(records), peak))
