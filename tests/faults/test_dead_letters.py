"""Rows too large for their topics: pointer and dead letter, both or neither, in bounded memory."""

from __future__ import annotations

import signal
from typing import Any

import orjson
import pytest

from cdc.cli.main import run
from cdc.errors import Exit
from cdc.log import dead_letter_topic, names
from cdc.log.limits import record_limit
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.topic_settings import set_limit
from tests.fixtures.witness import data_records, records_of

_DOCS = "CREATE TABLE docs (id int PRIMARY KEY, name text, body text)"
_MB = 1 << 20
# Text of {0} bytes that compresses little.
_RANDOM = (
    "(SELECT left(string_agg(md5(i::text || random()::text), ''), {0})"
    " FROM generate_series(1, {0} / 32 + 1) i)"
)


def insert(row: int, size: int) -> str:
    return f"INSERT INTO docs VALUES ({row}, 'n{row}', {_RANDOM.format(size)})"


def arrived(line: PipelineUnderTest, seq: int) -> None:
    wait_until(lambda: line.resume()[1].seq >= seq, "the events do not arrive", pause=0.2)


def pointers(line: PipelineUnderTest) -> list[dict[str, Any]]:
    """Return the events that point to a dead letter, by seq."""
    found = [r.event for r in data_records(line) if r.value and b'"dead":{' in r.value]
    return sorted(found, key=lambda event: int(event["source"]["seq"]))


@pytest.mark.long("volume; test_large_transaction has bounded memory")
def test_a_value_of_50_mb_is_complete_in_the_log_in_bounded_memory(
    pipeline: NewPipeline, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    line = pipeline(_DOCS)
    daemon = line.start().wait_ready()
    line.database.execute(
        insert(1, 100),
        f"INSERT INTO docs VALUES (2, 'n2', repeat(md5('x'), {50 * _MB // 32}))",
        # Postgres does not send the large value with this: the one in the dead letter stays valid.
        "UPDATE docs SET name = 'other' WHERE id = 2",
        insert(3, 100),
        "UPDATE docs SET body = body || 'x', id = 4 WHERE id = 2",
        "DELETE FROM docs WHERE id = 1",
    )
    arrived(line, 7)
    peak_mb = daemon.peak_rss_mb
    assert converge(line.config).rows == 2
    created, moved = pointers(line)
    assert (created["op"], created["source"]["seq"], moved["op"]) == ("c", 2, "c")
    assert created["after"] == {"id": 2, "name": "n2", "body": "__debezium_unavailable_value"}
    letters = list(dead_letter_topic.heads(line.config))
    topic = names.dead_topic(line.config.prefix)
    ends = [end for each in line.frontiers() for end in each.partitions]
    [found_end] = {(name, count) for name, _, _, count in ends if name == topic}
    assert found_end == (topic, 0)
    assert max(end[2] for end in ends if end[0] == topic) > sum(2 + h.chunks for h in letters) - 2
    assert [head.id for head in letters] == ["1-2", moved["source"]["dead"]["id"]]
    assert daemon.metric("lockstep_dead_letter_events_total") == 2
    assert peak_mb < 450
    capsysbinary.readouterr()
    config = ["-c", str(line.config_file)]
    assert run(["dead", "show", "1-2", *config]) == Exit.OK
    complete = orjson.loads(capsysbinary.readouterr().out)
    assert len(complete["after"].pop("body")) == 50 * _MB
    assert complete["after"] == {"id": 2, "name": "n2"}
    assert run(["dead", "list", *config]) == Exit.OK
    listed = capsysbinary.readouterr().out.decode().splitlines()
    assert [each.split()[0] for each in listed] == [head.id for head in letters]
    assert '{"id":2}' in listed[0]
    assert run(["dead", "list", "--json", *config]) == Exit.OK
    assert [each["bytes"] > 50 * _MB for each in orjson.loads(capsysbinary.readouterr().out)] == [
        True,
        True,
    ]
    assert run(["dead", "show", "1-1", *config]) == Exit.CONFIG


@pytest.mark.long("memory")
def test_a_bytea_of_100_mb_needs_a_bounded_multiple_of_it(pipeline: NewPipeline) -> None:
    line = pipeline("CREATE TABLE blobs (id int PRIMARY KEY, data bytea)")
    daemon = line.start().wait_ready()
    line.database.execute(
        f"INSERT INTO blobs VALUES (1, convert_to(repeat(md5('x'), {100 * _MB // 32}), 'UTF8'))"
    )
    arrived(line, 1)
    # In the stream it is text of 200 MB, in the event text of 133 MB.
    assert daemon.peak_rss_mb < 900
    [head] = dead_letter_topic.heads(line.config)
    assert head.bytes > 133_000_000
    assert converge(line.config).rows == 1


def test_rows_around_the_limit_of_their_topic(pipeline: NewPipeline) -> None:
    """The topic's own limit applies, also where it is far below what the producer could send."""
    line = pipeline(_DOCS, log={"kafka": {"batch.size": 200_000}})
    topic = names.data_topic(line.config.prefix, "public", "docs")
    most = 300_000
    set_limit(line.bootstrap, topic, most)
    line.start().wait_ready()
    rows = range(1, 61)
    line.database.execute(*(insert(row, most - 5_200 + 20 * row) for row in rows))
    arrived(line, len(rows))
    assert converge(line.config).rows == len(rows)
    complete = {r.event["source"]["seq"] for r in data_records(line)} - {
        event["source"]["seq"] for event in pointers(line)
    }
    limit = record_limit(most)
    sizes = [len(r.key or b"") + len(r.value or b"") for r in data_records(line)]
    assert all(size <= limit for size in sizes)
    assert max(sizes) > limit - 100
    assert 10 < len(complete) < 50
    assert complete == set(range(1, len(complete) + 1))


def test_a_logical_message_around_the_limit_of_its_topic(pipeline: NewPipeline) -> None:
    """It is a pointer as a row is, and does not halt the daemon; rows keep their own limit."""
    line = pipeline(_DOCS, log={"kafka": {"batch.size": 50_000}})
    topic = names.messages_topic(line.config.prefix)
    set_limit(line.bootstrap, topic, 100_000)
    line.start().wait_ready()
    line.database.execute(
        f"SELECT pg_logical_emit_message(true, 'app', {_RANDOM.format(10_000)})",
        f"SELECT pg_logical_emit_message(true, 'app', {_RANDOM.format(200_000)})",
        insert(1, 200_000),
    )
    arrived(line, 3)
    small, large = (r.event for r in records_of(line, lambda name: name == topic))
    assert "dead" not in small["source"]
    assert large["message"]["content"] == "__debezium_unavailable_value"
    assert [head.id for head in dead_letter_topic.heads(line.config)] == [
        large["source"]["dead"]["id"]
    ]
    assert not pointers(line)
    assert converge(line.config).rows == 1


def test_a_topic_that_does_not_take_the_producers_batches_is_refused_with_the_remedy(
    pipeline: NewPipeline,
) -> None:
    """Otherwise a batch of small rows would be refused, sooner or later."""
    line = pipeline(_DOCS)
    set_limit(line.bootstrap, names.data_topic(line.config.prefix, "public", "docs"), 300_000)
    daemon = line.start().wait_ready()
    line.database.execute(insert(1, 10))
    line.ends(daemon, Exit.CONFIG, "takes 300000 bytes at once", "batch.size under log.kafka")


@pytest.mark.long("volume; the limit of a topic is tested with smaller rows")
def test_rows_around_16_mb(pipeline: NewPipeline) -> None:
    line = pipeline(_DOCS)
    line.start().wait_ready()
    line.database.execute(insert(1, 16 * _MB - 5_000), insert(2, 16 * _MB))
    arrived(line, 2)
    [pointer] = pointers(line)
    assert pointer["source"]["seq"] == 2
    assert converge(line.config).rows == 2


def test_old_rows_keyless_tables_and_long_keys(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE full_ (id int PRIMARY KEY, body text)",
        "ALTER TABLE full_ REPLICA IDENTITY FULL",
        "CREATE TABLE keyless (body text)",
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        "CREATE TABLE named (name text PRIMARY KEY, body text)",
        log={"kafka": {"batch.size": 50_000}},
    )
    for table in ("full_", "keyless", "named"):
        set_limit(line.bootstrap, names.data_topic(line.config.prefix, "public", table), 100_000)
    line.start().wait_ready()
    body, key = "repeat('ab', 60000)", "repeat('k', 40000)"
    line.database.execute(
        f"INSERT INTO full_ VALUES (1, {body}), (2, {body})",
        "UPDATE full_ SET body = 'short' WHERE id = 1",
        "DELETE FROM full_ WHERE id = 2",
        f"INSERT INTO keyless VALUES ({body}), ({body}), ('short')",
        "DELETE FROM keyless WHERE ctid = (SELECT ctid FROM keyless WHERE body <> 'short' LIMIT 1)",
        f"INSERT INTO named VALUES ({key}, 'short'), ({key} || 'x', {body}), ({key} || 'y', '')",
        f"UPDATE named SET body = {body} WHERE name = {key}",
        f"DELETE FROM named WHERE name = {key} || 'x'",
        "UPDATE named SET name = 'short' WHERE body = ''",
    )
    arrived(line, 14)
    assert converge(line.config).rows == 5
    assert {(p["source"]["table"], p["op"]) for p in pointers(line)} == {
        ("full_", "c"), ("full_", "u"), ("full_", "d"), ("keyless", "c"), ("keyless", "d"),
        ("named", "c"), ("named", "u"),
    }  # fmt: skip
    # The same long key is in every record of its row, the tombstone too.
    keys = [r.key for r in data_records(line) if r.topic.endswith(".named")]
    assert sorted(map(keys.count, set(keys))) == [1, 2, 3, 3]
    assert all(len(key or b"") < 100 for key in keys)
    deleted = next(p for p in pointers(line) if p["source"]["table"] == "full_" and p["op"] == "d")
    assert deleted["after"] is None
    assert deleted["before"]["id"] == 2


@pytest.mark.long("volume")
@pytest.mark.parametrize("streaming", ["on", "off"])
def test_a_large_transaction_of_large_rows(streaming: str, pipeline: NewPipeline) -> None:
    """Above logical_decoding_work_mem: streamed before the commit, and split in between."""
    batch = {"max_bytes": 16 * _MB, "max_events": 5}
    line = pipeline(_DOCS, batch=batch, source={"streaming": streaming})
    line.database.execute(
        f"ALTER DATABASE {line.database.name} SET logical_decoding_work_mem = '1MB'"
    )
    daemon = line.start().wait_ready()
    with line.database.connect() as connection, connection.transaction():
        for row in range(1, 25):
            connection.execute(insert(row, 20 * _MB if row % 5 == 0 else 1_000).encode())
            if row == 10:
                with connection.transaction(force_rollback=True):
                    connection.execute(insert(99, 20 * _MB).encode())
    arrived(line, 24)
    assert converge(line.config).rows == 24
    assert [p["after"]["id"] for p in pointers(line)] == [5, 10, 15, 20]
    assert daemon.peak_rss_mb < 400


@pytest.mark.long("the other places", sample=["in_letter"])
@pytest.mark.parametrize(
    "failpoint", ["after_sequence", "in_letter", "after_produce", "before_commit", "after_commit"]
)
def test_killed_there_letter_and_pointer_are_both_in_the_log_or_neither(
    failpoint: str, pipeline: NewPipeline
) -> None:
    line = pipeline(_DOCS)
    line.start().wait_ready()
    line.database.execute(insert(1, 1_000))
    arrived(line, 1)
    assert line.daemon.term() == 0
    daemon = line.start(f"{failpoint}:1")
    line.database.execute(insert(2, 18 * _MB), insert(3, 1_000))
    assert daemon.wait_exit() == -signal.SIGKILL
    line.start().wait_ready()
    arrived(line, 3)
    assert converge(line.config).rows == 3
    [pointer] = pointers(line)
    assert pointer["source"]["seq"] == 2
    topic = names.dead_topic(line.config.prefix)
    keys = [record.key for record in records_of(line, lambda name: name == topic)]
    assert len(keys) == len(set(keys)) == pointer["source"]["dead"]["chunks"] + 1
