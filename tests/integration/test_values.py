"""Every type of docs/EVENTS.md from a real server, through a slot, whatever the role's settings.

The daemon's own role and its database have settings that would write values differently; the
session pins its own. The output of stream and sequencer is compared with the contract.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import conninfo, sql

from cdc.config import Config, Log, Source
from cdc.config.value_options import Values
from cdc.decode.messages import Relation
from cdc.events import LSN
from cdc.publication.objects import create_slot
from cdc.sequence.state import Pause, Step
from cdc.source.connection import connect
from cdc.source.lookups import look_up
from cdc.source.server import wal_end
from cdc.source.stream import Stream
from tests.fixtures.servers import Database
from tests.property.stream import Session, position

SECONDS = 120.0
ROLE_SETTINGS = {
    "DateStyle": "German, DMY",
    "TimeZone": "America/New_York",
    "bytea_output": "escape",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "-5",
    "client_encoding": "LATIN1",
    "quote_all_identifiers": "on",
    "search_path": "public",
}
LONG = "".join(uuid.UUID(int=n * 0x9E3779B97F4A7C15 + 1).hex for n in range(300))


class Case(NamedTuple):
    type: str
    literal: str
    expected: object


CASES = [
    Case("smallint", "-32768", -32768),
    Case("integer", "2147483647", 2147483647),
    Case("bigint", "-9223372036854775808", -9223372036854775808),
    Case("oid", "4294967295", 4294967295),
    Case("real", "3.3", 3.3),
    Case("real", "'NaN'", "NaN"),
    Case("real", "1e20", 1e20),
    Case("double precision", "0.1 + 0.2::float8", 0.1 + 0.2),
    Case("double precision", "'-Infinity'", "-Infinity"),
    Case("double precision", "5e-324", 5e-324),
    Case("numeric(3,2)", "1.1", "1.10"),
    Case("numeric(4)", "10", "10"),
    Case("numeric", "10.1111", "10.1111"),
    Case("numeric(6,4)", "22.22", "22.2200"),
    Case("numeric", "1e30", "1" + "0" * 30),
    Case("numeric", "'NaN'", "NaN"),
    Case("boolean", "true", expected=True),
    Case("boolean", "false", expected=False),
    Case("text", "''", ""),
    Case("text", "E'say \"hi\"\\\\ \\n\\t\\x01\\x7f'", 'say "hi"\\ \n\t\x01\x7f'),
    Case("text", "'𝄞 Zoë 100 %b'", "𝄞 Zoë 100 %b"),
    Case("text", "'__debezium_unavailable_value'", "__debezium_unavailable_value"),
    Case("varchar(8)", "'null'", "null"),
    Case("char(4)", "'ab'", "ab  "),
    Case('"char"', "'a'", "a"),
    Case("name", "'n'", "n"),
    Case("mood", "'it''s \"ok\"'", 'it\'s "ok"'),
    Case("mood[]", "ARRAY['it''s \"ok\"']::mood[]", ['it\'s "ok"']),
    Case("positive", "5", 5),  # a domain is its base type
    Case("pair", "ROW(1, 'a,b')", '(1,"a,b")'),
    Case("json", '\'{"a" : 1, "a":2}\'', '{"a" : 1, "a":2}'),
    Case("jsonb", "'{\"b\" : 1.10}'", '{"b": 1.10}'),
    Case("uuid", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    Case("inet", "'192.168.0.1/24'", "192.168.0.1/24"),
    Case("inet", "'192.168.0.1'", "192.168.0.1"),
    Case("cidr", "'2001:db8::/32'", "2001:db8::/32"),
    Case("macaddr", "'08-00-2B-01-02-03'", "08:00:2b:01:02:03"),
    Case("macaddr8", "'08002B0102030405'", "08:00:2b:01:02:03:04:05"),
    Case("money", "'1234.11'", "1234.11"),
    Case("money", "'-92233720368547758.08'", "-92233720368547758.08"),
    Case("bit(5)", "B'10101'", "10101"),
    Case("varbit", "B''", ""),
    Case("interval", "'1 year 2 mons -3 days 04:05:06.7'", "1 year 2 mons -3 days +04:05:06.7"),
    Case("interval", "'0'", "00:00:00"),
    Case("integer[]", "'{1,NULL,3}'", [1, None, 3]),
    Case("integer[]", "'{}'", []),
    Case("integer[]", "'[0:1]={1,2}'", "[0:1]={1,2}"),
    Case(
        "text[]",
        "ARRAY['a,b', '\"', '{}', NULL, 'NULL', '']",
        ["a,b", '"', "{}", None, "NULL", ""],
    ),
    Case("timestamptz[]", "ARRAY['2026-01-02 03:04:05Z'::timestamptz]", ["2026-01-02T03:04:05Z"]),
    Case("bytea[]", "ARRAY['\\x00ff'::bytea]", ["AP8="]),
    Case("int4range", "'[1,5)'", "[1,5)"),
    Case("tsrange", "'[2026-01-01,)'", '["2026-01-01 00:00:00",)'),
    Case("xml", "'<a b=\"c\"/>'", '<a b="c"/>'),
    Case("point", "'(1,2.5)'", "(1,2.5)"),
    Case("pg_lsn", "'0/16E9088'", "0/16E9088"),
    Case("tsvector", "'fat:2 cat'", "'cat' 'fat':2"),
    Case("bytea", "'\\x'", ""),
    Case("bytea", "'\\x000102'", "AAEC"),
    Case("bytea", "'\\xdeadbeef5c27'", "3q2+71wn"),
    Case("date", "'1970-01-01'", 0),
    Case("date", "'2016-11-04'", 17109),
    Case("date", "'1582-10-04'", -141438),
    Case("date", "'9999-12-31'", 2932896),
    Case("date", "'10000-01-01'", "10000-01-01"),
    Case("date", "'0044-03-15 BC'", "0044-03-15 BC"),
    Case("date", "'infinity'", "infinity"),
    Case("date", "'-infinity'", "-infinity"),
    Case("time", "'13:51:30.123789'", 49890123789),
    Case("time(2)", "'13:51:30.129'", 49890130),
    Case("time", "'24:00:00'", 86400000000),
    Case("timetz", "'13:51:30.123789+02'", "13:51:30.123789+02"),
    Case("timestamp(0)", "'2016-11-04 13:51:30.123456'", 1478267490000),
    Case("timestamp(3)", "'2016-11-04 13:51:30.123456'", 1478267490123),
    Case("timestamp(4)", "'2016-11-04 13:51:30.123456'", 1478267490123500),
    Case("timestamp", "'2016-11-04 13:51:30.123456'", 1478267490123456),
    Case("timestamp", "'1969-12-31 23:59:59.999999'", -1),
    Case("timestamp", "'0001-01-01 00:00:00'", -62135596800000000),
    Case("timestamp", "'294247-01-01 23:59:59.99'", "294247-01-01 23:59:59.99"),
    Case("timestamp", "'0044-03-15 12:00:00 BC'", "0044-03-15 12:00:00 BC"),
    Case("timestamp(3)", "'infinity'", "infinity"),
    Case("timestamp", "'-infinity'", "-infinity"),
    Case("timestamptz", "'2026-01-02 05:04:05.123456+02'", "2026-01-02T03:04:05.123456Z"),
    Case("timestamptz", "'2026-07-02 03:04:05+00'", "2026-07-02T03:04:05Z"),
    Case("timestamptz(2)", "'2026-01-02 03:04:05.129Z'", "2026-01-02T03:04:05.13Z"),
    Case("timestamptz", "'21016-11-04 13:51:30+00'", "21016-11-04 13:51:30+00"),
    Case("timestamptz", "'0044-03-15 12:00:00+00 BC'", "0044-03-15 12:00:00+00 BC"),
    Case("timestamptz", "'infinity'", "infinity"),
    Case("timestamptz", "'-infinity'", "-infinity"),
    Case("numeric", "'-Infinity'", "-Infinity"),
    Case("int4multirange", "'{[1,3),[5,6)}'", "{[1,3),[5,6)}"),
]


@pytest.fixture
def role_dsn(database: Database) -> Iterator[str]:
    """Give the DSN of a role whose settings, and the database's, write values differently."""
    name = f"r_{uuid.uuid4().hex[:12]}"
    role = sql.Identifier(name)
    with database.connect() as connection:
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN SUPERUSER REPLICATION PASSWORD 'pw'").format(role)
        )
        for setting, value in ROLE_SETTINGS.items():
            names = sql.Identifier(setting), sql.Literal(value)
            connection.execute(sql.SQL("ALTER ROLE {} SET {} = {}").format(role, *names))
        of_database = sql.SQL("ALTER DATABASE {} SET DateStyle = 'SQL, DMY'")
        connection.execute(of_database.format(sql.Identifier(database.name)))
    yield conninfo.make_conninfo(database.dsn, user=name, password="pw")
    with database.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s",
            [name],
        )
        connection.execute(sql.SQL("DROP OWNED BY {0}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))


class Capture:
    """A slot of the role; `events` reads what is new since the last call, without tombstones."""

    def __init__(self, dsn: str, values: Values | None = None) -> None:
        log, values = Log(bootstrap_servers="localhost:1"), values or Values()
        self.config = Config(pipeline="values", source=Source(dsn=dsn), log=log, values=values)
        self.sql = connect(self.config)
        self.sql.execute("CREATE PUBLICATION lockstep_values FOR ALL TABLES")
        self.start = create_slot(self.sql, self.config.slot)
        self.wake_fd = os.eventfd(0)
        self.stream = Stream(self.config, self.wake_fd)
        self.stream.start()
        self.session = Session(position(end_lsn=self.start), {}, values=values)

    def events(self) -> list[dict[str, Any]]:
        target = wal_end(self.sql)
        deadline = time.monotonic() + SECONDS
        # The walsender reports its position when it is idle, or when it is asked to.
        while max(self.stream.keepalive_lsn, self.session.sequencer.end_lsn) < target:
            assert time.monotonic() < deadline, "the walsender did not come this far"
            self._feed(self.stream.read())
            self.stream.wait(0.05, for_frames=True)
        found = [json.loads(one.value) for one in self.session.waiting() if one.value]
        return sorted(found, key=lambda event: int(event["source"]["seq"]))

    def _feed(self, chunk: bytes) -> None:
        at = 0
        step: Step | Pause | None = None
        while chunk and step is not Pause.MORE:
            at, step = self.session.sequencer.feed(chunk, at)
            if step is Pause.OTHER:
                at = self.stream.other(chunk, at)
            elif isinstance(step, Relation):
                oid = step.relation_id
                facts = look_up(self.sql, "lockstep_values", [oid])[oid].facts
                self.session.keys[step.relation_id] = facts.primary_key
                self.session.describe(step)
        if chunk:
            self.stream.keep(chunk, at)

    def close(self) -> None:
        self.stream.close()
        self.sql.close()
        os.close(self.wake_fd)


@pytest.fixture
def capture(role_dsn: str, database: Database) -> Iterator[Capture]:
    database.execute(
        "CREATE SCHEMA shop",
        """CREATE TYPE mood AS ENUM ('sad', 'it''s "ok"')""",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        "CREATE TYPE pair AS (a int, b text)",
    )
    capture = Capture(role_dsn)
    yield capture
    capture.close()


def test_every_type_is_what_the_contract_says_whatever_the_roles_settings(
    capture: Capture, database: Database
) -> None:
    columns = ", ".join(f"c{i} {case.type}" for i, case in enumerate(CASES))
    literals = ", ".join(case.literal for case in CASES)
    database.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, {columns})",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        f"INSERT INTO t VALUES (1, {literals})",
        "INSERT INTO t (id) VALUES (2)",
        "UPDATE t SET id = id WHERE id = 1",
        "DELETE FROM t WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
    )
    complete = {"id": 1} | {f"c{i}": case.expected for i, case in enumerate(CASES)}
    empty: dict[str, object] = {"id": 2} | {f"c{i}": None for i in range(len(CASES))}
    created, nulls, updated, deleted, deleted_nulls = capture.events()
    for row in (created["after"], updated["before"], updated["after"], deleted["before"]):
        differ = {CASES[int(k[1:])]: v for k, v in row.items() if k != "id" and v != complete[k]}
        assert differ == {}
        assert row == complete
        for i, case in enumerate(CASES):  # 1 is not true, "1" is not 1
            assert isinstance(row[f"c{i}"], bool) == isinstance(case.expected, bool)
    assert nulls["after"] == deleted_nulls["before"] == empty
    assert [e["op"] for e in (created, nulls, updated, deleted, deleted_nulls)] == list("ccudd")


def test_unchanged_toast_is_named_under_default_and_filled_under_full(
    capture: Capture, database: Database
) -> None:
    database.execute(
        "CREATE TABLE d (id int PRIMARY KEY, n int, body text, doc jsonb)",
        "ALTER TABLE d ALTER body SET STORAGE EXTERNAL, ALTER doc SET STORAGE EXTERNAL",
        "CREATE TABLE f (LIKE d INCLUDING ALL)",
        "ALTER TABLE f REPLICA IDENTITY FULL",
        *[
            statement
            for table in "df"
            for statement in (
                f"INSERT INTO {table} VALUES (1, 1, '{LONG}', '\"{LONG}\"')",
                f"UPDATE {table} SET n = 2",
                f"UPDATE {table} SET body = NULL, n = 3",
            )
        ],
    )
    events = capture.events()
    complete = {"id": 1, "n": 2, "body": LONG, "doc": f'"{LONG}"'}
    placeholder = "__debezium_unavailable_value"
    assert events[1]["after"] == {"id": 1, "n": 2, "body": placeholder, "doc": placeholder}
    assert events[1]["source"]["unchanged"] == ["body", "doc"]
    assert events[2]["after"] == {"id": 1, "n": 3, "body": None, "doc": placeholder}
    assert events[2]["source"]["unchanged"] == ["doc"]
    assert events[4]["after"] == complete
    assert events[4]["before"] == complete | {"n": 1}
    assert events[5]["after"] == complete | {"n": 3, "body": None}
    assert all("unchanged" not in event["source"] for event in (events[0], *events[3:]))


def test_a_toasted_key_that_stays_is_an_update_under_its_own_key(
    capture: Capture, database: Database
) -> None:
    key = LONG[:2600]
    database.execute(
        "CREATE TABLE t (id text PRIMARY KEY, n int)",
        "ALTER TABLE t ALTER id SET STORAGE EXTERNAL",
        f"INSERT INTO t VALUES ('{key}', 1)",
        "UPDATE t SET n = 2",
    )
    events = capture.events()
    assert [event["op"] for event in events] == ["c", "u"]
    assert events[1]["after"] == {"id": key, "n": 2}
    assert "unchanged" not in events[1]["source"]


def test_any_name_reaches_the_event_unharmed(capture: Capture, database: Database) -> None:
    quoted = '"Quoted_"" . Schema"'
    database.execute(
        f"CREATE SCHEMA {quoted}",
        f"""CREATE TABLE {quoted}."Ünï.%b\\'𝄞" ("a""b" int, "%s %" text, "c.d\\" int,
            PRIMARY KEY ("c.d\\", "a""b"))""",
        f"""INSERT INTO {quoted}."Ünï.%b\\'𝄞" VALUES (1, '%', 2)""",
    )
    [event] = capture.events()
    assert event["source"]["schema"] == 'Quoted_" . Schema'
    assert event["source"]["table"] == "Ünï.%b\\'𝄞"
    assert event["after"] == {'a"b': 1, "%s %": "%", "c.d\\": 2}
    assert capture.session.relations.schema_id == 1


def test_keys_identities_and_truncates(capture: Capture, database: Database) -> None:
    database.execute(
        "CREATE TABLE shop.p (a int, b int, n int, PRIMARY KEY (b, a))",
        "CREATE TABLE shop.i (a int NOT NULL, b int NOT NULL, n int)",
        "CREATE UNIQUE INDEX ON shop.i (b, a)",
        "ALTER TABLE shop.i REPLICA IDENTITY USING INDEX i_b_a_idx",
        "CREATE TABLE shop.k (n int)",
        "INSERT INTO shop.p VALUES (1, 2, 3)",
        "UPDATE shop.p SET a = 9",
        "DELETE FROM shop.p",
        "INSERT INTO shop.i VALUES (1, 2, 3)",
        "UPDATE shop.i SET n = 4",
        "DELETE FROM shop.i",
        "INSERT INTO shop.k VALUES (1)",
        "TRUNCATE shop.p, shop.k",
    )
    events = capture.events()
    reported = [(e["source"]["table"], e["op"], e["before"], e["after"]) for e in events]
    assert reported[:8] == [
        ("p", "c", None, {"a": 1, "b": 2, "n": 3}),
        ("p", "d", {"b": 2, "a": 1}, None),
        ("p", "c", None, {"a": 9, "b": 2, "n": 3}),
        ("p", "d", {"b": 2, "a": 9}, None),
        ("i", "c", None, {"a": 1, "b": 2, "n": 3}),
        ("i", "u", None, {"a": 1, "b": 2, "n": 4}),
        ("i", "d", {"a": 1, "b": 2}, None),
        ("k", "c", None, {"n": 1}),
    ]
    assert sorted(reported[8:]) == [("k", "t", None, None), ("p", "t", None, None)]
    assert [e["source"]["ordinal"] for e in events] == [1, 1, 1, 1, 1, 1, 1, 1, 1, 2]
    assert [e["source"]["seq"] for e in events] == list(range(1, 11))
    commits = [LSN.parse(e["source"]["commit_lsn"]) for e in events]
    assert commits == sorted(commits)


def test_a_rolled_back_transaction_leaves_nothing(capture: Capture, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with psycopg.connect(database.dsn) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("SAVEPOINT s")
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("ROLLBACK TO s")
        connection.execute("INSERT INTO t VALUES (3)")
        connection.commit()
        connection.execute("INSERT INTO t VALUES (4)")
        connection.rollback()
    assert [event["after"]["id"] for event in capture.events()] == [1, 3]


def test_names_in_values_do_not_depend_on_the_roles_settings(
    capture: Capture, database: Database
) -> None:
    """Values of regclass and similar types depend on the session's search path and quoting."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, r regclass)", "INSERT INTO t VALUES (1, 'public.t')"
    )
    [event] = capture.events()
    assert event["after"]["r"] == "public.t"
