"""CASES "Temporal": what was written is what is in the event, and nothing overflows."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from tests.fixtures.cases import Case, NewCase

pytestmark = pytest.mark.majors

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def nanoseconds(new_case: NewCase) -> Case:
    return new_case(values={"time.precision.mode": "nanoseconds"})


def micros(text: str) -> int:
    """Return the microseconds since 1970 in the proleptic Gregorian calendar, Postgres' own."""
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize("precision", range(7))
def test_a_timestamp_is_exact_to_its_declared_precision(case: Case, precision: int) -> None:
    [event] = case(
        f"CREATE TABLE ts{precision} (id int PRIMARY KEY, v timestamp({precision}))",
        f"INSERT INTO ts{precision} VALUES (1, '2016-11-04 13:51:30.123456')",
    )
    complete = micros("2016-11-04 13:51:30")
    fraction = round(123456 / 10 ** (6 - precision)) * 10 ** (6 - precision)
    unit = 1000 if precision <= 3 else 1
    assert event.after == {"id": 1, "v": (complete + fraction) // unit}


@pytest.mark.parametrize("kind", ["timestamp", "timestamp(3)", "timestamptz", "date"])
@pytest.mark.parametrize("value", ["infinity", "-infinity"])
def test_infinity_is_a_sentinel_when_inserted_and_in_a_deletes_old_row(
    case: Case, kind: str, value: str
) -> None:
    name = f'"{kind}{value}"'
    created, deleted = case(
        f"CREATE TABLE {name} (id int PRIMARY KEY, v {kind})",
        f"ALTER TABLE {name} REPLICA IDENTITY FULL",
        f"INSERT INTO {name} VALUES (1, '{value}')",
        f"DELETE FROM {name}",
    )
    assert created.after == deleted.before == {"id": 1, "v": value}
    assert deleted.tombstone


def test_a_year_beyond_9999_is_exact(case: Case) -> None:
    [event] = case(
        "CREATE TABLE far (id int PRIMARY KEY, t timestamp, z timestamptz, d date)",
        "INSERT INTO far VALUES (1, '294247-01-01 23:59:59.999999', '21016-11-04 13:51:30+02',"
        " '5874897-12-31')",
    )
    assert event.after["t"] == "294247-01-01 23:59:59.999999"
    assert event.after["z"] == "21016-11-04 11:51:30+00"
    assert event.after["d"] == "5874897-12-31"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2016-11-04 13:51:30.123456", micros("2016-11-04 13:51:30.123456") * 1000),
        ("2262-04-11 23:47:16.854775", 9223372036854775000),
        ("2262-04-11 23:47:16.854776", "2262-04-11 23:47:16.854776"),
        ("1677-09-21 00:12:43.145225", -9223372036854775000),
        ("1677-09-21 00:12:43.145224", "1677-09-21 00:12:43.145224"),
        ("294247-01-01 23:59:59.999999", "294247-01-01 23:59:59.999999"),
        ("infinity", "infinity"),
    ],
)
def test_what_overflows_nanoseconds_is_text_and_never_another_time(
    nanoseconds: Case, value: str, expected: object
) -> None:
    [event] = nanoseconds(
        "CREATE TABLE IF NOT EXISTS n (id serial PRIMARY KEY, v timestamp)",
        f"INSERT INTO n (v) VALUES ('{value}')",
    )
    assert event.after["v"] == expected


@pytest.mark.parametrize(
    "value",
    [
        "1582-10-04 12:00:00",
        "1582-10-15 00:00:00",
        "1500-02-28 23:59:59.999999",
        "0001-01-01 00:00:00",
    ],
)
def test_a_timestamp_before_the_gregorian_reform_is_not_shifted(case: Case, value: str) -> None:
    [event] = case(
        "CREATE TABLE IF NOT EXISTS old (i serial PRIMARY KEY, t timestamp, d date, z timestamptz)",
        f"INSERT INTO old (t, d, z) VALUES ('{value}', '{value}', '{value}Z')",
    )
    assert event.after["t"] == micros(value)
    assert event.after["d"] == (date.fromisoformat(value[:10]) - date(1970, 1, 1)).days
    assert event.after["z"] == f"{value.replace(' ', 'T')}Z"


def test_a_time_before_christ_is_exact(case: Case) -> None:
    [event] = case(
        "CREATE TABLE bc (id int PRIMARY KEY, t timestamp, z timestamptz, d date)",
        "INSERT INTO bc VALUES (1, '0044-03-15 12:00:00.5 BC', '0044-03-15 12:00:00Z BC',"
        " '4713-01-01 BC')",
    )
    assert event.after["t"] == "0044-03-15 12:00:00.5 BC"
    assert event.after["z"] == "0044-03-15 12:00:00+00 BC"
    assert event.after["d"] == "4713-01-01 BC"


def test_a_timetz_keeps_its_offset(case: Case) -> None:
    [event] = case(
        "CREATE TABLE tz (id int PRIMARY KEY, a timetz, b timetz, c timetz)",
        "INSERT INTO tz VALUES (1, '13:51:30.123789+02', '24:00:00-12:30', '00:00:00+15:59:59')",
    )
    assert event.after == {
        "id": 1,
        "a": "13:51:30.123789+02",
        "b": "24:00:00-12:30",
        "c": "00:00:00+15:59:59",
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2026-01-02 03:04:05+00", "2026-01-02T03:04:05Z"),
        ("2026-01-02 03:04:05.000000+00", "2026-01-02T03:04:05Z"),
        ("2026-01-02 03:04:05.5+00", "2026-01-02T03:04:05.5Z"),
        ("2026-01-02 03:04:05.123450+02", "2026-01-02T01:04:05.12345Z"),
        # New York's clock shows this hour twice; the database's own zone is New York's.
        ("2025-11-02 05:30:00+00", "2025-11-02T05:30:00Z"),
        ("2025-11-02 06:30:00+00", "2025-11-02T06:30:00Z"),
    ],
)
def test_a_timestamptz_has_one_stable_form(case: Case, value: str, expected: str) -> None:
    created, deleted = case(
        "CREATE TABLE IF NOT EXISTS stable (z timestamptz PRIMARY KEY)",
        f"INSERT INTO stable VALUES ('{value}')",
        "DELETE FROM stable",
    )
    assert created.after == created.key == deleted.key == deleted.before == {"z": expected}
    assert created.key_bytes == deleted.key_bytes


def test_a_time_is_exact_to_24_hours(case: Case) -> None:
    [event] = case(
        "CREATE TABLE clock (id int PRIMARY KEY, a time, b time(3), c time, d time(0))",
        "INSERT INTO clock VALUES (1, '23:59:59.999999', '13:51:30.1236', '24:00', '00:00:01')",
    )
    day = 86_400_000_000
    assert event.after == {"id": 1, "a": day - 1, "b": 49_890_124, "c": day, "d": 1000}


def test_an_interval_keeps_months_days_and_microseconds_apart(case: Case) -> None:
    [event] = case(
        "CREATE TABLE span (id int PRIMARY KEY, a interval, b interval, c interval)",
        "INSERT INTO span VALUES (1, '1 year 2 mons -3 days 04:05:06.7', '-00:00:00.000001',"
        " '30 days 24:00:00')",
    )
    assert event.after["a"] == "1 year 2 mons -3 days +04:05:06.7"
    assert event.after["b"] == "-00:00:00.000001"
    assert event.after["c"] == "30 days 24:00:00"


def test_an_infinite_interval_is_a_sentinel(case: Case) -> None:
    if case.major < 17:
        pytest.skip("Postgres 17 is the first that has it")
    [event] = case(
        "CREATE TABLE endless (id int PRIMARY KEY, a interval, b interval)",
        "INSERT INTO endless VALUES (1, 'infinity', '-infinity')",
    )
    assert event.after == {"id": 1, "a": "infinity", "b": "-infinity"}
