"""The same servers as containers: what a user's own Compose file or CI would start.

Runs if a container engine answers, even where the session has its servers from elsewhere.
"""

from __future__ import annotations

import uuid
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.fixtures.servers import fresh_database

pytestmark = [pytest.mark.containers, pytest.mark.slow]


def test_postgres_in_a_container_decodes_logically(postgres_container: str) -> None:
    with (
        fresh_database(postgres_container) as database,
        database.connect() as connection,
    ):
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
        create = "SELECT lsn FROM pg_create_logical_replication_slot(%s, 'pgoutput')"
        assert connection.execute(create, [database.name]).fetchone() is not None
        connection.execute("INSERT INTO t VALUES (1)")
        peek = (
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'p')"
        )
        row = connection.execute(peek, [database.name]).fetchone()
        assert row is not None
        assert row[0] == 4  # begin, relation, insert, commit


def test_kafka_in_a_container_commits_and_aborts_transactions(kafka_container: str) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": kafka_container})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    producer = Producer({"bootstrap.servers": kafka_container, "transactional.id": topic})
    producer.init_transactions(60)
    for value in ("aborted", "committed"):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        if value == "aborted":
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    settings = {
        "bootstrap.servers": kafka_container,
        "group.id": topic,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
    }
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe([topic])
        (message,) = consumer.consume(1, timeout=30)
        assert message.value() == b"committed"
