"""Snapshot = stream: an existing row and an inserted one give the same bytes.

All except what distinguishes them: `op`, `seq`, the times and the position in the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cdc.config import Mask, TableRule
from cdc.config.keyring import KeyringConfig
from cdc.config.value_options import Values
from cdc.errors import ConfigError
from cdc.keyring import file
from tests.fixtures.servers import Database
from tests.integration.both_ways import BothWays
from tests.integration.test_values_ascii import ascii_dsn, write
from tests.integration.test_values_random import RANDOM_OPTIONS, RANDOM_ROW, fill
from tests.integration.test_values_types import filling
from tests.integration.value_table import VALUES

__all__ = ["ascii_dsn"]

# Extensions that the server may have, with a type and values of it.
EXTENSIONS = {
    "hstore": ("hstore", ('"a"=>"1", "b"=>NULL', "", '"k\\"q"=>"ü, ,"')),
    "ltree": ("ltree", ("Top.Science", "")),
    "citext": ("citext", ("MiXed", "ß")),
    "cube": ("cube", ("(1, 2),(3, 4)",)),
    "isn": ("isbn13", ("978-0-393-04002-9",)),
    "vector": ("vector", ("[1,2.5,-3]",)),
}
# Every option that is not the default; the random test covers single options.
OTHERWISE = Values(
    decimal_handling_mode="precise",
    time_precision_mode="isostring",
    binary_handling_mode="base64-url-safe",
    interval_handling_mode="string",
    hstore_handling_mode="map",
    bigint_handling_mode="string",
    invalid_text_handling_mode="base64",
)
USERS_TYPES = (
    "CREATE SCHEMA other",
    'CREATE TABLE other."odd.Table" (id int PRIMARY KEY)',
    "CREATE TYPE other.\"Odd\" AS ENUM ('x', 'y \"z\"')",
    "CREATE TYPE other.pair AS (a int, b text)",
    "CREATE TYPE other.nested AS (p other.pair, ps other.pair[])",
    "CREATE TYPE other.floats AS RANGE (subtype = float8)",
    "CREATE DOMAIN other.positive AS int CHECK (VALUE > 0)",
    "CREATE DOMAIN other.deep AS other.positive",
    'CREATE DOMAIN other.feeling AS other."Odd"',
    "CREATE DOMAIN other.ints AS int[]",
    "CREATE DOMAIN other.couple AS other.pair",
    "CREATE DOMAIN other.span AS other.floats",
    "CREATE DOMAIN other.short AS char(5)",
    "CREATE DOMAIN other.flag AS bool",
)
USERS_VALUES = {
    'other."Odd"': ("x", 'y "z"'),
    "other.pair": ('(1,"a, ""b""")', "(,)"),
    "other.nested": ('("(1,x)","{""(2,y)"",NULL}")',),
    "other.floats": ("[1.5,2.5)", "empty", "(,)"),
    "other.positive": ("5",),
    "other.deep": ("6",),
    "other.feeling": ("x",),
    "other.ints": ("{1,NULL}", "[0:1]={1,2}"),
    "other.couple": ("(1,a)",),
    "other.span": ("[1.5,2.5)",),
    "other.short": ("ab", "     "),
    "other.flag": ("t",),
}


@pytest.fixture
def both(database: Database) -> Iterator[BothWays]:
    with BothWays(database.dsn) as ways:
        yield ways


def test_every_type_is_the_same(both: BothWays) -> None:
    both.write(*USERS_TYPES)
    there = {row[0] for row in both.sql.execute("SELECT name FROM pg_available_extensions")}
    values = VALUES | USERS_VALUES
    for extension, (kind, examples) in EXTENSIONS.items():
        if extension in there:
            both.write(f"CREATE EXTENSION {extension} SCHEMA other")
            values |= {f"other.{kind}": examples}
    for number, (kind, examples) in enumerate(values.items()):
        filling(both.sql, f"public.t{number}", kind, examples)
    rows = both.compare(Values(), OTHERWISE)
    assert {each.source["table"] for each in rows} >= {f"t{n}" for n in range(len(values))}


@pytest.mark.parametrize("partitions", ["root", "leaf"])
def test_tables_of_every_shape_are_the_same(database: Database, partitions: str) -> None:
    via_root = str(partitions == "root").lower()
    publication = f"ALL TABLES WITH (publish_via_partition_root = {via_root})"
    with BothWays(database.dsn, None, publication) as ways:
        ways.write(
            'CREATE SCHEMA "we.ird %b"',
            'CREATE TABLE "we.ird %b"."T ""q"" %s" ("i d" int, "v%d" text, "%(x)s" bool,'
            ' PRIMARY KEY ("v%d", "i d"))',
            'INSERT INTO "we.ird %b"."T ""q"" %s" VALUES (1, \'%b "\', NULL), (2, \'\', true)',
            "CREATE TABLE generated (id int PRIMARY KEY, n int,"
            " twice int GENERATED ALWAYS AS (n * 2) STORED)",
            "INSERT INTO generated VALUES (1, 7), (2, NULL)",
            "CREATE TABLE changed (dropped text, id int PRIMARY KEY, n int4, also_dropped int)",
            "ALTER TABLE changed DROP dropped, DROP also_dropped",
            "ALTER TABLE changed ADD dropped bool",
            "INSERT INTO changed VALUES (1, 2, true)",
            "CREATE TABLE keyless (v text)",
            "INSERT INTO keyless VALUES ('twice'), ('twice'), (NULL)",
            "CREATE TABLE full_row (id int PRIMARY KEY, v text)",
            "ALTER TABLE full_row REPLICA IDENTITY FULL",
            "INSERT INTO full_row VALUES (1, 'v')",
            "CREATE TABLE by_index (id int PRIMARY KEY, a int NOT NULL, b text NOT NULL)",
            "CREATE UNIQUE INDEX by_index_b_a ON by_index (b, a)",
            "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b_a",
            "INSERT INTO by_index VALUES (1, 2, 'three')",
            "CREATE TABLE parts (id int, region text, v text, PRIMARY KEY (region, id))"
            " PARTITION BY LIST (region)",
            "CREATE TABLE parts_eu PARTITION OF parts FOR VALUES IN ('eu')",
            # Columns in another order, as in an attached table.
            "CREATE TABLE parts_us (v text, x int, region text NOT NULL, id int NOT NULL)",
            "ALTER TABLE parts_us DROP x",
            "ALTER TABLE parts ATTACH PARTITION parts_us FOR VALUES IN ('us')",
            "INSERT INTO parts SELECT n, CASE n % 2 WHEN 0 THEN 'eu' ELSE 'us' END, 'v' || n"
            " FROM generate_series(1, 9) n",
            "CREATE TABLE large (id int PRIMARY KEY, body text)",
            "INSERT INTO large SELECT n, string_agg(md5(i::text), '') FROM generate_series(1, 3) n,"
            " generate_series(1, n * 30000) i GROUP BY n",
            "CREATE TABLE many (id int PRIMARY KEY, v text)",
            "INSERT INTO many SELECT n, repeat('x', n % 90) FROM generate_series(1, 3000) n",
            "CREATE TABLE empty (id int PRIMARY KEY)",
            "CREATE TABLE no_columns ()",
        )
        rows = ways.compare()
        assert len([each for each in rows if each.source["table"] == "many"]) == 3_000
        tables = {each.source["table"] for each in rows}
        assert tables >= {"keyless", "large", 'T "q" %s'}
        assert {t for t in tables if t.startswith("parts")} == (
            {"parts"} if partitions == "root" else {"parts_eu", "parts_us"}
        )


def test_masks_keys_columns_and_filters_are_the_same(database: Database, tmp_path: Path) -> None:
    secret = Mask("hmac", "a key of the tests' own")
    rules = {
        "public.users": TableRule(
            key=("tenant", "id"),
            exclude=("password",),
            mask={
                "tenant": secret, "email": secret, "name": Mask("truncate", 2),
                "note": Mask("null"), "salary": Mask("fixed", 0), "tags": Mask("fixed", "***"),
                "city": Mask("encrypt", "user:id"),
            },
        )
    }  # fmt: skip
    database.execute(
        "CREATE TABLE users (id int PRIMARY KEY, tenant text NOT NULL, email text, name text,"
        " note text, salary int, tags text[], password text, city text)",
        "CREATE UNIQUE INDEX by_tenant ON users (tenant, id)",
        "ALTER TABLE users REPLICA IDENTITY USING INDEX by_tenant",
    )
    with database.connect() as connection:
        major = connection.info.server_version // 10_000
    narrowed = " (id, tenant, email, name, note, salary, tags, city) WHERE (id > 10)"
    keyring = KeyringConfig(path=str(tmp_path / "keys.sqlite"))
    file.create(tmp_path / "keys.sqlite")
    captured = f"TABLE users{narrowed if major >= 15 else ''}"
    with BothWays(database.dsn, rules, captured, keyring) as ways:
        ways.write(
            "INSERT INTO users SELECT n, 't' || n % 3, 'e' || n, 'Zoë' || n, 'secret', n, '{a}',"
            " 'pw', 'secret' FROM generate_series(1, 40) n",
            "INSERT INTO users (id, tenant) VALUES (41, 't')",
        )
        rows = ways.compare()
        assert len(rows) == (31 if major >= 15 else 41)
        assert b"secret" not in b"".join(each.row for each in rows)
        assert b'"pw"' not in b"".join(each.row for each in rows)


def test_text_that_is_not_utf8_is_the_same(ascii_dsn: str) -> None:
    with BothWays(ascii_dsn) as ways:
        write(ascii_dsn)
        rows = ways.compare(Values(invalid_text_handling_mode="base64"))
        assert sum(b'{"base64":' in each.row for each in rows) == 1
        ways.with_values(Values())
        with pytest.raises(ConfigError) as raised:
            ways.copied()
        assert "values.invalid.text.handling.mode" in raised.value.hint


@settings(
    max_examples=15,
    # No shrinking: a failing example is small enough.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(rows=st.lists(RANDOM_ROW, min_size=3, max_size=8), options=RANDOM_OPTIONS)
def test_random_values_are_the_same(
    both: BothWays, rows: list[dict[str, tuple[str | None, Any]]], options: Values
) -> None:
    both.sql.execute("SELECT pg_replication_slot_advance('both', pg_current_wal_lsn())")
    fill(both.sql, rows)
    assert len(both.compare(options)) == len(rows)


def test_a_row_that_is_not_the_tables_stops_the_copy(both: BothWays) -> None:
    """Postgres' own refusal keeps its own error, and the connection can be used again."""
    both.write("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 0), (2, 1)")
    with pytest.raises(ConfigError, match="division by zero") as raised:
        both.copy_query(
            "COPY (SELECT textin(int4out(1 / n)) FROM public.t) TO STDOUT (FORMAT binary)"
        )
    assert "1 / n" not in str(raised.value)
    with pytest.raises(psycopg.errors.DivisionByZero):
        raise raised.value.__cause__ or AssertionError
    assert both.copy_query("COPY (SELECT 1) TO STDOUT (FORMAT binary)") == 1
