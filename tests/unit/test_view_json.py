"""What a view may ask of jsonb values, and what the functions answer."""

from __future__ import annotations

import pytest

from lockstep.jobs.views.jsonb_functions import at_path, contains, has_keys, length, member
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


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ([], VALUE),
        (["a"], "1.500"),
        (['q"', "a", "0"], "1.0"),
        (['q"', "a", "-1", "b"], "null"),
        (['q"', "a", "9"], None),
        (['q"', "a", "b"], None),
        (['q"', "a", "1 "], None),
        (['q"', "a", " +1"], '"x]"'),
        (['q"', "a", str(1 << 40)], None),
        (['q"', "a", "9" * 5_000], None),
        (["a", "0"], None),
    ],
)
def test_a_path_goes_through_keys_and_indexes(path: list[str], found: str | None) -> None:
    assert at_path(VALUE, path, as_text=False) == found


@pytest.mark.parametrize(
    ("outer", "part", "found"),
    [
        ('{"a": 1.0, "b": 2}', '{"a": 1.00}', True),
        ('{"a": 1, "b": {"c": [1, 2]}}', '{"b": {"c": [2, 2]}}', True),
        ('{"a": true}', '{"a": 1}', False),
        ('[1, [2, "x"]]', '[["x"]]', True),
        ("[1, [2]]", "[2]", False),
        ('["a"]', '"a"', True),
        ('"a"', '["a"]', False),
        ('"a"', '"a"', True),
        ('{"a": ["b"]}', '{"a": "b"}', False),
        ("{}", "[]", False),
        (None, "{}", None),
        ("{}", None, None),
    ],
)
def test_a_value_contains_another(
    outer: str | None,
    part: str | None,
    found: bool | None,  # noqa: FBT001
) -> None:
    assert contains(outer, part) is found


def test_keys_are_those_of_an_object_or_the_strings_of_an_array() -> None:
    values = ['{"a": {"b": 1}}', '["a", ["b"], 1]', '"a"', "1", "null"]
    assert [has_keys(value, ["a"], every=True) for value in values] == [True] * 3 + [False] * 2
    assert not any(has_keys(value, ["b"], every=False) for value in values)
    assert has_keys(values[0], ["a", "b"], every=False)
    assert not has_keys(values[0], ["a", "b"], every=True)
    assert has_keys(None, ["a"], every=True) is None


def test_only_an_array_has_a_length() -> None:
    values = ["[]", '["a", [1, 2], {"b": [3]}]', "{}", "1", None]
    assert [length(value) for value in values] == [0, 3, None, None, None]


def test_a_number_of_any_length_stays_as_it_is() -> None:
    number = "9" * 10_000
    assert member(f'{{"a": {number}, "b": [{number}]}}', "b", 0, as_text=True) == f"[{number}]"


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("SELECT id, j #>> '{a,\"b c\"}' AS x FROM odd", "#>> with other than plain texts"),
        ("SELECT id, j #> '{a,NULL}' AS x FROM odd", "#> with other than plain texts"),
        ("SELECT id, j #> ARRAY[c] AS x FROM odd", "#> with other than plain texts"),
        ("SELECT id FROM odd WHERE j @> '{\"a\": NaN}'", "@> with a literal that is no JSON"),
        ("SELECT id FROM odd WHERE c @> '{\"a\": 1}'", "@> of bpchar"),
        ("SELECT id FROM odd WHERE '{\"a\": 1}' <@ c", "<@ of bpchar"),
        ("SELECT id FROM odd WHERE j ? (j ->> 'a')", "? with other than a literal"),
        ("SELECT id FROM odd WHERE j @? '$.a'", "@?"),
        ("SELECT id, j - 'a' AS x FROM odd", "jsonb"),
        ("SELECT id, jsonb_pretty(j) AS x FROM odd", "jsonb_pretty()"),
        ("SELECT id, jsonb_typeof(c) AS x FROM odd", "jsonb_typeof() of bpchar"),
        ("SELECT id, j['a'] AS x FROM odd", "a subscript"),
        ("SELECT id, c ->> 'a' AS x FROM odd", "->> of bpchar"),
        ("SELECT id, j -> id::bigint AS x FROM odd", "-> with a int8"),
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
    assert "lockstep_jsonb(`odd`.`j`, ' a.b[0] ', CAST(NULL AS INT), true)" in sql
    assert "lockstep_jsonb(`odd`.`j`, CAST(NULL AS STRING), (- 2), false)" in sql


def test_a_member_may_be_an_argument() -> None:
    sql = _plan("SELECT id, coalesce(j ->> 'a', 'none') AS x, jsonb_typeof(j -> 'b') AS y FROM odd")
    assert "coalesce(lockstep_jsonb(`odd`.`j`, 'a', CAST(NULL AS INT), true), 'none')" in sql.new
    assert "left(lockstep_jsonb(`odd`.`j`, 'b', CAST(NULL AS INT), false), 1)" in sql.new
