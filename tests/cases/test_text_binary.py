"""CASES "Text, binary, bits": bytes, padding, any character, in values and in names."""

from __future__ import annotations

import base64

import psycopg
import pytest

from cdc.errors import CDCError
from tests.fixtures.cases import Case, NewCase

pytestmark = pytest.mark.majors

_EVERY_BYTE = bytes(range(256))
_STRANGE = (
    'with "quotes"',
    "with.dots",
    "with spaces",
    "back\\slash",
    "Mixed",
    "Ünï𝄞",
    "%s {0} $1",
    "a_xHH_x2E",
    "'single'",
    "select",
    "a*b",
    "__debezium_unavailable_value",
    "comma,and\ttab",
)


@pytest.fixture(scope="module")
def hexadecimal(new_case: NewCase) -> Case:
    return new_case(values={"binary.handling.mode": "hex"})


@pytest.mark.parametrize("value", [b"", b"\0\1\2", b"\\\\000'\"", _EVERY_BYTE], ids=repr)
def test_a_bytea_is_its_bytes_though_the_database_writes_escapes(case: Case, value: bytes) -> None:
    created, deleted = case(
        "CREATE TABLE IF NOT EXISTS b (k bytea PRIMARY KEY, a bytea[])",
        "ALTER TABLE b REPLICA IDENTITY FULL",
        f"INSERT INTO b VALUES ('\\x{value.hex()}', ARRAY['\\x{value.hex()}', NULL]::bytea[])",
        "DELETE FROM b",
    )
    expected = base64.b64encode(value).decode()
    assert created.key == deleted.key == {"k": expected}
    assert created.after == deleted.before == {"k": expected, "a": [expected, None]}


def test_a_bytea_has_the_form_that_the_configuration_says(hexadecimal: Case) -> None:
    [event] = hexadecimal(
        "CREATE TABLE b (id int PRIMARY KEY, v bytea)", "INSERT INTO b VALUES (1, '\\x000102fbff')"
    )
    assert event.after["v"] == "000102fbff"


def test_a_char_is_padded_to_its_length_and_a_bpchar_is_not(case: Case) -> None:
    created, deleted = case(
        "CREATE TABLE padded (k char(3) PRIMARY KEY, a char(5), b bpchar, c varchar(5), d char)",
        "INSERT INTO padded VALUES ('ü', 'ab', 'ab  ', 'ab ', '')",
        "DELETE FROM padded WHERE k = 'ü'",
    )
    assert created.after == {"k": "ü  ", "a": "ab   ", "b": "ab  ", "c": "ab ", "d": " "}
    assert created.key == deleted.key == {"k": "ü  "}


def test_citext_keeps_its_case(case: Case) -> None:
    [event] = case(
        "CREATE EXTENSION citext SCHEMA public",
        "CREATE TABLE insensitive (k citext PRIMARY KEY, a citext[])",
        "INSERT INTO insensitive VALUES ('MiXed', '{Ab,NULL,\"c,D\"}')",
    )
    assert event.after == {"k": "MiXed", "a": ["Ab", None, "c,D"]}


def test_bits_are_digits(case: Case) -> None:
    created, deleted = case(
        "CREATE TABLE bits (k bit(3) PRIMARY KEY, a bit, b varbit, c varbit(5), d bit(9))",
        "INSERT INTO bits VALUES (B'010', B'1', B'', B'01', B'000000000')",
        "DELETE FROM bits",
    )
    assert created.after == {"k": "010", "a": "1", "b": "", "c": "01", "d": "000000000"}
    assert deleted.key == {"k": "010"}


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "NULL",
        "\\N",
        "𝄞 Zoë 漢字 🏳️‍🌈",
        "line\nbreak\r\n\ttab",
        "\x01\x1f\x7f\u0085\u2028\ufeff\uffff",
        "\\u0000 \\x41 \\",
        "\"quoted\" 'and' {braced} [1,2]",
        "e\u0301 is not \u00e9",
        "__debezium_unavailable_value",
    ],
    ids=repr,
)
def test_text_is_character_for_character_what_was_written(case: Case, value: str) -> None:
    with case.connect() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS texts (k text PRIMARY KEY, v text)")
        connection.execute("INSERT INTO texts VALUES (%s, %s)", [value, value])
        connection.execute("DELETE FROM texts")
    created, deleted = case.events()
    assert created.after == {"k": value, "v": value}
    assert created.key == deleted.key == deleted.before == {"k": value}
    assert "unchanged" not in created.source


def test_empty_text_is_not_null(case: Case) -> None:
    empty, null = case(
        "CREATE TABLE nothing (id int PRIMARY KEY, t text, v varchar, b bytea, a text[])",
        "INSERT INTO nothing VALUES (1, '', '', '', '{}')",
        "INSERT INTO nothing VALUES (2)",
    )
    assert empty.after == {"id": 1, "t": "", "v": "", "b": "", "a": []}
    assert null.after == {"id": 2, "t": None, "v": None, "b": None, "a": None}


def test_a_zero_character_is_refused_by_postgres_and_harms_nothing(case: Case) -> None:
    case("CREATE TABLE zeroes (id int PRIMARY KEY, v jsonb)")
    with pytest.raises(psycopg.errors.UntranslatableCharacter):
        case.run("INSERT INTO zeroes VALUES (1, '\"\\u0000\"')")
    [event] = case("INSERT INTO zeroes VALUES (2, '\"\\\\u0000\"')")
    assert event.after == {"id": 2, "v": '"\\\\u0000"'}


@pytest.mark.parametrize("name", _STRANGE)
def test_any_name_of_table_and_columns_reaches_topic_key_and_row(case: Case, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    other = '"' + name.replace('"', '""') + '2"'
    created, updated, deleted = case(
        f"CREATE TABLE {quoted} ({quoted} int PRIMARY KEY, {other} text)",
        f"INSERT INTO {quoted} VALUES (1, 'a')",
        f"UPDATE {quoted} SET {other} = 'b'",
        f"DELETE FROM {quoted}",
    )
    assert created.key == updated.key == deleted.key == {name: 1}
    assert (created.after, updated.after) == (
        {name: 1, f"{name}2": "a"},
        {name: 1, f"{name}2": "b"},
    )
    assert created.table == name
    assert created.topic == f"{case.pipeline.config.prefix}.public.{escaped(name)}"
    assert case.schema(created)["key"] == [name]


def escaped(name: str) -> str:
    """Return a name as topics have it by docs/EVENTS.md."""
    found = ""
    for i, letter in enumerate(name):
        hexes = name[i + 2 : i + 4]
        escape_ahead = name[i + 1 : i + 2] == "x" and len(hexes) == 2
        escape_ahead = escape_ahead and all(each in "0123456789ABCDEF" for each in hexes)
        plain = letter.isascii() and (letter.isalnum() or letter == "-")
        if plain or (letter == "_" and not escape_ahead):
            found += letter
        else:
            found += "".join(f"_x{each:02X}" for each in letter.encode())
    return found


def test_a_schema_of_any_name_is_captured(new_case: NewCase) -> None:
    quoted = '"Quoted_"" . Schema"'
    with_schema = new_case(
        f"CREATE SCHEMA {quoted}",
        f'CREATE TABLE {quoted}."Tab.le" (id int PRIMARY KEY, v text)',
        source={"tables": [f"{quoted}.*"], "new_tables": "setup"},
    )
    [event] = with_schema(f"""INSERT INTO {quoted}."Tab.le" VALUES (1, 'x')""")
    assert (event.source["schema"], event.table) == ('Quoted_" . Schema', "Tab.le")
    assert event.topic.split(".", 1)[1] == "Quoted__x22_x20_x2E_x20Schema.Tab_x2Ele"


def test_the_longest_name_that_postgres_takes_is_captured(case: Case) -> None:
    name = "n" * 63
    [event] = case(
        f'CREATE TABLE "{name}" ("{name}" int PRIMARY KEY)', f'INSERT INTO "{name}" VALUES (1)'
    )
    assert event.after == event.key == {name: 1}


def test_a_name_too_long_for_a_topic_is_refused_beforehand(new_case: NewCase) -> None:
    with pytest.raises(CDCError, match="would be 269 characters long") as refused:
        new_case(f'CREATE TABLE "{"ü" * 31}" (id int PRIMARY KEY)')
    assert "shorten log.prefix" in refused.value.hint


def test_a_table_of_very_many_columns_is_captured(case: Case) -> None:
    """1,600 is the most; as integers they still fit on a page."""
    columns = [f"c{i}" for i in range(1600)]
    [event] = case(
        f"CREATE TABLE wide ({', '.join(f'{name} int' for name in columns)}, PRIMARY KEY (c0))",
        f"INSERT INTO wide VALUES ({', '.join(map(str, range(1600)))})",
    )
    assert event.after == {name: i for i, name in enumerate(columns)}


def test_a_table_without_columns_makes_rows_without_values(case: Case) -> None:
    [event] = case("CREATE TABLE bare ()", "INSERT INTO bare DEFAULT VALUES")
    assert (event.op, event.key, event.after) == ("c", None, {})
