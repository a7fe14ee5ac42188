"""Each option's choices: docs/EVENTS.md, "Options"."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest

from cdc.config.value_options import Values
from tests.unit.forms import written

DECIMALS = [  # type, modifier, text, string, precise, double
    ("numeric", (6 << 16 | 2) + 4, "12.50", "12.50", "BOI=", 12.5),
    ("numeric", (6 << 16 | 2) + 4, "-0.01", "-0.01", "/w==", -0.01),
    ("numeric", (6 << 16 | 2) + 4, "0.00", "0.00", "AA==", 0.0),
    ("numeric", (6 << 16 | 2) + 4, "NaN", "NaN", "NaN", "NaN"),
    ("numeric", (4 << 16) + 4, "10", "10", "Cg==", 10),
    ("numeric", (3 << 16 | (-2 & 0x7FF)) + 4, "12300", "12300", "ew==", 12300),
    ("numeric", -1, "12.50", "12.50", {"scale": 2, "value": "BOI="}, 12.5),
    ("numeric", -1, "128", "128", {"scale": 0, "value": "AIA="}, 128),
    ("numeric", -1, "-128", "-128", {"scale": 0, "value": "gA=="}, -128),
    ("numeric", -1, "-Infinity", "-Infinity", "-Infinity", "-Infinity"),
    # Not the scale that the column declares: the value carries its own.
    ("numeric", (6 << 16 | 2) + 4, "1.5", "1.5", {"scale": 1, "value": "Dw=="}, 1.5),
    ("numeric", (3 << 16 | (-2 & 0x7FF)) + 4, "5", "5", {"scale": 0, "value": "BQ=="}, 5),
    ("money", -1, "-$1,234.11", "-1234.11", "/h3t", -1234.11),
    ("_numeric", (6 << 16 | 2) + 4, "{12.50,NULL}", ["12.50", None], ["BOI=", None], [12.5, None]),
]


@pytest.mark.parametrize(("name", "modifier", "text", "string", "precise", "double"), DECIMALS)
def test_decimal_handling_mode(
    name: str, modifier: int, text: str, string: object, precise: object, double: object
) -> None:
    assert written(name, text, modifier) == string
    assert written(name, text, modifier, decimal_handling_mode="precise") == precise
    assert written(name, text, modifier, decimal_handling_mode="double") == double


def test_precise_is_what_javas_biginteger_writes() -> None:
    for number in (0, 1, -1, 127, 128, -128, -129, 2**63, -(2**63), 10**40):
        text = written("numeric", str(number), (40 << 16) + 4, decimal_handling_mode="precise")
        assert isinstance(text, str)
        data = base64.b64decode(text)
        assert int.from_bytes(data, "big", signed=True) == number
        # The shortest: the first byte is not only the sign of the second.
        assert len(data) == 1 or not -128 <= int.from_bytes(data[:2], "big", signed=True) <= 127


@pytest.mark.parametrize(
    ("digits", "text", "string", "precise"),
    [
        (0, "$1,234.11", "123411", "AeIT"),
        (0, "-$0.05", "-5", "+w=="),
        (3, "$1,234.11", "123.411", "AeIT"),
        (3, "-$0.05", "-0.005", "+w=="),
        (4, "$0.00", "0.0000", "AA=="),
        (18, "-$92,233,720,368,547,758.08", "-9.223372036854775808", "gAAAAAAAAAA="),
    ],
)
def test_money_fraction_digits(digits: int, text: str, string: str, precise: str) -> None:
    assert written("money", text, money_fraction_digits=digits) == string
    found = written("money", text, money_fraction_digits=digits, decimal_handling_mode="precise")
    assert found == precise


MODES = ("adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds",
         "nanoseconds")  # fmt: skip
TIMES: list[tuple[str, int, str, tuple[object, ...]]] = [
    ("date", -1, "2016-11-04", (17109, 17109, 17109, "2016-11-04Z", 17109, 17109)),
    ("date", -1, "infinity", ("infinity",) * 6),
    ("date", -1, "-infinity", ("-infinity",) * 6),
    ("date", -1, "0044-03-15 BC", ("0044-03-15 BC",) * 6),
    ("date", -1, "10000-01-01", ("10000-01-01",) * 6),
    (
        "time", 3, "13:51:30.12",
        (49890120, 49890120000, 49890120, "13:51:30.12Z", 49890120000, 49890120000000),
    ),
    (
        "time", -1, "13:51:30.123789",
        (49890123789, 49890123789, "13:51:30.123789", "13:51:30.123789Z", 49890123789,
         49890123789000),
    ),
    (
        "time", -1, "24:00:00",
        (86400000000, 86400000000, 86400000, "24:00:00Z", 86400000000, 86400000000000),
    ),
    (
        "timestamp", 3, "2016-11-04 13:51:30.123",
        (1478267490123, 1478267490123, 1478267490123, "2016-11-04T13:51:30.123Z",
         1478267490123000, 1478267490123000000),
    ),
    (
        "timestamp", -1, "2016-11-04 13:51:30.123456",
        (1478267490123456, 1478267490123456, "2016-11-04 13:51:30.123456",
         "2016-11-04T13:51:30.123456Z", 1478267490123456, 1478267490123456000),
    ),
    (
        "timestamp", -1, "1969-12-31 23:59:59.999",
        (-1000, -1000, -1, "1969-12-31T23:59:59.999Z", -1000, -1000000),
    ),
    # The last that 64 bits of nanoseconds hold; one microsecond later, the text.
    (
        "timestamp", -1, "2262-04-11 23:47:16.854775",
        (9223372036854775, 9223372036854775, "2262-04-11 23:47:16.854775",
         "2262-04-11T23:47:16.854775Z", 9223372036854775, 9223372036854775000),
    ),
    (
        "timestamp", -1, "2262-04-11 23:47:16.854776",
        (9223372036854776, 9223372036854776, "2262-04-11 23:47:16.854776",
         "2262-04-11T23:47:16.854776Z", 9223372036854776, "2262-04-11 23:47:16.854776"),
    ),
    (
        "timestamp", 0, "1677-09-21 00:12:43",
        (-9223372037000, -9223372037000, -9223372037000, "1677-09-21T00:12:43Z",
         -9223372037000000, "1677-09-21 00:12:43"),
    ),
    ("timestamp", 0, "infinity", ("infinity",) * 6),
    ("timestamp", -1, "-infinity", ("-infinity",) * 6),
    ("timestamp", -1, "294247-01-01 23:59:59.999999", ("294247-01-01 23:59:59.999999",) * 6),
    ("timestamp", -1, "10000-01-01 00:00:00", ("10000-01-01 00:00:00",) * 6),
    ("timestamp", 3, "0044-03-15 12:00:00 BC", ("0044-03-15 12:00:00 BC",) * 6),
    ("timestamptz", -1, "2026-01-02 03:04:05+00", ("2026-01-02T03:04:05Z",) * 6),
    ("timestamptz", -1, "infinity", ("infinity",) * 6),
    ("timestamptz", -1, "21016-11-04 13:51:30+00", ("21016-11-04 13:51:30+00",) * 6),
    ("timetz", -1, "13:51:30.123789+02", ("13:51:30.123789+02",) * 6),
]  # fmt: skip


@pytest.mark.parametrize(("name", "modifier", "text", "expected"), TIMES)
def test_time_precision_mode(
    name: str, modifier: int, text: str, expected: tuple[object, ...]
) -> None:
    found = tuple(written(name, text, modifier, time_precision_mode=mode) for mode in MODES)
    assert found == expected
    assert [type(each) for each in found] == [type(each) for each in expected]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("bytes", "+/8="), ("base64", "+/8="), ("base64-url-safe", "-_8="), ("hex", "fbff")],
)
def test_binary_handling_mode(mode: str, expected: str) -> None:
    assert written("bytea", "\\xfbff", binary_handling_mode=mode) == expected
    assert written("bytea", "\\x", binary_handling_mode=mode) == ""
    assert written("_bytea", '{"\\\\xfbff"}', binary_handling_mode=mode) == [expected]


INTERVALS: list[tuple[str, str, object]] = [
    ("00:00:00", "P0Y0M0DT0H0M0S", 0),
    ("1 year 2 mons -3 days +04:05:06.7", "P1Y2M-3DT4H5M6.7S", 36572706700000),
    ("-1 years -2 mons +3 days -04:05:06.7", "P-1Y-2M3DT-4H-5M-6.7S", -36572706700000),
    ("-00:00:00.5", "P0Y0M0DT0H0M-0.5S", -500000),
    ("-00:00:10", "P0Y0M0DT0H0M-10S", -10000000),
    ("1 mon", "P0Y1M0DT0H0M0S", 2629800000000),
    ("-1 days", "P0Y0M-1DT0H0M0S", -86400000000),
    ("2562047788:00:54.775807", "P0Y0M0DT2562047788H0M54.775807S", 9223372036854775807),
    ("-2562047788:00:54.775808", "P0Y0M0DT-2562047788H0M-54.775808S", -9223372036854775808),
    # Beyond 64 bits: the text, never an overflow.
    ("178000000 years", "P178000000Y0M0DT0H0M0S", "178000000 years"),
    ("infinity", "infinity", "infinity"),
    ("-infinity", "-infinity", "-infinity"),
]


@pytest.mark.parametrize(("text", "iso", "micros"), INTERVALS)
def test_interval_handling_mode(text: str, iso: str, micros: object) -> None:
    assert written("interval", text) == text
    assert written("interval", text, interval_handling_mode="string") == iso
    assert written("interval", text, interval_handling_mode="numeric") == micros


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", True),
        ("9007199254740992", True),
        ("-9007199254740992", True),
        ("9007199254740993", False),
        ("-9007199254740993", False),
        ("-9223372036854775808", False),
    ],
)
def test_bigint_handling_mode(text: str, *, number: bool) -> None:
    expected = int(text) if number else text
    assert written("int8", text) == int(text)
    assert written("int8", text, bigint_handling_mode="string") == expected
    assert written("_int8", f"{{{text},NULL}}", bigint_handling_mode="string") == [expected, None]
    assert written("int4", "7", bigint_handling_mode="string") == 7


@pytest.mark.parametrize("name", ["text", "public.mood", "public.hstore", "_text", "public._mood"])
def test_invalid_text_handling_mode(name: str) -> None:
    secret = b"\xff secret"
    an_array = "_" in name
    text = b'{"' + secret + b'"}' if an_array else secret
    with pytest.raises(UnicodeDecodeError):
        written(name, text)
    reported = {"base64": base64.b64encode(secret).decode()}
    found = written(name, text, invalid_text_handling_mode="base64")
    assert found == ([reported] if an_array else reported)
    fine = written(name, "{Zoë}" if an_array else "Zoë", invalid_text_handling_mode="base64")
    assert fine == (["Zoë"] if an_array else "Zoë")


def test_invalid_text_in_an_hstore() -> None:
    both: Any = {"invalid_text_handling_mode": "base64", "hstore_handling_mode": "map"}
    assert written("public.hstore", '"a"=>"1"', **both) == {"a": "1"}
    broken = b'"a"=>"\xff"'
    reported = {"base64": base64.b64encode(broken).decode()}
    assert written("public.hstore", broken, **both) == reported


def test_options_have_debeziums_names() -> None:
    names = {
        "decimal.handling.mode",
        "time.precision.mode",
        "binary.handling.mode",
        "interval.handling.mode",
        "hstore.handling.mode",
        "money.fraction.digits",
        "unavailable.value.placeholder",
    }
    record = json.loads(msgspec.json.encode(Values()))
    assert names < set(record)
    assert msgspec.convert(record, Values) == Values()
    assert msgspec.convert({}, Values) == Values()
