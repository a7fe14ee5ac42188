"""A rebuild is compared with the log's content, whatever has happened to its topics."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Final

import pytest
from confluent_kafka import TopicPartition

from cdc.cli.main import run
from cdc.events import LSN
from cdc.log import names, reader, topics
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.generations.builders import LogBuilder, frontier_of_now
from lockstep.jobs.generations.comparing import Holding
from lockstep.sinks.contract import Version
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import data_records
from tests.integration.test_topic_monitor import widen

if TYPE_CHECKING:
    from lockstep.sinks.contract import Applied

_MOMENT_IN_HOURS: Final = 0.2 / 3_600
TABLES: Final = (
    "CREATE TABLE users (id int PRIMARY KEY, name text)",
    "CREATE TABLE dropped (id int PRIMARY KEY)",
)


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    return running(pipeline)


def running(pipeline: NewPipeline, **sections: dict[str, object]) -> PipelineUnderTest:
    """Return a pipeline with rows in two tables, whose daemon runs."""
    followers: dict[str, object] = {"cache": {"redis": {"url": "redis://localhost"}}}
    made = pipeline(*TABLES, followers=followers, **sections)
    made.start().wait_ready()
    made.database.execute(
        "INSERT INTO users SELECT g, 'a' FROM generate_series(1, 60) g",
        "TRUNCATE users",
        "INSERT INTO users SELECT g, 'b' FROM generate_series(1, 50) g",
        "INSERT INTO dropped SELECT generate_series(1, 9)",
    )
    return made


def builder_of(line: PipelineUnderTest) -> LogBuilder:
    return LogBuilder(line.config, "cache", lambda: pytest.fail("no Spark here"), print)


def keys(line: PipelineUnderTest, version: Version) -> set[int]:
    return set(
        json.loads(line.query(f"SELECT coalesce(json_agg(id), '[]')::text FROM {version.table}")[0])
    )


def in_log(line: PipelineUnderTest) -> Applied:
    """Return a frontier at which everything that was committed is in the log."""
    mark = uuid.uuid4().hex
    line.database.execute(f"SELECT pg_logical_emit_message(true, 'mark', '{mark}')")
    lsn = LSN.parse(line.query("SELECT pg_current_wal_insert_lsn()::text")[0])
    wait_until(lambda: line.resume()[1].end_lsn >= lsn, "the log is not there")
    return frontier_of_now(line.config, 1)


def folded(line: PipelineUnderTest, version: Version) -> Holding:
    """Return the newest seq of each key that the database has, from all events of a topic."""
    newest: dict[bytes, int] = {}
    for record in data_records(line):
        if record.topic == version.topic and record.key is not None and record.value is not None:
            newest[record.key] = max(record.event["source"]["seq"], newest.get(record.key, 0))
    there = keys(line, version)
    return Holding(
        (key, seq, None) for key, seq in newest.items() if json.loads(key)["id"] in there
    )


def check(line: PipelineUnderTest, builder: LogBuilder) -> list[str]:
    """Compare each table's truth, if known, with log and database; return the tables."""
    at, known = in_log(line), []
    for version in builder.versions(at):
        truth = builder.truth(version, at)
        if truth is not None:
            known.append(version.table)
            assert not truth.differences(folded(line, version), values=False)
            assert len(truth) == len(keys(line, version))
    return sorted(known)


@pytest.mark.long("partitions are added seldom")
def test_keys_that_added_partitions_have_moved_count_once(line: PipelineUnderTest) -> None:
    assert check(line, builder_of(line)) == ["dropped", "users"]
    line.daemon.term()
    widen(line, names.data_topic(line.config.prefix, "public", "users"), 7)
    assert run(["topics", "acknowledge", "--yes", "-c", str(line.config_file)]) == 0
    line.start().wait_ready()
    line.database.execute(
        "UPDATE users SET name = 'c' WHERE id % 3 = 0", "DELETE FROM users WHERE id % 5 = 0"
    )
    assert check(line, builder_of(line)) == ["dropped", "users"]
    line.database.execute("TRUNCATE users")
    assert check(line, builder_of(line)) == ["dropped", "users"]


def test_rows_of_dropped_tables_are_not_asked_for_where_rows_are_read_again(
    pipeline: NewPipeline, request: pytest.FixtureRequest
) -> None:
    """The generation starts after them."""
    line = running(pipeline, log={"retention_hours": _MOMENT_IN_HOURS})
    at = in_log(line)
    time.sleep(3.0)  # the guaranteed retention is over, and the daemon continues
    frontiers = names.frontier_topic(line.config.prefix), 0
    first = reader.end_offsets(line.config, [frontiers])[frontiers] - 1
    client = topics.admin(line.config)
    cut = client.delete_records([TopicPartition(*frontiers, first)])
    for done in cut.values():
        done.result(timeout=120)
    line.database.execute("DROP TABLE dropped", "DELETE FROM users WHERE id % 2 = 0")
    # What was left may have been the marker of a Kafka transaction.
    wait_until(lambda: reader.read_frontier_tail(line.config, 1), "the log has no frontier")
    builder = builder_of(line)
    sink = MemorySink(request.node.nodeid)
    try:
        assert builder.prepare(sink, 1, None) > at.seq
        assert sink.generations()[1] is not None, "it begins here"
        assert check(line, builder) == ["users"]
    finally:
        STORES.pop(request.node.nodeid, None)
