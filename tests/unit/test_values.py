"""A column's text and the JSON it becomes: the table of docs/EVENTS.md, line by line."""

from __future__ import annotations

import json

import pytest

from cdc.decode.messages import Insert, Relation, RelationColumn, ReplicaIdentity
from cdc.decode.types import TYPE_NAMES
from cdc.errors import ProtocolError
from tests.property.stream import Session, begin, frame, position

OIDS = {name: oid for oid, name in TYPE_NAMES.items()}
MOOD = 90_001  # a user-defined enum


def value_of(type_id: int, modifier: int, text: bytes | None) -> object:
    """Return what a column's text becomes, alone and with columns after it."""
    found = []
    for padding in (0, 6):
        columns = (
            RelationColumn(True, "id", 23, -1),  # noqa: FBT003
            RelationColumn(False, "value", type_id, modifier),  # noqa: FBT003
            *(RelationColumn(False, f"pad{i}", 25, -1) for i in range(padding)),  # noqa: FBT003
        )
        session = Session(position(), {1: ("id",)})
        relation = Relation(1, "public", "t", ReplicaIdentity.DEFAULT, columns)
        session.feed([begin(), frame(relation)])
        session.feed([frame(Insert(1, (b"1", text, *[None] * padding)))])
        [event] = session.waiting()
        assert event.value
        found.append(json.loads(event.value)["after"]["value"])
    assert found[0] == found[1]
    assert type(found[0]) is type(found[1])
    result: object = found[0]
    return result


CASES: list[tuple[str, int, str, object]] = [
    ("int2", -1, "-32768", -32768),
    ("int4", -1, "2147483647", 2147483647),
    ("int8", -1, "-9223372036854775808", -9223372036854775808),
    ("oid", -1, "4294967295", 4294967295),
    ("float4", -1, "3.3", 3.3),  # not widened
    ("float4", -1, "1e+20", 1e20),
    ("float8", -1, "5e-324", 5e-324),
    ("float8", -1, "0.1", 0.1),
    ("float8", -1, "NaN", "NaN"),
    ("float8", -1, "Infinity", "Infinity"),
    ("float4", -1, "-Infinity", "-Infinity"),
    ("numeric", -1, "10.1111", "10.1111"),
    ("numeric", (3 << 16 | 2) + 4, "1.10", "1.10"),
    ("numeric", (6 << 16 | 4) + 4, "22.2200", "22.2200"),
    ("numeric", -1, "NaN", "NaN"),
    ("numeric", -1, "-Infinity", "-Infinity"),
    ("bool", -1, "t", True),
    ("bool", -1, "f", False),
    ("text", -1, "", ""),
    ("text", -1, 'say "hi"\\n\n\t\x01\x7f', 'say "hi"\\n\n\t\x01\x7f'),
    ("text", -1, "𝄞 Zoë", "𝄞 Zoë"),
    ("text", -1, "100 %b %s %", "100 %b %s %"),
    ("text", -1, "__debezium_unavailable_value", "__debezium_unavailable_value"),
    ("text", -1, "null", "null"),
    ("varchar", 24, "null", "null"),
    ("bpchar", 8, "ab  ", "ab  "),  # padded, as Postgres writes it
    ("name", -1, "n", "n"),
    ("json", -1, '{"a" : 1, "a":2}', '{"a" : 1, "a":2}'),
    ("jsonb", -1, '{"a": 1.10}', '{"a": 1.10}'),
    ("uuid", -1, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("inet", -1, "192.168.0.1/24", "192.168.0.1/24"),
    ("cidr", -1, "2001:db8::/32", "2001:db8::/32"),
    ("macaddr", -1, "08:00:2b:01:02:03", "08:00:2b:01:02:03"),
    ("macaddr8", -1, "08:00:2b:01:02:03:04:05", "08:00:2b:01:02:03:04:05"),
    ("money", -1, "-$92,233,720,368,547,758.08", "-92233720368547758.08"),
    ("money", -1, "$0.05", "0.05"),
    ("bit", 5, "10101", "10101"),
    ("varbit", -1, "", ""),
    ("interval", -1, "1 year 2 mons -3 days +04:05:06.7", "1 year 2 mons -3 days +04:05:06.7"),
    ("tsrange", -1, '["2026-01-01 00:00:00",)', '["2026-01-01 00:00:00",)'),
    ("xml", -1, "<a b='c'/>", "<a b='c'/>"),
    ("point", -1, "(1,2)", "(1,2)"),
    ("pg_lsn", -1, "0/16E9088", "0/16E9088"),
    ("bytea", -1, "\\x", ""),
    ("bytea", -1, "\\x000102", "AAEC"),
    ("bytea", -1, "\\xDEADBEEF", "3q2+7w=="),
    ("date", -1, "1970-01-01", 0),
    ("date", -1, "1969-12-31", -1),
    ("date", -1, "2016-11-04", 17109),
    ("date", -1, "1582-10-04", -141438),  # proleptic Gregorian, as Postgres counts
    ("date", -1, "0001-01-01", -719162),
    ("date", -1, "9999-12-31", 2932896),
    ("date", -1, "0044-03-15 BC", "0044-03-15 BC"),
    ("date", -1, "5874897-12-31", "5874897-12-31"),
    ("date", -1, "infinity", "infinity"),
    ("date", -1, "-infinity", "-infinity"),
    ("time", -1, "00:00:00", 0),
    ("time", -1, "13:51:30.123789", 49890123789),
    ("time", 2, "13:51:30.1", 49890100),
    ("time", 3, "24:00:00", 86400000),
    ("time", 4, "13:51:30.1", 49890100000),
    ("time", -1, "24:00:00", 86400000000),
    ("timetz", -1, "13:51:30.123789+02", "13:51:30.123789+02"),
    ("timestamp", 0, "2016-11-04 13:51:30", 1478267490000),
    ("timestamp", 3, "2016-11-04 13:51:30.123", 1478267490123),
    ("timestamp", 4, "2016-11-04 13:51:30.1235", 1478267490123500),
    ("timestamp", 6, "2016-11-04 13:51:30.123456", 1478267490123456),
    ("timestamp", -1, "2016-11-04 13:51:30.123456", 1478267490123456),
    ("timestamp", -1, "1969-12-31 23:59:59.999999", -1),
    ("timestamp", 3, "1969-12-31 23:59:59.999", -1),
    ("timestamp", -1, "0001-01-01 00:00:00", -62135596800000000),
    ("timestamp", -1, "294247-01-01 23:59:59.999999", "294247-01-01 23:59:59.999999"),
    ("timestamp", 3, "10000-01-01 00:00:00", "10000-01-01 00:00:00"),
    ("timestamp", -1, "0044-03-15 12:00:00 BC", "0044-03-15 12:00:00 BC"),
    ("timestamp", -1, "infinity", "infinity"),
    ("timestamp", 0, "-infinity", "-infinity"),
    ("timestamptz", -1, "2026-01-02 03:04:05.123456+00", "2026-01-02T03:04:05.123456Z"),
    ("timestamptz", -1, "2026-01-02 03:04:05+00", "2026-01-02T03:04:05Z"),  # no fraction: none
    ("timestamptz", 2, "2026-01-02 03:04:05.12+00", "2026-01-02T03:04:05.12Z"),
    ("timestamptz", -1, "infinity", "infinity"),
    ("timestamptz", -1, "-infinity", "-infinity"),
    ("timestamptz", -1, "0044-03-15 12:00:00+00 BC", "0044-03-15 12:00:00+00 BC"),
    ("timestamptz", -1, "21016-11-04 13:51:30.123456+00", "21016-11-04 13:51:30.123456+00"),
    ("timestamptz", -1, "294276-12-31 23:59:59+00", "294276-12-31 23:59:59+00"),
]


@pytest.mark.parametrize(("type_name", "modifier", "text", "expected"), CASES)
def test_a_value_follows_the_contract(
    type_name: str, modifier: int, text: str, expected: object
) -> None:
    found = value_of(OIDS[type_name], modifier, text.encode())
    assert found == expected
    assert isinstance(found, bool) == isinstance(expected, bool)
    assert isinstance(found, str) == isinstance(expected, str)


@pytest.mark.parametrize("type_name", ["float4", "float8"])
def test_minus_zero_keeps_its_sign(type_name: str) -> None:
    assert str(value_of(OIDS[type_name], -1, b"-0")) == "-0.0"
    for array, expected in ((b"{-0}", "[-0.0]"), (b"{-0,-0.5}", "[-0.0, -0.5]")):
        assert str(value_of(OIDS[f"_{type_name}"], -1, array)) == expected


@pytest.mark.parametrize("type_id", [*sorted({OIDS[case[0]] for case in CASES}), MOOD])
def test_null_is_null_and_the_empty_string_is_not(type_id: int) -> None:
    assert value_of(type_id, -1, None) is None


@pytest.mark.parametrize("type_id", [MOOD, OIDS["text"], OIDS["tsvector"]])
def test_a_type_that_is_not_named_is_postgres_own_text(type_id: int) -> None:
    assert value_of(type_id, -1, b"'fat':2 \"cat\"") == "'fat':2 \"cat\""


@pytest.mark.parametrize(
    ("type_name", "text"),
    [
        ("text", b"secret \xff"),
        ("bytea", b"secret"),
        ("date", b"secretly!!"),
        ("time", b"secret"),
        ("timestamp", b"secretsecr secret"),
    ],
)
def test_text_that_no_server_writes_is_refused_and_not_quoted(type_name: str, text: bytes) -> None:
    """Error texts reach logs and health pages, which must not contain row values."""
    with pytest.raises(ProtocolError) as raised:
        value_of(OIDS[type_name], -1, text)
    assert "secret" not in str(raised.value)
    assert "at LSN 0/1000" in raised.value.what


def test_a_timestamp_with_a_zone_is_refused() -> None:
    with pytest.raises(ProtocolError):
        value_of(OIDS["timestamp"], -1, b"2000-01-01 00:00:00.0+0000")
