"""The proof reads database and log independently of what wrote them.

Here the log is written by hand, by docs/EVENTS.md, so the contract is tested and not the daemon:
every type's JSON is here as a literal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from msgspec.structs import replace

from cdc.config import Config, Log, Source, TableRule
from cdc.config.model import Delta
from cdc.events import LSN
from cdc.log import records, topics
from cdc.playground.demo.proof import prove
from tests.fixtures.converge import converge

if TYPE_CHECKING:
    from tests.fixtures.servers import Database, KafkaServer

# Type, a value in SQL, and what docs/EVENTS.md makes of it.
VALUES: list[tuple[str, str, Any]] = [
    ("smallint", "-5", -5),
    ("bigint", "9007199254740993", 9007199254740993),
    ("oid", "4294967295", 4294967295),
    ("real", "1.1", 1.1),
    ("double precision", "1e20", 1e20),
    ("double precision", "'NaN'", "NaN"),
    ("double precision", "'-Infinity'", "-Infinity"),
    ("numeric(10,2)", "12.5", "12.50"),
    ("numeric", "'NaN'", "NaN"),
    ("boolean", "true", True),
    ("text", "E'a\"\\n\\u00e9'", 'a"\né'),
    ("char(5)", "'ab'", "ab   "),
    ("name", "'n'", "n"),
    ("json", "'{\"a\":  1}'", '{"a":  1}'),
    ("jsonb", "'{\"a\":  1}'", '{"a": 1}'),
    ("uuid", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("inet", "'10.0.0.1/8'", "10.0.0.1/8"),
    ("money", "1234.5", "1234.50"),
    ("money[]", "'{-0.05,NULL}'", ["-0.05", None]),
    ("bit(3)", "B'101'", "101"),
    ("interval", "'1 day 2 hours'", "1 day 02:00:00"),
    ("integer[]", "'{1,NULL,3}'", [1, None, 3]),
    ("integer[]", "'{{1,2},{NULL,4}}'", [[1, 2], [None, 4]]),
    ("integer[]", "'[0:1]={1,2}'", "[0:1]={1,2}"),
    ("text[]", "ARRAY['a,b', NULL, '']", ["a,b", None, ""]),
    ("text[]", "'{}'", []),
    ("numeric(6,2)[]", "'{1.5,NaN}'", ["1.50", "NaN"]),
    ("char(3)[]", "'{ab}'", ["ab "]),
    ("date[]", "'{1970-01-11,infinity,NULL}'", [10, "infinity", None]),
    ("timestamp(3)[]", "ARRAY['1970-01-01 00:00:01.5'::timestamp]", [1_500]),
    ("mood[]", "ARRAY['so so', NULL]::mood[]", ["so so", None]),
    ("positive", "5", 5),
    ("int4range", "'[1,5)'", "[1,5)"),
    ("bytea", r"'\x00ff' || repeat('x', 60)::bytea", "AP94" + "eHh4" * 19 + "eHg="),
    ("date", "'1970-01-11'", 10),
    ("date", "'infinity'", "infinity"),
    ("date", "'0044-03-15 BC'", "0044-03-15 BC"),
    ("time", "'24:00:00'", 86_400_000_000),
    ("time(3)", "'00:00:01.5'", 1_500),
    ("timetz", "'13:51:30.123789+02'", "13:51:30.123789+02"),
    ("timestamp", "'1969-12-31 23:59:59.999999'", -1),
    ("timestamp(3)", "'1970-01-01 00:00:01.5'", 1_500),
    ("timestamp", "'-infinity'", "-infinity"),
    ("timestamptz", "'2026-01-02 03:04:05.1234+02'", "2026-01-02T01:04:05.1234Z"),
    ("timestamptz", "'2026-01-02 00:00:00+00'", "2026-01-02T00:00:00Z"),
    ("timestamptz", "'10000-01-01 00:00:00+00'", "10000-01-01 00:00:00+00"),
    ("text", "NULL", None),
    ("mood", "'so so'", "so so"),
]
# Above anything that a test's server writes.
_LAST = LSN(1 << 62)


class Writer:
    """A pipeline whose log is written by hand: one table, one transaction, one frontier."""

    def __init__(self, database: Database, kafka: KafkaServer, prefix: str) -> None:
        self.config = Config(
            pipeline=prefix,
            source=Source(dsn=database.dsn),
            log=Log(bootstrap_servers=kafka.bootstrap, partitions=1),
        )
        self.database = database
        self.topic = topics.data_topic(self.config, "public", "t").name
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap})
        wanted = [topics.data_topic(self.config, "public", "t")]
        self._admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        topics.ensure(self._admin, self.config, wanted + topics.internal_topics(self.config))

    def publish(self, key: dict[str, Any], row: dict[str, Any], seq: int) -> None:
        source = {"schema": "public", "table": "t", "seq": seq, "epoch": 1, "ordinal": seq}
        event = {"op": "c", "before": None, "after": row}
        event["source"] = {**source, "commit_lsn": "0/100"}
        self._producer.produce(self.topic, orjson.dumps(event), orjson.dumps(key), 0)
        self._producer.flush()

    def cut(self, events: int) -> None:
        """Write a frontier after all of the WAL, also after what the server writes by itself."""
        record = records.FrontierRecord(
            pipeline=self.config.pipeline,
            epoch=1,
            lsn=_LAST,
            seq=events,
            committed_at_us=0,
            partitions=((self.topic, 0, events, events),),
        )
        topic = topics.internal_topics(self.config)[1].name
        key = records.frontier_key(record.pipeline)
        self._producer.produce(topic, records.encode(record), key)
        self._producer.flush()


@pytest.fixture
def writer(database: Database, kafka_server: KafkaServer, topic_prefix: str) -> Writer:
    return Writer(database, kafka_server, topic_prefix)


@pytest.fixture
def row(writer: Writer) -> dict[str, Any]:
    """Make the table of all types, and return its one row as the log must show it."""
    columns = ", ".join(f"c{i} {kind}" for i, (kind, _, _) in enumerate(VALUES))
    values = ", ".join(value for _, value, _ in VALUES)
    config = writer.config
    writer.database.execute(
        "CREATE TYPE mood AS ENUM ('so so', 'fine')",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        f"CREATE TABLE t (id integer PRIMARY KEY, {columns})",
        "ALTER TABLE t ADD twice integer GENERATED ALWAYS AS (id * 2) STORED",
        f"CREATE PUBLICATION {config.publication} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{config.slot}', 'pgoutput')",
        f"INSERT INTO t VALUES (1, {values})",
    )
    return {"id": 1, **{f"c{i}": value for i, (_, _, value) in enumerate(VALUES)}}


def test_every_type_is_read_as_the_contract_says(writer: Writer, row: dict[str, Any]) -> None:
    """By the proof's own code from Postgres to JSON; generated columns are not in the log."""
    writer.publish({"id": 1}, row, 1)
    writer.cut(1)
    proof = converge(writer.config, wait_seconds=120)
    assert (proof.tables, proof.rows, proof.events) == (1, 1, 1)


def test_a_wrong_value_a_second_copy_and_a_lost_row_are_found(
    writer: Writer, row: dict[str, Any]
) -> None:
    writer.database.execute("INSERT INTO t (id) VALUES (2)")
    writer.publish({"id": 1}, {**row, "c7": "12.5"}, 1)
    writer.publish({"id": 1}, row, 1)
    writer.cut(1)
    proof = prove(writer.config, wait_seconds=120)
    reported = "\n".join(proof.findings)
    assert not proof.equal
    assert "public.t: 1 rows differ in column c7" in reported
    assert "public.t: 1 rows of the database are missing from the log" in reported
    assert "visible twice" in reported


def test_rows_that_bypassed_the_log_are_reported_by_name(
    writer: Writer, row: dict[str, Any]
) -> None:
    """Copied directly into Delta Lake: they are not missing, and the rest is proved."""
    writer.database.execute("INSERT INTO t (id) VALUES (2), (3)")
    writer.publish({"id": 1}, row, 1)
    writer.cut(1)
    rule = TableRule(snapshot="direct")
    direct = replace(writer.config, tables={"public.t": rule}, delta=Delta(path="/lake"))
    (reported,) = converge(direct, wait_seconds=120).not_in_log
    assert reported == "public.t, 2 of 3 rows (snapshot: direct, straight into Delta Lake)"


def test_a_log_that_keeps_lagging_is_a_finding(writer: Writer, row: dict[str, Any]) -> None:
    """Nothing is confirmed: the proof waits for `wait_seconds`, and reports how far the log is."""
    writer.publish({"id": 1}, row, 1)
    proof = prove(writer.config, wait_seconds=1)
    assert any("the log did not reach" in each for each in proof.findings)


def test_row_filters_and_column_lists_are_the_publications(
    writer: Writer, row: dict[str, Any]
) -> None:
    with psycopg.connect(writer.config.source.dsn, autocommit=True) as connection:
        if connection.info.server_version < 150000:
            pytest.skip("row filters and column lists came with Postgres 15")
        name = writer.config.publication
        connection.execute(f"ALTER PUBLICATION {name} SET TABLE t (id, c0) WHERE (id < 2)".encode())
        connection.execute("INSERT INTO t (id) VALUES (2)")
    writer.publish({"id": 1}, {"id": 1, "c0": row["c0"]}, 1)
    writer.cut(1)
    assert converge(writer.config, wait_seconds=120).rows == 1
