"""Types that are not built in: domains, enums, composites, extensions' types, from a real server.

The stream has only their names. Their definition when the change was made counts, not the one in
the catalog when it is read.
"""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from cdc.config.value_options import Values
from cdc.encode.values import undescribed
from cdc.source.lookups import defined_by_users
from tests.fixtures.decoded import Decoded
from tests.integration.test_values_types import OPTIONS, come_back, fill
from tests.integration.value_table import EXTENSIONS
from tests.property import array_text

LONG = "abcdefghij" * 400


def rows(decoded: Decoded, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - any option's
    [events] = decoded.events(Values(**options))
    return [event["after"] for event in events if event["op"] != "m"]


def test_a_domain_is_its_base_type_however_deep(decoded: Decoded) -> None:
    decoded.write(
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        "CREATE DOMAIN small AS positive CHECK (VALUE < 10)",
        "CREATE DOMAIN price AS numeric(5,2)",
        "CREATE DOMAIN discounted AS price NOT NULL",
        "CREATE DOMAIN at AS timestamp(3)",
        "CREATE DOMAIN ints AS int[]",
        "CREATE TYPE mood AS ENUM ('sad')",
        "CREATE DOMAIN feeling AS mood",
        "CREATE DOMAIN flag AS boolean",
        "CREATE TABLE t (id int PRIMARY KEY, p positive, s small, d discounted, at at, i ints,"
        " f feeling, b flag, ps positive[])",
        "INSERT INTO t VALUES (1, 5, 6, 1.5, '2016-11-04 13:51:30.1239', '{1,NULL}', 'sad', 't',"
        " '{5,NULL}')",
        "ALTER TABLE t ADD small2 small DEFAULT 7",
        "INSERT INTO t SELECT 2, p, s, d, at, i, f, b, ps FROM t",
    )
    first, second = rows(decoded)
    assert first == {
        "id": "1",
        "p": "5",
        "s": "6",
        "d": "1.50",
        "at": "1478267490124000",  # the domain's modifier is not in the stream
        "i": ["1", None],
        "f": "sad",
        "b": True,
        # The stream has an array type's name, but not its element type.
        "ps": ["5", None],
    }
    assert [type(first[name]).__name__ for name in ("p", "ps")] == ["Number", "list"]
    assert type(first["ps"][0]) is str
    assert second == first | {"id": "2", "small2": "7"}


def test_domains_come_back_under_every_option(decoded: Decoded) -> None:
    base = {"positive": ("int8", "9007199254740993"), "price": ("numeric(5,2)", "1.50"),
            "at": ("timestamp(3)", "2016-11-04 13:51:30.123"), "span": ("interval", "1 mon"),
            "data": ("bytea", "\\xfbff"), "cash": ("money", "1.50"), "day": ("date", "infinity"),
            "clock": ("time(0)", "24:00:00"), "ints": ("int[]", "{{1,2}}")}  # fmt: skip
    for name, (kind, value) in base.items():
        decoded.write(f"CREATE DOMAIN {name} AS {kind}")
        fill(decoded, f"public.t_{name}", f"public.{name}", (value,))
    for options, events in zip(OPTIONS, decoded.events(*OPTIONS), strict=True):
        for name in base:
            of_table = [each for each in events if each["source"]["table"] == f"t_{name}"]
            come_back(decoded, f"public.t_{name}", in_text(of_table), options)


def in_text(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events with arrays of domains as Postgres' text, as their elements are."""
    for event in events:
        array = event["after"]["a"]
        if isinstance(array, list):
            event["after"]["a"] = array_text.write(array, str)
    return events


def test_enums_of_one_name_in_two_schemas_with_values_added_mid_stream(decoded: Decoded) -> None:
    decoded.write(
        """CREATE TYPE mood AS ENUM ('sad', 'it''s "ok"')""",
        "CREATE SCHEMA other",
        """CREATE TYPE other.mood AS ENUM ('{a,b}', '')""",
        """CREATE TYPE "Od.d _" AS ENUM ('x')""",
        "CREATE TYPE _status AS ENUM ('{open}', 'NULL', '{\"a\"}', 'closed')",
        "CREATE TABLE t (id serial PRIMARY KEY, m mood, ms mood[], o other.mood, os other.mood[],"
        ' q "Od.d _", qs "Od.d _"[], s _status, ss _status[])',
        """INSERT INTO t (m, ms, o, os, q, qs, s, ss) VALUES ('it''s "ok"', ARRAY['sad', NULL,
           'it''s "ok"']::mood[], '{a,b}', ARRAY['{a,b}', '']::other.mood[], 'x', '{x}', '{open}',
           ARRAY['NULL', NULL, 'closed']::_status[])""",
        "ALTER TYPE mood ADD VALUE 'new, one'",
        "INSERT INTO t (m, ms, s) VALUES ('new, one', ARRAY['new, one']::mood[], '{\"a\"}')",
        "ALTER TYPE mood RENAME VALUE 'new, one' TO 'newer'",
        "INSERT INTO t (m) VALUES ('newer')",
    )
    first, second, third = rows(decoded)
    assert first["m"] == 'it\'s "ok"'
    assert first["ms"] == ["sad", None, 'it\'s "ok"']
    assert (first["o"], first["os"]) == ("{a,b}", ["{a,b}", ""])
    assert (first["q"], first["qs"]) == ("x", ["x"])
    assert first["s"] == ["open"]  # an enum named like an array, with a label like one
    assert first["ss"] == ["NULL", None, "closed"]
    assert (second["m"], second["ms"]) == ("new, one", ["new, one"])  # its name at that time
    assert second["s"] == '{"a"}'  # an array is never written like this
    assert third["m"] == "newer"


def test_composites_and_ranges_of_users_come_back(decoded: Decoded) -> None:
    decoded.write(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TYPE nested AS (p pair, ps pair[])",
        "CREATE TYPE floats AS RANGE (subtype = float8)",
    )
    fill(decoded, "public.p", "public.pair", ('(1,"a,b ""q"" \\\\")', "(,)", '(,"")'))
    fill(decoded, "public.n", "public.nested", ('("(1,x)","{""(2,y)"",NULL}")',))
    fill(decoded, "public.f", "public.floats", ("[1.5,2.5)", "empty", "(,NaN]"))
    for options, events in zip(OPTIONS, decoded.events(*OPTIONS), strict=True):
        for table in ("p", "n", "f"):
            of_table = [each for each in events if each["source"]["table"] == table]
            come_back(decoded, f"public.{table}", of_table, options)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_values_of_an_extensions_types_come_back(decoded: Decoded, extension: str) -> None:
    found = decoded.sql.execute(
        "SELECT 1 FROM pg_available_extensions WHERE name = %s", [extension]
    ).fetchone()
    if not found:
        pytest.skip(f"the server has no extension {extension}")
    decoded.sql.execute("CREATE SCHEMA ext")
    decoded.sql.execute(
        sql.SQL("CREATE EXTENSION {} SCHEMA ext CASCADE").format(sql.Identifier(extension))
    )
    for name, values in EXTENSIONS[extension].items():
        fill(decoded, f"public.t_{name}", f"ext.{name}", values)
    for options, events in zip(OPTIONS, decoded.events(*OPTIONS), strict=True):
        for name in EXTENSIONS[extension]:
            of_table = [each for each in events if each["source"]["table"] == f"t_{name}"]
            come_back(decoded, f"public.t_{name}", of_table, options)
            assert isinstance(of_table[1]["after"]["a"], list)


def made_by_hand(decoded: Decoded, name: str, delimiter: str) -> None:
    """Create a base type that accepts any text, as an extension would."""
    decoded.sql.execute(
        f"CREATE TYPE public.{name};"
        f"CREATE FUNCTION public.{name}_in(cstring) RETURNS public.{name} LANGUAGE internal"
        " IMMUTABLE STRICT AS 'textin';"
        f"CREATE FUNCTION public.{name}_out(public.{name}) RETURNS cstring LANGUAGE internal"
        " IMMUTABLE STRICT AS 'textout';"
        f"CREATE TYPE public.{name} (INPUT = public.{name}_in, OUTPUT = public.{name}_out,"
        f" STORAGE = extended, DELIMITER = '{delimiter}')".encode()
    )


@pytest.mark.parametrize(
    ("name", "delimiter"), [("geometry", ":"), ("geography", ":"), ("own", ",")]
)
def test_an_unknown_type_is_its_exact_text(decoded: Decoded, name: str, delimiter: str) -> None:
    """PostGIS puts a colon between the elements of its arrays; the type's name shows that."""
    made_by_hand(decoded, name, delimiter)
    values = ("0101000020E6100000", "", ",", ":", 'q " \\ {}', "NULL", "𝄞", "[1:2]={a}")
    fill(decoded, "public.t", f"public.{name}", values)
    for options, events in zip(OPTIONS, decoded.events(*OPTIONS), strict=True):
        come_back(decoded, "public.t", events, options)
        assert [event["after"]["v"] for event in events[: len(values)]] == list(values)
        assert events[1]["after"]["a"] == [*values, None]


def test_only_what_no_user_defined_counts_as_unknown(decoded: Decoded) -> None:
    made_by_hand(decoded, "own", ",")
    decoded.write(
        "CREATE TYPE mood AS ENUM ('sad')",
        "CREATE TYPE pair AS (a int)",
        "CREATE TYPE floats AS RANGE (subtype = float8)",
        "CREATE DOMAIN price AS numeric",
        "CREATE TABLE t (id int PRIMARY KEY, o own, os own[], m mood, ms mood[], p pair, f floats,"
        " ds price[], d price, i int[])",
        "INSERT INTO t VALUES (1)",
    )
    [schema] = decoded.schemas()
    kinds = {column.name: undescribed(column.type) for column in schema.columns}
    ours = defined_by_users(decoded.sql, [kind for kind in kinds.values() if kind])
    unknown = {name for name, kind in kinds.items() if kind and kind not in ours}
    assert unknown == {"o", "os"}
    assert kinds["d"] is None


def test_unchanged_toast_has_the_placeholder_of_the_options(decoded: Decoded) -> None:
    decoded.write(
        "CREATE TABLE t (id int PRIMARY KEY, n int, a text[])",
        "ALTER TABLE t ALTER a SET STORAGE EXTERNAL",
        f"INSERT INTO t VALUES (1, 1, ARRAY['{LONG}'])",
        "UPDATE t SET n = 2",
    )
    [plain, other] = decoded.events(Values(), Values(unavailable_value_placeholder='"none"'))
    assert plain[1]["after"]["a"] == "__debezium_unavailable_value"
    assert other[1]["after"]["a"] == '"none"'
    assert plain[1]["source"]["unchanged"] == other[1]["source"]["unchanged"] == ["a"]
    assert plain[0]["after"]["a"] == [LONG]
