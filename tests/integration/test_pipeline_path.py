"""From SQL to records: what docs/EVENTS.md guarantees, read by a plain consumer."""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import psycopg
import pytest

from cdc.encode.partition import partition_of
from cdc.log import names, reader
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import Record, data_records, message_seqs, records_of

_USERS = "CREATE TABLE users (id int PRIMARY KEY, name text, big text)"
_EXTERNAL = "ALTER TABLE users ALTER big SET STORAGE EXTERNAL"
_PLACEHOLDER = "__debezium_unavailable_value"

Event = dict[str, Any]


def events(line: PipelineUnderTest, count: int) -> list[Event]:
    """Wait for this many events; return all that exist, by seq."""

    def exist() -> list[Event]:
        return [record.event for record in data_records(line) if record.value is not None]

    # First the resume record, which is read faster; a commit reaches one topic after another.
    wait_until(lambda: line.resume()[1].seq >= count, f"the log lacks events: not {count}")
    wait_until(lambda: len(exist()) >= count, f"the topics lack events: not {count}")
    found = sorted(exist(), key=lambda event: int(event["source"]["seq"]))
    seqs = [event["source"]["seq"] for event in found] + message_seqs(line)
    assert sorted(seqs) == list(range(1, len(seqs) + 1))
    return found


def brief(found: list[Event]) -> list[tuple[str, Any]]:
    """Return op and id of each event."""
    return [(e["op"], (e["after"] or e["before"] or {}).get("id")) for e in found]


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    line = pipeline(_USERS, _EXTERNAL)
    line.start().wait_ready()
    return line


# --- transactions of the log ---


def test_changes_that_linger_share_kafka_transactions(pipeline: NewPipeline) -> None:
    line = pipeline(_USERS, batch={"max_wait_ms": 30_000, "linger_ms": 400})
    daemon = line.start().wait_ready()
    committed = "lockstep_kafka_transactions_total"
    before, began = daemon.metric(committed), time.monotonic()
    for number in range(200):
        line.database.execute(f"INSERT INTO users (id) VALUES ({number})")
    events(line, 200)
    # Each transaction of the log takes 400 ms or longer, and one more may be of a frontier alone.
    most = 2 * ((time.monotonic() - began) / 0.4 + 1)
    assert daemon.metric(committed) - before <= most
    # One alone waits, and is not forgotten.
    sent = time.monotonic()
    line.database.execute("INSERT INTO users (id) VALUES (200)")
    events(line, 201)
    assert time.monotonic() - sent >= 0.4
    converge(line.config)


def test_a_stop_does_not_wait_for_changes_to_share_what_was_read(pipeline: NewPipeline) -> None:
    line = pipeline(_USERS, batch={"max_wait_ms": 30_000, "linger_ms": 30_000})
    daemon = line.start().wait_ready()
    line.database.execute("INSERT INTO users (id) VALUES (1)")
    wait_until(lambda: daemon.metric("lockstep_pending_events") == 1, "it is not read")
    assert daemon.term() == 0
    assert brief(events(line, 1)) == [("c", 1)]


# --- one change ---


def test_an_event_says_everything_the_contract_names(line: PipelineUnderTest) -> None:
    before_us = time.time_ns() // 1_000
    xid, _ = line.query(
        "WITH w AS (INSERT INTO users VALUES (7, 'Ada') RETURNING id)"
        " SELECT pg_current_xact_id()::text::bigint, id FROM w"
    )
    (event,) = events(line, 1)
    after_us = time.time_ns() // 1_000
    source = event["source"]
    assert event["op"] == "c"
    assert event["before"] is None
    assert event["after"] == {"id": 7, "name": "Ada", "big": None}
    assert event["transaction"] is None
    at_us = source["ts_us"]
    assert before_us <= at_us <= after_us
    for stamped in (event, source):
        assert stamped["ts_us"] == at_us
        assert stamped["ts_ms"] == at_us // 1_000
        assert stamped["ts_ns"] == at_us * 1_000
    expected = {
        "connector": "postgresql",
        "name": line.config.prefix,
        "snapshot": "false",
        "db": line.database.name,
        "schema": "public",
        "table": "users",
        "txId": xid,
        "epoch": 1,
        "ordinal": 1,
        "seq": 1,
        "schema_id": 1,
    }
    assert {name: source[name] for name in expected} == expected
    assert set(source) - set(expected) == {
        "version",
        "lsn",
        "commit_lsn",
        "ts_ms",
        "ts_us",
        "ts_ns",
    }


def test_a_record_lies_where_its_key_says_and_a_delete_is_followed_by_a_tombstone(
    line: PipelineUnderTest,
) -> None:
    line.database.execute(
        "INSERT INTO users SELECT i, 'u' FROM generate_series(1, 40) i", "DELETE FROM users"
    )
    events(line, 80)
    records = data_records(line)
    assert len({record.partition for record in records}) == 3
    for record in records:
        assert record.key is not None
        assert record.partition == partition_of(record.key, 3)
    for number in range(3):
        here = [record for record in records if record.partition == number]
        for record, following in itertools.pairwise(here):
            deletes = record.value is not None and record.event["op"] == "d"
            assert (following.value is None) == deletes
            assert not deletes or following.key == record.key
    deleted = [r.event for r in records if r.value is not None and r.event["op"] == "d"]
    assert all(event["before"]["id"] and event["after"] is None for event in deleted)


def test_a_changed_key_is_a_delete_and_a_create_in_one_transaction(
    line: PipelineUnderTest,
) -> None:
    """Two events, two seq, one ordinal; and the unchanged TOAST is not null."""
    line.database.execute(
        f"INSERT INTO users VALUES (1, 'a', repeat(md5('x'), 200)), (2, 'b', '{_PLACEHOLDER}')",
        "UPDATE users SET id = 3 WHERE id = 1",
    )
    found = events(line, 4)
    assert brief(found) == [("c", 1), ("c", 2), ("d", 1), ("c", 3)]
    missing, come = found[2], found[3]
    assert missing["source"]["ordinal"] == come["source"]["ordinal"] == 1
    assert missing["source"]["commit_lsn"] == come["source"]["commit_lsn"]
    assert come["source"]["unchanged"] == ["big"]
    assert come["after"]["big"] == _PLACEHOLDER
    # A user's own text that equals the placeholder is a value.
    assert found[1]["after"]["big"] == _PLACEHOLDER
    assert "unchanged" not in found[1]["source"]
    converge(line.config)


def test_unchanged_toast_is_not_null(line: PipelineUnderTest) -> None:
    line.database.execute(
        "INSERT INTO users VALUES (1, 'a', repeat(md5('x'), 200))",
        "UPDATE users SET name = 'b'",
        "UPDATE users SET name = 'c', big = NULL",
    )
    _, kept, cleared = events(line, 3)
    assert kept["source"]["unchanged"] == ["big"]
    assert (cleared["after"]["big"], "unchanged" in cleared["source"]) == (None, False)
    assert kept["before"] is None


def test_a_truncate_of_two_tables_is_an_event_of_each(pipeline: NewPipeline) -> None:
    line = pipeline(_USERS, "CREATE TABLE orders (id int PRIMARY KEY, of int REFERENCES users)")
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO users VALUES (1, 'a')", "INSERT INTO orders VALUES (1, 1)",
        "TRUNCATE users CASCADE", "INSERT INTO users VALUES (1, 'again')",
    )  # fmt: skip
    found = events(line, 5)
    assert [event["op"] for event in found] == ["c", "c", "t", "t", "c"]
    truncates = found[2:4]
    assert {event["source"]["table"] for event in truncates} == {"users", "orders"}
    assert [event["source"]["ordinal"] for event in truncates] == [1, 2]
    assert all(event["before"] is None and event["after"] is None for event in truncates)
    converge(line.config)


def test_a_table_without_a_key_keeps_its_order_in_one_partition(pipeline: NewPipeline) -> None:
    line = pipeline(
        "CREATE TABLE notes (id int, note text)", "ALTER TABLE notes REPLICA IDENTITY FULL"
    )
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO notes SELECT i % 3, 'n' FROM generate_series(1, 30) i",
        "UPDATE notes SET note = 'm' WHERE id = 1",
        "DELETE FROM notes WHERE id = 2",
    )
    found = events(line, 50)
    records = data_records(line)
    assert {(record.key, record.partition) for record in records} == {(None, 0)}
    assert all(record.value is not None for record in records), "no key, so no tombstone"
    assert found[-1]["before"] == {"id": 2, "note": "n"}
    assert found[35]["before"] == {"id": 1, "note": "n"}
    converge(line.config)


# --- transactions ---


def test_transactions_come_complete_and_in_commit_order(line: PipelineUnderTest) -> None:
    """A begins, B begins, B commits, A commits: B's rows, then A's, none between the other's."""
    with psycopg.connect(line.database.dsn) as a, psycopg.connect(line.database.dsn) as b:
        for key in (1, 2, 3):
            a.execute("INSERT INTO users VALUES (%s, 'a')", [key])
            b.execute("INSERT INTO users VALUES (%s, 'b')", [key + 10])
        b.commit()
        a.execute("INSERT INTO users VALUES (4, 'a')")
        a.commit()
    found = events(line, 7)
    assert [e["after"]["id"] for e in found] == [11, 12, 13, 1, 2, 3, 4]
    assert [e["source"]["ordinal"] for e in found] == [1, 2, 3, 1, 2, 3, 4]
    # The row that commits later has the lower WAL address: addresses are no order.
    assert found[3]["source"]["lsn"] < found[0]["source"]["lsn"]


def test_what_is_rolled_back_leaves_nothing(line: PipelineUnderTest) -> None:
    """A transaction, a savepoint, a savepoint in a savepoint; and they use no seq."""
    with line.database.connect() as connection:
        with connection.transaction(force_rollback=True):
            connection.execute("INSERT INTO users VALUES (1, 'never')")
        with connection.transaction():
            connection.execute("INSERT INTO users VALUES (2, 'kept')")
            with connection.transaction(force_rollback=True):
                connection.execute("DELETE FROM users")
                with connection.transaction():
                    connection.execute("INSERT INTO users VALUES (3, 'never')")
            connection.execute("INSERT INTO users VALUES (4, 'kept')")
    assert brief(events(line, 2)) == [("c", 2), ("c", 4)]


def test_a_row_made_and_changed_in_one_transaction_shows_each_step(
    line: PipelineUnderTest,
) -> None:
    with line.database.connect() as connection, connection.transaction():
        connection.execute("INSERT INTO users VALUES (1, 'a')")
        connection.execute("UPDATE users SET name = 'b'")
        connection.execute("DELETE FROM users")
        connection.execute("INSERT INTO users VALUES (1, 'c')")
    found = events(line, 4)
    assert [e["op"] for e in found] == ["c", "u", "d", "c"]
    assert [e["source"]["ordinal"] for e in found] == [1, 2, 3, 4]


# --- schemas ---


def test_each_event_has_the_schema_of_its_time(pipeline: NewPipeline) -> None:
    """The daemon was down during all of it: what it reads is older than the catalog."""
    line = pipeline(_USERS)
    line.database.execute(
        "INSERT INTO users VALUES (1, 'v1')",
        "ALTER TABLE users ADD COLUMN age int DEFAULT 5",
        "INSERT INTO users (id, name) VALUES (2, 'v2')",
        "ALTER TABLE users DROP COLUMN big, ALTER name TYPE varchar(9)",
        "ALTER TABLE users RENAME name TO called",
        "INSERT INTO users VALUES (3, 'v3', 6)",
    )
    line.start().wait_ready()
    found = events(line, 3)
    assert [event["after"] for event in found] == [
        {"id": 1, "name": "v1", "big": None},
        {"id": 2, "name": "v2", "big": None, "age": 5},
        {"id": 3, "called": "v3", "age": 6},
    ]
    schemas = {record.schema_id: record for record in reader.read_schemas(line.config)}
    for event in found:
        columns = schemas[event["source"]["schema_id"]].columns
        assert [column.name for column in columns] == list(event["after"])
    assert schemas[found[2]["source"]["schema_id"]].columns[1].type == "varchar"


def test_a_table_added_later_is_in_the_log_from_its_first_row(pipeline: NewPipeline) -> None:
    line = pipeline(_USERS)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 'a')", "CREATE TABLE orders (id int)")
    line.set_up()
    line.database.execute("INSERT INTO orders VALUES (1)", "INSERT INTO users VALUES (2, 'b')")
    found = events(line, 3)
    assert [event["source"]["table"] for event in found] == ["users", "orders", "users"]
    assert line.daemon.process.poll() is None
    line.daemon.kill()
    line.start().wait_ready()
    line.database.execute("INSERT INTO orders VALUES (2)")
    events(line, 4)


# --- the log's own records ---


def test_frontiers_count_exactly_what_lies_between_them(line: PipelineUnderTest) -> None:
    """The events between two frontiers' offsets are those that the frontier counts."""
    for number in range(20):
        line.database.execute(f"INSERT INTO users VALUES ({number}, 'x')")
    line.database.execute("DELETE FROM users WHERE id < 5")
    events(line, 25)

    def newest() -> int:
        found = line.frontiers()
        return found[-1].seq if found else 0

    wait_until(lambda: newest() == 25, "no frontier")
    records = data_records(line)
    reached: dict[tuple[str, int], int] = {}
    seq = 0
    for frontier in line.frontiers():
        within: list[Record] = []
        for topic, partition, end, count in frontier.partitions:
            start = reached.get((topic, partition), 0)
            cut = [
                record
                for record in records
                if (record.topic, record.partition) == (topic, partition)
                and start <= record.offset < end
                and record.value is not None
            ]
            assert len(cut) == count
            within += cut
            reached[topic, partition] = end
        seqs = sorted(record.event["source"]["seq"] for record in within)
        assert seqs == list(range(seq + 1, frontier.seq + 1))
        seq = frontier.seq


def test_the_resume_record_says_who_wrote_what_from_where(line: PipelineUnderTest) -> None:
    line.database.execute("INSERT INTO users VALUES (1, 'a')")
    (event,) = events(line, 1)
    identity, position = line.resume()
    system, database = line.query(
        "SELECT system_identifier::text, current_database() FROM pg_control_system()"
    )
    assert (identity.system_identifier, identity.database) == (system, database)
    assert (identity.slot, identity.publication.name) == (line.config.slot, line.config.publication)
    assert list(identity.publication.tables) == ["public.users"]
    topic = names.data_topic(line.config.prefix, "public", "users")
    assert identity.partitions == {topic: 3}
    assert str(position.commit_lsn) == event["source"]["commit_lsn"]
    assert (position.ordinal, position.open) == (1, False)
    assert position.committed_at_us == event["source"]["ts_us"]


def test_a_replay_gives_the_same_bytes(pipeline: NewPipeline) -> None:
    """What was sent and not committed is sent again, byte for byte and to the same partition."""
    rows = 20_000
    line = pipeline(_USERS, batch={"max_events": 10 * rows})
    # Written first: an idle daemon commits too, every ten seconds.
    line.database.execute(f"INSERT INTO users SELECT i, 'u' || i FROM generate_series(1, {rows}) i")
    line.start("after_flush:1")
    assert line.daemon.wait_exit() == -signal.SIGKILL
    line.start().wait_ready()
    events(line, rows)
    tries: dict[int, list[tuple[int, bytes | None, bytes]]] = {}
    for record in records_of(line, line.is_data, isolation="read_uncommitted"):
        assert record.value is not None
        seq = record.event["source"]["seq"]
        tries.setdefault(seq, []).append((record.partition, record.key, record.value))
    assert len(tries) == rows
    assert max(map(len, tries.values())) == 2, "nothing was sent before the kill"
    assert all(len(set(each)) == 1 for each in tries.values())


# --- the end ---


def test_a_crash_below_python_reports_where(line: PipelineUnderTest) -> None:
    """Otherwise a broken library would end the daemon without a message."""
    line.daemon.process.send_signal(signal.SIGSEGV)
    assert line.daemon.wait_exit() == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in line.daemon.log
    assert "pipeline.py" in line.daemon.log
