"""CASES "Numbers": scale, special values and the last digit survive, in rows, keys and old rows."""

from __future__ import annotations

import pytest

from tests.fixtures.cases import Case, NewCase

pytestmark = pytest.mark.majors


@pytest.fixture(scope="module")
def precise(new_case: NewCase) -> Case:
    return new_case(values={"decimal.handling.mode": "precise"})


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("numeric(3,2)", "1.1", "1.10"),
        ("numeric(4)", "10", "10"),
        ("numeric", "10.1111", "10.1111"),
        ("numeric(6,4)", "22.22", "22.2200"),
        ("numeric", "0.00", "0.00"),
        ("numeric", "1e30", "1" + "0" * 30),
        ("numeric", "-0.0000000000000000000001", "-0.0000000000000000000001"),
        ("numeric(3,-2)", "12345", "12300"),
        ("numeric(2,5)", "0.00012", "0.00012"),
        ("numeric", "9" * 1000 + "." + "9" * 1000, "9" * 1000 + "." + "9" * 1000),
    ],
    ids=lambda text: str(text)[:24],
)
def test_a_numeric_keeps_its_scale_and_every_digit(
    case: Case, kind: str, value: str, expected: str
) -> None:
    [event] = case(
        f'CREATE TABLE IF NOT EXISTS "{kind}" (id serial PRIMARY KEY, v {kind})',
        f'INSERT INTO "{kind}" (v) VALUES ({value})',
    )
    assert event.after["v"] == expected


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_numeric_that_is_no_number_arrives_in_insert_update_delete_and_key(
    case: Case, value: str
) -> None:
    created, updated, moved_from, moved_to, deleted = case(
        "CREATE TABLE IF NOT EXISTS odd (k numeric, l numeric, v numeric, PRIMARY KEY (k, l))",
        "ALTER TABLE odd REPLICA IDENTITY FULL",
        f"INSERT INTO odd VALUES ('{value}', 1.10, 0)",
        f"UPDATE odd SET v = '{value}'",
        "UPDATE odd SET k = 5.50",
        "DELETE FROM odd",
    )
    assert created.key == updated.key == moved_from.key == {"k": value, "l": "1.10"}
    assert created.after == updated.before == {"k": value, "l": "1.10", "v": "0"}
    assert updated.after == moved_from.before == {"k": value, "l": "1.10", "v": value}
    assert moved_to.key == deleted.key == {"k": "5.50", "l": "1.10"}
    assert moved_to.after == deleted.before == {"k": "5.50", "l": "1.10", "v": value}
    assert moved_from.tombstone
    assert deleted.tombstone


@pytest.mark.parametrize("kind", ["real", "double precision"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_float_that_is_no_number_is_a_sentinel(case: Case, kind: str, value: str) -> None:
    created, deleted = case(
        f'CREATE TABLE IF NOT EXISTS "{kind}" (id serial PRIMARY KEY, v {kind}, a {kind}[])',
        f'ALTER TABLE "{kind}" REPLICA IDENTITY FULL',
        f"INSERT INTO \"{kind}\" (v, a) VALUES ('{value}', '{{{value},1.5,NULL}}')",
        f'DELETE FROM "{kind}"',
    )
    assert created.after == deleted.before
    assert (created.after["v"], created.after["a"]) == (value, [value, 1.5, None])


def test_a_real_is_not_widened(case: Case) -> None:
    """The database's extra_float_digits would print 3.3 as 3.3, and 1.17549435e-38 as 1e-38."""
    [event] = case(
        "CREATE TABLE narrow (id int PRIMARY KEY, a real, b real, c real, d float8, e float8)",
        "INSERT INTO narrow VALUES (1, 3.3, 1.17549435e-38, 16777216, 0.1, 5e-324)",
    )
    assert event.after == {
        "id": 1,
        "a": 3.3,
        "b": 1.1754944e-38,
        "c": 16777216,
        "d": 0.1,
        "e": 5e-324,
    }


def test_minus_zero_keeps_its_sign(case: Case) -> None:
    [event] = case(
        "CREATE TABLE zero (id int PRIMARY KEY, a real, b float8)",
        "INSERT INTO zero VALUES (1, '-0', '-0')",
    )
    assert [str(event.after[each]) for each in "ab"] == ["-0.0", "-0.0"]


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [
        ("smallint", -(2**15), 2**15 - 1),
        ("integer", -(2**31), 2**31 - 1),
        ("bigint", -(2**63), 2**63 - 1),
        ("oid", 0, 2**32 - 1),
    ],
)
def test_an_integer_is_exact_at_both_ends(case: Case, kind: str, lowest: int, highest: int) -> None:
    created, deleted = case(
        f"CREATE TABLE ends_{kind} (k {kind} PRIMARY KEY, v {kind})",
        f"INSERT INTO ends_{kind} VALUES ('{lowest}', '{highest}')",
        f"DELETE FROM ends_{kind}",
    )
    assert created.after == {"k": lowest, "v": highest}
    assert deleted.key == {"k": lowest}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("'$1234.11'", "1234.11"),
        ("'($1234.11)'", "-1234.11"),
        ("NULL", None),
        ("'-92233720368547758.08'", "-92233720368547758.08"),
        ("'92233720368547758.07'", "92233720368547758.07"),
        ("'-0.05'", "-0.05"),
        ("'$1,234,567.10'", "1234567.10"),
    ],
)
def test_money_is_a_plain_decimal_when_inserted_and_in_a_deletes_old_row(
    case: Case, value: str, expected: str | None
) -> None:
    created, deleted = case(
        "CREATE TABLE IF NOT EXISTS cash (id serial PRIMARY KEY, v money)",
        "ALTER TABLE cash REPLICA IDENTITY FULL",
        f"INSERT INTO cash (v) VALUES ({value})",
        "DELETE FROM cash",
    )
    assert created.after["v"] == deleted.before["v"] == expected


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("numeric(5,2)", "12.5", "BOI="),  # 1250
        ("numeric(5,2)", "-0.01", "/w=="),
        ("numeric", "12.50", {"scale": 2, "value": "BOI="}),
        ("numeric", "'NaN'", "NaN"),
        ("numeric(5,2)", "'NaN'", "NaN"),
        ("money", "'-12.50'", "+x4="),
    ],
)
def test_a_precise_decimal_is_debeziums_bytes(
    precise: Case, kind: str, value: str, expected: object
) -> None:
    [event] = precise(
        f'CREATE TABLE IF NOT EXISTS "p{kind}" (id serial PRIMARY KEY, v {kind})',
        f'INSERT INTO "p{kind}" (v) VALUES ({value}::{kind})',
    )
    assert event.after["v"] == expected


def test_a_boolean_is_no_number(case: Case) -> None:
    [event] = case(
        "CREATE TABLE flags (id int PRIMARY KEY, t boolean, f boolean, n boolean)",
        "INSERT INTO flags VALUES (1, 'yes', 'off', NULL)",
    )
    assert [event.after[each] is what for each, what in (("t", True), ("f", False), ("n", None))]
    assert isinstance(event.after["t"], bool)
