"""Everything that would lose changes stops the daemon with exit code 78 and names the gap.

Supervisors do not restart after exit code 78: none of these repairs itself.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from cdc.log import names, records
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until

_TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, n int)",
    "CREATE TABLE orders (id int PRIMARY KEY, n int)",
)
_CONFIG = 78
_PERMISSION = 77


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    """A pipeline that has published a row and has been stopped."""
    line = pipeline(*_TABLES)
    run_once(line, 1)
    return line


def run_once(line: PipelineUnderTest, key: int) -> None:
    """Publish a row, and stop."""
    daemon = line.start().wait_ready()
    seq = line.resume()[1].seq
    line.database.execute(f"INSERT INTO users VALUES ({key}, 1)")
    wait_until(lambda: line.resume()[1].seq == seq + 1, "the row does not arrive")
    assert daemon.term() == 0


def running(line: PipelineUnderTest, key: int, config_file: Path | None = None) -> None:
    """Start a daemon, and publish a row."""
    line.start(config_file=config_file).wait_ready()
    seq = line.resume()[1].seq
    line.database.execute(f"INSERT INTO users VALUES ({key}, 1)")
    wait_until(lambda: line.resume()[1].seq == seq + 1, "the row does not arrive")


def admin(line: PipelineUnderTest) -> AdminClient:
    return AdminClient({"bootstrap.servers": line.bootstrap})


def delete_topic(line: PipelineUnderTest, topic: str) -> None:
    client = admin(line)
    client.delete_topics([topic])[topic].result(120)
    wait_until(lambda: topic not in client.list_topics(timeout=60).topics, "it is still there")


def create_topic(line: PipelineUnderTest, topic: str, partitions: int) -> None:
    client = admin(line)
    client.create_topics([NewTopic(topic, partitions, 1)])[topic].result(120)


def users_topic(line: PipelineUnderTest) -> str:
    return names.data_topic(line.config.prefix, "public", "users")


def produce(line: PipelineUnderTest, key: bytes, value: bytes) -> None:
    """Write to the resume topic, which only Lockstep should do."""
    producer = Producer({"bootstrap.servers": line.bootstrap})
    producer.produce(names.resume_topic(line.config.prefix), value, key)
    assert producer.flush(120) == 0


def end_walsender(line: PipelineUnderTest) -> None:
    line.database.execute(
        "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
        f" WHERE slot_name = '{line.config.slot}' AND active_pid IS NOT NULL"
    )


def drop_slot(line: PipelineUnderTest) -> None:
    """Drop the slot, also while a daemon keeps reconnecting."""

    def dropped() -> bool:
        try:
            end_walsender(line)
            line.database.execute(f"SELECT pg_drop_replication_slot('{line.config.slot}')")
        except psycopg.errors.ObjectInUse:
            return False
        return True

    wait_until(dropped, "the slot is busy", pause=0.0)


def create_slot(line: PipelineUnderTest, plugin: str = "pgoutput") -> None:
    line.database.execute(
        f"SELECT pg_create_logical_replication_slot('{line.config.slot}', '{plugin}')"
    )


# --- the slot ---


def test_a_slot_dropped_while_stopped_is_a_gap(line: PipelineUnderTest) -> None:
    drop_slot(line)
    line.refused(_CONFIG, f'slot "{line.config.slot}" does not exist', "cdc setup")


@pytest.mark.long("as while stopped")
def test_a_slot_dropped_while_running_is_a_gap(line: PipelineUnderTest) -> None:
    running(line, 2)
    drop_slot(line)
    line.ends(line.daemon, _CONFIG, f'"{line.config.slot}" does not exist')


def test_a_slot_recreated_is_a_gap_though_nothing_happened(line: PipelineUnderTest) -> None:
    drop_slot(line)
    create_slot(line)
    line.refused(_CONFIG, f'slot "{line.config.slot}" is at', str(line.resume()[1].end_lsn))


@pytest.mark.long("as while stopped")
def test_a_slot_recreated_while_running_is_a_gap(line: PipelineUnderTest) -> None:
    running(line, 2)
    daemon = line.daemon
    daemon.freeze()
    drop_slot(line)
    line.database.execute("INSERT INTO users VALUES (3, 1)")
    create_slot(line)
    daemon.thaw()
    line.ends(daemon, _CONFIG, f'slot "{line.config.slot}" is at')


def test_a_slot_recreated_with_another_plugin_is_refused(line: PipelineUnderTest) -> None:
    drop_slot(line)
    create_slot(line, "test_decoding")
    line.refused(_CONFIG, "test_decoding")


def test_a_slot_that_somebody_advanced_is_a_gap(line: PipelineUnderTest) -> None:
    line.database.execute(
        "INSERT INTO users VALUES (2, 1)",
        f"SELECT pg_replication_slot_advance('{line.config.slot}', pg_current_wal_lsn())",
    )
    output = line.refused(_CONFIG, f'slot "{line.config.slot}" is at', "no longer in the stream")
    assert str(line.resume()[1].end_lsn) in output


def test_a_second_pipeline_on_another_slot_is_refused_and_harms_nothing(
    line: PipelineUnderTest,
) -> None:
    other = line.write("other.yaml", source__slot=f"other_{line.database.name}")
    create = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')::text"
    line.query(create, f"other_{line.database.name}")
    running(line, 2)
    first = line.daemon
    line.refused(_CONFIG, f"other_{line.database.name}", line.config.slot, config_file=other)
    line.database.execute("INSERT INTO users VALUES (3, 1)")
    wait_until(lambda: line.resume()[1].seq == 3, "the first daemon no longer works")
    assert first.process.poll() is None
    converge(line.config)


def test_another_pipeline_with_the_same_prefix_is_refused(line: PipelineUnderTest) -> None:
    other = line.write(
        "other.yaml",
        pipeline="another",
        log__prefix=line.config.prefix,
        source__slot=line.config.slot,
        source__publication=line.config.publication,
    )
    line.refused(_CONFIG, 'no resume record of pipeline "another"', config_file=other)


# --- the publication ---


def test_a_publication_dropped_while_stopped_is_a_gap(line: PipelineUnderTest) -> None:
    line.database.execute(f"DROP PUBLICATION {line.config.publication}")
    line.refused(_CONFIG, f'"{line.config.publication}" does not exist')


@pytest.mark.long("as while stopped")
def test_a_publication_dropped_while_running_is_a_gap(line: PipelineUnderTest) -> None:
    running(line, 2)
    line.database.execute(
        f"DROP PUBLICATION {line.config.publication}", "INSERT INTO users VALUES (3, 1)"
    )
    line.ends(line.daemon, _CONFIG, f'"{line.config.publication}" does not exist')


@pytest.mark.long("as when it is dropped")
def test_a_publication_recreated_is_a_gap(line: PipelineUnderTest) -> None:
    name = line.config.publication
    line.database.execute(
        f"DROP PUBLICATION {name}", f"CREATE PUBLICATION {name} FOR TABLE users, orders"
    )
    line.refused(_CONFIG, name, "dropped and created again")


def test_a_table_taken_out_of_the_publication_is_a_gap(line: PipelineUnderTest) -> None:
    line.database.execute(f"ALTER PUBLICATION {line.config.publication} DROP TABLE orders")
    line.refused(_CONFIG, "public.orders", line.config.publication)


def test_a_table_taken_out_and_put_back_while_stopped_is_a_gap(line: PipelineUnderTest) -> None:
    """What was written in between is in no stream, and nothing else shows it."""
    name = line.config.publication
    line.database.execute(
        f"ALTER PUBLICATION {name} DROP TABLE orders",
        "INSERT INTO orders VALUES (1, 1)",
        f"ALTER PUBLICATION {name} ADD TABLE orders",
    )
    line.refused(_CONFIG, "public.orders", name)


@pytest.mark.long("as while stopped")
def test_a_table_taken_out_and_put_back_while_running_is_a_gap(line: PipelineUnderTest) -> None:
    running(line, 2)
    name = line.config.publication
    line.database.execute(
        f"ALTER PUBLICATION {name} DROP TABLE orders",
        "INSERT INTO orders VALUES (1, 1)",
        f"ALTER PUBLICATION {name} ADD TABLE orders",
        "INSERT INTO users VALUES (3, 1)",
        "INSERT INTO orders VALUES (2, 1)",
    )
    line.ends(line.daemon, _CONFIG, "public.orders", name)


# --- the log ---


def test_without_setup_nothing_is_started(pipeline: NewPipeline) -> None:
    line = pipeline(*_TABLES)
    fresh = line.write("fresh.yaml", pipeline="fresh", source__slot=line.config.slot)
    line.refused(_CONFIG, "no resume record", "cdc setup", config_file=fresh)


def test_a_topic_deleted_is_a_gap(line: PipelineUnderTest) -> None:
    topic = users_topic(line)
    delete_topic(line, topic)
    line.refused(_CONFIG, f"topic {topic} was deleted")


@pytest.mark.long("as while stopped")
def test_a_topic_deleted_while_running_is_a_gap(line: PipelineUnderTest) -> None:
    """After the time that a broker is allowed: a topic may be unknown for a moment."""
    file = line.write("hasty.yaml", log__kafka={"transaction.timeout.ms": 4_000})
    running(line, 2, file)
    topic = users_topic(line)
    delete_topic(line, topic)
    line.database.execute("INSERT INTO users VALUES (3, 1)")
    line.ends(line.daemon, _CONFIG, topic)


@pytest.mark.long("as when it is dropped")
def test_a_topic_recreated_is_a_gap(line: PipelineUnderTest) -> None:
    """It has the right name and number of partitions, and none of its former events."""
    topic = users_topic(line)
    delete_topic(line, topic)
    create_topic(line, topic, 3)
    line.refused(_CONFIG, topic)


def test_partitions_added_are_refused(line: PipelineUnderTest) -> None:
    topic, client = users_topic(line), admin(line)
    client.create_partitions([NewPartitions(topic, 5)])[topic].result(120)
    wait_until(
        lambda: len(client.list_topics(topic, timeout=60).topics[topic].partitions) == 5, "not 5"
    )
    line.refused(_CONFIG, f"topic {topic} has 5 partitions", "pins 3")


@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_a_resume_topic_without_its_record_is_a_gap(how: str, line: PipelineUnderTest) -> None:
    topic = names.resume_topic(line.config.prefix)
    delete_topic(line, topic)
    if how == "emptied":
        create_topic(line, topic, 1)
    line.refused(_CONFIG, topic)


@pytest.mark.parametrize("part", ["identity", "position"])
def test_a_record_of_a_newer_format_is_refused(part: str, line: PipelineUnderTest) -> None:
    identity, position = line.resume()
    known = msgspec.json.decode(records.encode(identity if part == "identity" else position))
    newer = known["format"] + 1
    key = records.resume_key(line.config.pipeline, part)
    produce(line, key, msgspec.json.encode(known | {"format": newer, "novelty": True}))
    line.refused(_CONFIG, f"format {newer}", names.resume_topic(line.config.prefix))


def test_a_record_that_is_no_record_is_refused(line: PipelineUnderTest) -> None:
    produce(line, records.resume_key(line.config.pipeline, "position"), b"{}")
    line.refused(_CONFIG, names.resume_topic(line.config.prefix))


# --- the source ---


def test_another_database_of_the_server_is_refused(line: PipelineUnderTest) -> None:
    dsn = psycopg.conninfo.make_conninfo(line.database.dsn, dbname="postgres")
    output = line.refused(_CONFIG, config_file=line.write("other.yaml", source__dsn=dsn))
    assert line.database.name in output or "database" in output


@pytest.mark.long("another server; test_slot_lost has a dump in another cluster")
def test_another_cluster_is_refused_though_it_has_such_a_slot(
    line: PipelineUnderTest, killable_pipeline: NewPipeline
) -> None:
    """Its slot may even be below the log's position: only the system identifier shows it."""
    other = killable_pipeline(*_TABLES)
    here = line.config
    other.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')::text", here.slot)
    other.database.execute(f"CREATE PUBLICATION {here.publication} FOR TABLE users, orders")
    file = line.write("other.yaml", source__dsn=other.database.dsn)
    line.refused(_CONFIG, line.resume()[0].system_identifier, config_file=file)


def test_a_role_without_replication_is_no_case_for_trying_again(line: PipelineUnderTest) -> None:
    role = f"plain_{line.database.name}"
    line.database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    try:
        dsn = psycopg.conninfo.make_conninfo(line.database.dsn, user=role, password="x")
        file = line.write("plain.yaml", source__dsn=dsn)
        line.refused(_PERMISSION, "REPLICATION", config_file=file)
    finally:
        line.database.execute(f"DROP ROLE {role}")


def test_a_wrong_password_is_no_case_for_trying_again(line: PipelineUnderTest) -> None:
    """The server asks this one role for its password, whatever it allows others."""
    role = f"locked_{line.database.name}"
    with line.database.connect() as connection:
        row = connection.execute("SELECT pg_read_file(f), f FROM current_setting('hba_file') f")
        rules, file = row.fetchone() or ("", "")
        connection.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'right'".encode())
        rule = f"host all {role} 127.0.0.1/32 scram-sha-256"
        try:
            write_rules(connection, file, f"{rule}\n{rules}")
            dsn = psycopg.conninfo.make_conninfo(line.database.dsn, user=role, password="wrong")
            output = line.refused(
                _PERMISSION, "password", config_file=line.write("locked.yaml", source__dsn=dsn)
            )
            assert "wrong" not in output
        finally:
            write_rules(connection, file, rules)
            connection.execute(f"DROP ROLE {role}".encode())


def write_rules(connection: psycopg.Connection, file: str, rules: str) -> None:
    """Make the server write its pg_hba.conf, wherever it runs, and reload it."""
    lines = [text for text in rules.split("\n") if text and not text.startswith("#")]
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE rules (n serial, rule text)")
        cursor.executemany("INSERT INTO rules (rule) VALUES (%s)", [(each,) for each in lines])
        cursor.execute(f"COPY (SELECT rule FROM rules ORDER BY n) TO '{file}'".encode())
        cursor.execute("DROP TABLE rules")
        cursor.execute("SELECT pg_reload_conf()")
