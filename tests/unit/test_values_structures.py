"""Arrays and hstore: text that has structure, and the JSON it becomes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decode.types import TYPE_NAMES, element_of
from cdc.encode.values import undescribed
from tests.property import array_text
from tests.unit.forms import written

CASES: list[tuple[str, str, object]] = [
    ("_int4", "{}", []),
    ("_int4", "{1,NULL,-3}", [1, None, -3]),
    ("_int4", "{{1,2},{NULL,4}}", [[1, 2], [None, 4]]),
    ("_int8", "{{{9223372036854775807}}}", [[[9223372036854775807]]]),
    # Lower bounds other than 1: a JSON array could not express them.
    ("_int4", "[0:1]={1,2}", "[0:1]={1,2}"),
    ("_int4", "[-2:-1][2:3]={{1,2},{3,4}}", "[-2:-1][2:3]={{1,2},{3,4}}"),
    ("_text", '[2:2]={"a \\"b"}', '[2:2]={"a \\"b"}'),
    ("_numeric", "[0:0]={NaN}", "[0:0]={NaN}"),
    ("_bool", "[0:0]={t}", "[0:0]={t}"),
    ("_float8", "{0.1,-5e-324,1e+20}", [0.1, -5e-324, 1e20]),
    ("_float4", "{NaN,Infinity,-Infinity,NULL,1.5}", ["NaN", "Infinity", "-Infinity", None, 1.5]),
    ("_bool", "{t,f,NULL}", [True, False, None]),
    ("_numeric", "{1.10,NaN,-Infinity,NULL}", ["1.10", "NaN", "-Infinity", None]),
    ("_numeric", "{{1.10,2},{3,NULL}}", [["1.10", "2"], ["3", None]]),
    ("_uuid", "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ("_text", "{}", []),
    ("_text", "{a,NULL,Zoë 𝄞}".replace(" ", ""), ["a", None, "Zoë𝄞"]),
    (
        "_text",
        '{"a,b","\\"","\\\\","{}",NULL,"NULL","null",""," ",x}',
        ["a,b", '"', "\\", "{}", None, "NULL", "null", "", " ", "x"],
    ),
    ("_text", '{"line\nbreak","\\\\\\""}', ["line\nbreak", '\\"']),
    ("_varchar", "{nullify}", ["nullify"]),
    ("_bpchar", '{"ab  "}', ["ab  "]),
    ("_name", "{n}", ["n"]),
    ("_money", '{"$1,234.11",-$0.10}', ["1234.11", "-0.10"]),
    ("_interval", '{"1 day",00:00:00}', ["1 day", "00:00:00"]),
    ("_xml", '{"<a b=\\"c\\"/>"}', ['<a b="c"/>']),
    ("_json", '{"{\\"a\\" : 1}"}', ['{"a" : 1}']),
    ("_varbit", '{101,""}', ["101", ""]),
    ("_point", '{"(1,2)","(3,4)"}', ["(1,2)", "(3,4)"]),
    ("_box", "{(3,4),(1,2);(1,1),(0,0)}", ["(3,4),(1,2)", "(1,1),(0,0)"]),
    ("_bytea", '{"\\\\x00ff",NULL}', ["AP8=", None]),
    ("_date", '{2016-11-04,infinity,"0044-03-15 BC"}', [17109, "infinity", "0044-03-15 BC"]),
    ("_timestamp", '{"2016-11-04 13:51:30.5"}', [1478267490500000]),
    (
        "_timestamptz",
        '{"2026-01-02 03:04:05+00",infinity}',
        ["2026-01-02T03:04:05Z", "infinity"],
    ),
    ("_time", "{24:00:00}", [86400000000]),
    ("_int4range", '{"[1,5)",empty}', ["[1,5)", "empty"]),
    ("_tsrange", '{"[\\"2026-01-01 00:00:00\\",)"}', ['["2026-01-01 00:00:00",)']),
    ("_int2vector", '{"1 2"}', ["1 2"]),
    ("int2vector", "1 2", "1 2"),
    ("oidvector", "1 2", "1 2"),
    ("public._mood", '{sad,"it\'s \\"ok\\""}', ["sad", 'it\'s "ok"']),
    ("public._pair", '{"(1,\\"a,b\\")"}', ['(1,"a,b")']),
    ("public._hstore", '{"\\"a\\"=>NULL"}', ['"a"=>NULL']),
    ("public._ltree", "{Top.Science,Top}", ["Top.Science", "Top"]),
    ("gis._geometry", "{0101:0102:NULL}", ["0101", "0102", None]),
    ("public._vector", '{"[1,2]"}', ["[1,2]"]),
    ("public._Od.d _", "{x}", ["x"]),
    ('"a.b"._c', "{x}", ["x"]),
    ("public.Od._d", "{x}", "{x}"),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_an_array_is_a_json_array_of_its_elements_forms(
    name: str, text: str, expected: object
) -> None:
    found = written(name, text)
    assert found == expected
    assert repr(found) == repr(expected)  # true is not 1


@pytest.mark.parametrize(
    "text",
    ["open", "{", "{open", "{a b}", '{"a"}', "{null}", "{a}}", "{a,}", "{,}", '{"a b" }', "{}{}",
     "(1,2)", "", "{a}\n", '{a"b"}'],
)  # fmt: skip
def test_a_type_that_is_only_called_like_an_array_stays_text(text: str) -> None:
    """An enum may be called `_status`, and its labels anything."""
    assert written("public._status", text) == text


@pytest.mark.parametrize("text", ["{1,2", "{a b}", '{"a}', "{a}x", '{a"b"}'])
def test_text_that_is_no_array_of_a_built_in_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an array"):
        written("_tsvector", text.replace("{", "{{", 1))


@pytest.mark.parametrize("name", sorted(n for n in TYPE_NAMES.values() if n.startswith("_")))
def test_every_built_in_array_type_is_an_array(name: str) -> None:
    assert element_of(name) in TYPE_NAMES.values()
    assert written(name, "{}") == []
    assert written(name, "{NULL}") == [None]
    between = ";" if name == "_box" else ","
    assert written(name, f"{{{{NULL}}{between}{{NULL}}}}") == [[None], [None]]


_texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
_elements = st.none() | _texts | st.sampled_from(["NULL", "null", "", "{", ",", '"', "\\", " "])
_shapes = st.one_of(
    st.lists(_elements, max_size=5),
    st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(_elements, min_size=width, max_size=width), min_size=1, max_size=3
        )
    ),
)


@given(_shapes, st.sampled_from([("_text", ","), ("_tsquery", ","), ("public._x", ",")]))
def test_any_elements_come_out_as_they_went_in(
    array: array_text.Nested, of: tuple[str, str]
) -> None:
    name, delimiter = of
    text = canonical(array, delimiter)
    assert array_text.read(text, str, delimiter) == array
    assert written(name, text) == array


@given(_texts)
def test_a_guessed_array_loses_nothing(text: str) -> None:
    """For any text in a column of a type with an array-like name, the text can be restored."""
    found = written("public._x", text)
    assert (canonical(found, ",") if isinstance(found, list) else found) == text


def canonical(array: array_text.Nested, delimiter: str) -> str:
    """Return the array as Postgres writes it: quotes only where they are needed."""

    def each(item: object) -> str:
        if isinstance(item, list):
            return canonical(item, delimiter)
        if item is None:
            return "NULL"
        text = str(item)
        special = any(c in '"\\{} \t\n\r\v\f' + delimiter for c in text)
        if special or not text or text.upper() == "NULL":
            escaped = text.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
        return text

    return "{" + delimiter.join(map(each, array)) + "}"


HSTORES = [
    ("", {}),
    ('"a"=>"1"', {"a": "1"}),
    ('"a"=>NULL, "b"=>"NULL"', {"a": None, "b": "NULL"}),
    ('"q\\"\\\\"=>"x, \\"y\\"=>#", ""=>""', {'q"\\': 'x, "y"=>#', "": ""}),
    ('"Zoë"=>"𝄞\n"', {"Zoë": "𝄞\n"}),
]


@pytest.mark.parametrize(("text", "expected"), HSTORES)
def test_hstore_is_text_a_map_or_json_by_option(text: str, expected: dict[str, str]) -> None:
    assert written("public.hstore", text) == text
    assert written("public.hstore", text, hstore_handling_mode="map") == expected
    inside = written("ext.hstore", text, hstore_handling_mode="json")
    assert isinstance(inside, str)
    assert json.loads(inside) == expected


def test_an_array_of_hstore_has_its_option() -> None:
    text = '{"\\"a\\"=>NULL",NULL}'
    assert written("public._hstore", text, hstore_handling_mode="map") == [{"a": None}, None]


def test_what_is_called_hstore_and_is_none_stays_text() -> None:
    assert written("public.hstore", "sad", hstore_handling_mode="map") == "sad"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("int4", True),
        ("_int4", True),
        ("public.hstore", True),
        ('"x.y"._geometry', True),
        ("public.mood", False),
        ("public._mood", False),
        ("unknown", False),
        ("hstore", False),  # in pg_catalog, where extensions are not
    ],
)
def test_what_undescribed_of_a_type(name: str, *, known: bool) -> None:
    assert (undescribed(name) is None) is known


def test_an_array_is_of_an_undescribed_element() -> None:
    assert undescribed("public._mood") == "public.mood"
