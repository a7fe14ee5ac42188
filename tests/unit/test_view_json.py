"""Which members of jsonb values a view may select, and how the function cuts them out."""

from __future__ import annotations

import pytest

from lockstep.jobs.views.json_members import member
from lockstep.jobs.views.refusing import UnsupportedError
from tests.unit.test_view_plans import _plan

VALUE = '{"": 0, "a": 1.500, "q\\"": {"a": [1.0, "x]", {"b": null}]}, "ä": "\\"é\\u0001\\\\"}'


@pytest.mark.parametrize(
    ("key", "found", "as_text"),
    [
        ("a", "1.500", "1.500"),
        ("", "0", "0"),
        ('q"', '{"a": [1.0, "x]", {"b": null}]}', '{"a": [1.0, "x]", {"b": null}]}'),
        ("ä", '"\\"é\\u0001\\\\"', '"é\x01\\'),
        ("b", None, None),
        ("A", None, None),
    ],
)
def test_a_member_is_the_text_that_it_has_within_the_value(
    key: str, found: str | None, as_text: str | None
) -> None:
    assert member(VALUE, key, 0, as_text=False) == found
    assert member(VALUE, key, 0, as_text=True) == as_text


@pytest.mark.parametrize(
    ("value", "index", "found"),
    [
        ('[1.0, "x", null, {"a": [2]}]', 0, "1.0"),
        ('[1.0, "x", null, {"a": [2]}]', 1, '"x"'),
        ('[1.0, "x", null, {"a": [2]}]', 3, '{"a": [2]}'),
        ('[1.0, "x", null, {"a": [2]}]', -4, "1.0"),
        ('[1.0, "x", null, {"a": [2]}]', 4, None),
        ('[1.0, "x", null, {"a": [2]}]', -5, None),
        ("[]", 0, None),
        ('{"0": 1}', 0, None),
        (None, 0, None),
    ],
)
def test_an_element_is_found_by_its_index(value: str | None, index: int, found: str | None) -> None:
    assert member(value, None, index, as_text=False) == found


def test_a_number_of_any_length_stays_as_it_is() -> None:
    number = "9" * 10_000
    assert member(f'{{"a": {number}, "b": [{number}]}}', "b", 0, as_text=True) == f"[{number}]"


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("SELECT id, j #>> '{a,b}' AS x FROM odd", "#> and #>>"),
        ("SELECT id FROM odd WHERE j @> '{\"a\": 1}'", "@>, <@"),
        ("SELECT id FROM odd WHERE j ? 'a'", "@>, <@"),
        ("SELECT id, j['a'] AS x FROM odd", "a subscript"),
        ("SELECT id, c ->> 'a' AS x FROM odd", "->> of bpchar"),
        ("SELECT id, j -> c::text AS x FROM odd", "-> with other than a literal"),
        (
            "SELECT o.id FROM odd o LEFT JOIN odd p ON p.j ->> 'a' = 'x' AND p.id = o.id",
            "->> in ON",
        ),
        ("SELECT id FROM odd WHERE j ->> 'a' IN (SELECT name FROM products)", "->> in ON"),
        (
            (
                "SELECT id FROM odd o WHERE EXISTS (SELECT 1 FROM products p"
                " WHERE p.name = o.j ->> 'a')"
            ),
            "->> in ON",
        ),
        ("SELECT id FROM odd WHERE j -> 'a' = j -> 'b'", "= of jsonb"),
    ],
)
def test_what_is_not_exact_or_not_possible_is_refused_by_name(sql: str, what: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        _plan(sql)
    assert what in caught.value.what
    assert caught.value.hint


def test_a_key_stays_what_was_written() -> None:
    sql = _plan("SELECT id, j ->> ' a.b[0] ' AS x, j -> -2 AS y FROM odd").new
    assert "lockstep_jsonb(`odd`.`j`, ' a.b[0] ', 0, true)" in sql
    assert "lockstep_jsonb(`odd`.`j`, CAST(NULL AS STRING), -2, false)" in sql
