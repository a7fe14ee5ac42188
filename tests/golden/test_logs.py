"""A log that each format's own version has written is read, proved, followed and continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from cdc.events import LSN
from cdc.log import acknowledged, names, reader, records, topics
from cdc.log.records import DIGESTS_FORMAT, SHA256_FORMAT
from cdc.operate import formats
from cdc.verify import topics as topics_proof
from lockstep.jobs.following_stores import run_of
from lockstep.jobs.spark.starting import SparkStart
from tests.fixtures.daemon import PipelineUnderTest, making, wait_until
from tests.fixtures.servers import Database, KafkaServer
from tests.fixtures.store_sqlite import SqliteStore
from tests.golden import loading, record_log
from tests.golden.loading import RecordedLog, prefix_of

FORMATS = tuple(range(1, DIGESTS_FORMAT + 1))
# In a log that is loaded elsewhere these are of the servers there.
_PLACE = ("end_lsn", "commit_lsn", "ordinal", "xid")
_SERVERS = ("system_identifier", "timeline", "database", "slot", "topic_ids")
TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, at timestamptz, price numeric, more int)",
    "CREATE TABLE clicks (id int, note text)",
    "ALTER TABLE clicks REPLICA IDENTITY FULL",
)


@pytest.fixture(params=FORMATS)
def log(request: pytest.FixtureRequest) -> RecordedLog:
    return loading.read(request.param)


@pytest.fixture
def line(
    log: RecordedLog, database: Database, kafka_server: KafkaServer, tmp_path: Path
) -> Iterator[PipelineUnderTest]:
    """The pipeline of a recording, with its log, on this session's servers.

    Source and topics are others than when it was recorded, so what names them in the resume record
    is changed, and where in their WAL the log ends; everything else is as it was written.
    """
    prefix = prefix_of(log.format)
    _delete(kafka_server, prefix)
    pipelines = making(database, kafka_server.bootstrap, prefix, tmp_path)
    made = next(pipelines)(
        *TABLES,
        # Never deleted for their age, whatever it is by now.
        log={"partitions": 2, "retention_hours": -1, "kafka": {"message.max.bytes": 20_000}},
        followers={
            "copy": {
                "sql": {"url": f"sqlite:///{tmp_path / 'copy.db'}"},
                "tables": ["public.users"],
            }
        },
        source={"canary_seconds": 0},
    )
    identity, position = made.resume()
    resume = names.resume_topic(prefix)
    loading.load(log, kafka_server.bootstrap, without=(resume,))
    here = json.loads(records.encode(identity))
    old = log.newest(resume, part="identity")
    old |= {name: here[name] for name in _SERVERS}
    for name in ("oid", "tables", "relations"):
        old["publication"][name] = here["publication"][name]
    old["publication"]["sends"]["version"] = here["publication"]["sends"]["version"]
    old["publication"]["sends"]["owner"] = here["publication"]["sends"]["owner"]
    start = json.loads(records.encode(position))
    continued = log.newest(resume, part="position")
    continued |= {name: start[name] for name in _PLACE}
    written = [("identity", old), ("position", continued)]
    acknowledged.write(
        made.config,
        resume,
        [(records.resume_key(prefix, part), json.dumps(value).encode()) for part, value in written],
    )
    yield made
    pipelines.close()  # type: ignore[attr-defined]
    _delete(kafka_server, prefix)


def _delete(kafka: KafkaServer, prefix: str) -> None:
    """Delete the topics of a recording, and wait until none is left."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})

    def left() -> list[str]:
        listed = admin.list_topics(timeout=60).topics
        return [name for name in listed if name.startswith(f"{prefix}.")]

    if left():
        for done in admin.delete_topics(left()).values():
            done.exception(timeout=60)
    wait_until(lambda: not left(), "topics of an earlier test stay")


def _rows(store: SqliteStore) -> list[dict[str, Any]]:
    return store.query("SELECT id, name, more FROM users ORDER BY id")


def test_there_is_a_recording_of_each_format_that_is_read() -> None:
    for format_ in FORMATS:
        log = loading.read(format_)
        frontiers = names.frontier_topic(prefix_of(format_))
        assert log.newest(frontiers)["format"] == log.format == format_
        resume = names.resume_topic(prefix_of(format_))
        assert log.newest(resume, part="position")["format"] == format_


def test_records_are_loaded_at_their_offsets_whatever_else_the_log_had(
    kafka_server: KafkaServer,
) -> None:
    topic = "golden0.gaps"
    _delete(kafka_server, "golden0")
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(timeout=60)
    offsets = [0, 1, 3, 6, 7, 10, 15]
    place = {"topic": topic, "partition": 0}
    written = [
        place | {"offset": each, "ms": 1_000 + each, "headers": None, "key": None, "value": "{}"}
        for each in offsets
    ]
    log = RecordedLog(0, {}, [*written, place | {"end": 17}])
    loading.load(log, kafka_server.bootstrap)
    assert record_log.records_of(kafka_server.bootstrap, "golden0") == log.records
    _delete(kafka_server, "golden0")


def test_a_log_of_each_format_is_read_proved_followed_and_continued(
    log: RecordedLog, line: PipelineUnderTest, tmp_path: Path
) -> None:
    config = line.config
    # What is there, and what this version would do to it.
    found = {each.kind: each for each in formats.read(config)}
    assert all(each.is_readable for each in found.values()), found
    rising = {kind for kind, each in found.items() if each.will_rise}
    newer = log.format < DIGESTS_FORMAT
    assert rising == ({"resume position", "frontier"} if newer else set())
    # Its digests, of either hash, are those of its records.
    proof = topics_proof.prove(config)
    assert proof.findings == ()
    recorded = log.newest(names.frontier_topic(config.prefix))
    assert (proof.seq, proof.chain) == (recorded["seq"], recorded.get("chain", ""))
    assert bool(proof.undigested) == (log.format < SHA256_FORMAT)
    versions = reader.read_schemas(config)
    assert [each.table for each in versions].count("users") == 2
    # A follower: every event, a changed key, a dead letter, a new column.
    store = SqliteStore(tmp_path / "copy.db")
    spark = SparkStart(lambda: pytest.fail("no Spark"), set())
    run = run_of(spark, config, "copy", LSN.parse(recorded["lsn"]))
    assert run.run() == 0, run.error
    expected = [
        {name: each[name] for name in ("id", "name", "more")} for each in log.rows["public.users"]
    ]
    assert len(expected) > 8
    assert _rows(store) == expected
    # The daemon goes on after the last record, and the follower too.
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (300, 'after', NULL, NULL, 3)")
    seq = recorded["seq"] + 1
    wait_until(lambda: line.frontiers()[-1].seq >= seq, "no frontier follows")
    assert line.daemon.term() == 0
    assert line.resume()[1].format == DIGESTS_FORMAT
    written = line.frontiers()
    assert [each.format for each in written if each.seq >= seq] == [DIGESTS_FORMAT]
    assert all(after.previous == before.chain for before, after in pairwise(written))
    run = run_of(spark, config, "copy", written[-1].lsn)
    assert run.run() == 0, run.error
    assert _rows(store) == [*expected, {"id": 300, "name": "after", "more": 3}]
    assert topics_proof.prove(config).findings == ()
    assert topics.describe(topics.admin(config), [names.schema_topic(config.prefix)])
