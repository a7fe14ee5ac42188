"""CASES for followers: keys of odd types, rows that exchange keys, names, dropped columns.

Followers start late, so that one batch has many table versions; each store is read as its own
readers would, and must hold what the database holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import requests

from cdc.events import LSN
from cdc.playground.demo.stores import prove_followers
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures.followed import Followed

if TYPE_CHECKING:
    from pathlib import Path

    import redis
    from pyspark.sql import SparkSession

    from tests.fixtures.daemon import NewPipeline

pytestmark = pytest.mark.slow

# What a row's key is, and values of it: each is inserted, moved to the next and changed.
_KEYS = {
    "arrays": ("int[]", "'{}'", "'{1,NULL}'", "'{2,3}'"),
    "texts": ("text[]", """'{"",NULL}'""", """'{"a,b","NULL"}'""", "'{}'"),
    "pairs": ("pair", "'(1,)'", "'(,)'", "'(1,\"a:b\")'"),
    "moments": ("timestamptz", "'infinity'", "'-infinity'", "'0044-03-15 00:00:00+00 BC'"),
    "numbers": ("numeric", "1.0", "1.00", "'NaN'"),
    "words": ("text", "''", "'a:b%/'", "repeat('é', 700)"),
    "bytes": ("bytea", "'\\x'", "'\\x00'", "'\\x0000'"),
    "documents": ("jsonb", "'null'", "'{\"a\": [1.0]}'", "'[]'"),
}


def _keyed(table: str) -> tuple[str, ...]:
    kind, *values = _KEYS[table]
    one, two, three = (f"{value}::{kind}" for value in values)
    return (
        f"CREATE TABLE {table} (k {kind} PRIMARY KEY, n int, body text)",
        f"ALTER TABLE {table} ALTER body SET STORAGE EXTERNAL",
        f"INSERT INTO {table} VALUES ({one}, 1, repeat('x', 4000))",
        f"UPDATE {table} SET n = 2",
        f"UPDATE {table} SET k = {two}",
        f"INSERT INTO {table} VALUES ({three}, 3, '')",
        f"UPDATE {table} SET n = n + 1",
        f"DELETE FROM {table} WHERE k = {three}; INSERT INTO {table} VALUES ({three}, 4, NULL)",
    )


_VERSIONS = (
    "CREATE TABLE versions (id int PRIMARY KEY, a text, b text)",
    "INSERT INTO versions SELECT g, 'a', 'b' FROM generate_series(1, 4) g",
    "ALTER TABLE versions ADD c int DEFAULT 7, ALTER b TYPE varchar(9)",
    "UPDATE versions SET c = 8 WHERE id = 1",
    "ALTER TABLE versions DROP c, ADD d text",
    "ALTER TABLE versions RENAME a TO e",
    # Two rows exchange their keys.
    "UPDATE versions SET id = -id WHERE id < 3; UPDATE versions SET id = 3 + id WHERE id < 0",
    "UPDATE versions SET e = 'e' || id, d = ''",
)
# Names that collide without escaping: `"a.b".c` and `a."b.c"`, `a."t:a"` and the key `a:1` of
# `a.t`. A table as stores name it, its alias, and the key of its row.
_NAMES = (
    ('"a.b".c', "a_x2eb.c", "1"),
    ('a."b.c"', "a.b_x2ec", "1"),
    ('a."t:a"', "a.t_x3aa", "1"),
    ("a.t", "a.t", "a:1"),
)


def test_keys_versions_and_names_of_any_kind(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_url: str,
    redis_client: redis.Redis,
    opensearch_url: str,
    tmp_path: Path,
) -> None:
    """Keys change, columns are dropped in the batch that brings them, names are alike."""
    lake = str(tmp_path / "lake")
    line = pipeline(
        "CREATE TYPE pair AS (a int, b text)",
        'CREATE SCHEMA "a.b"',
        "CREATE SCHEMA a",
        *(f"CREATE TABLE {table} (id text PRIMARY KEY, v text)" for table, _, _ in _NAMES),
        *(statement for table in _KEYS for statement in _keyed(table)[:2]),
        _VERSIONS[0],
        source={"tables": ["*.*"]},
        followers={
            "mirror": {"delta": {"path": lake}},
            "cache": {"redis": {"url": redis_url}},
            "search": {"opensearch": {"url": opensearch_url}},
        },
    )
    line.start().wait_ready()
    line.database.execute(
        *(statement for table in _KEYS for statement in _keyed(table)[2:]),
        *_VERSIONS[1:],
        *(f"INSERT INTO {table} VALUES ('{key}', '{alias}')" for table, alias, key in _NAMES),
        *(f"INSERT INTO {table} VALUES ('2', '')" for table, _, _ in _NAMES),
        *(f"DELETE FROM {table} WHERE id = '2'" for table, _, _ in _NAMES),
    )
    reached = LSN.parse(line.query("SELECT pg_current_wal_insert_lsn()::text")[0])
    Followed(line, spark).follow("mirror", "cache", "search")
    config = line.config
    # The proof supports plain names only.
    plain = {
        name: msgspec.structs.replace(each, tables=("public.*",))
        for name, each in config.followers.items()
    }
    proof = prove_followers(msgspec.structs.replace(config, followers=plain), reached)
    assert proof.equal, proof.findings
    assert set(proof.rows.values()) == {2 * len(_KEYS) + 4}
    mirrors = read_as_of_arrow(lake, [table for table, _, _ in _NAMES]).tables
    for table, alias, key in _NAMES:
        row = {"id": key, "v": alias}
        assert mirrors[table].select(["id", "v"]).to_pylist() == [row]
        place = f"{config.prefix}:{table}"
        assert redis_client.get(f"{place}:{key}") == msgspec.json.encode(row)
        assert redis_client.get(f"{place}:2") is None
        found = requests.get(f"{opensearch_url}/{config.prefix}-{alias}/_search", timeout=60).json()
        assert [hit["_source"] for hit in found["hits"]["hits"]] == [row]
