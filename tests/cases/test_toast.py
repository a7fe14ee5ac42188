"""CASES "TOAST": what Postgres did not send is marked and never null; what it sent is complete."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.cases import Case, Event

pytestmark = pytest.mark.majors

TABLES = ("CREATE EXTENSION hstore SCHEMA public",)
_PLACEHOLDER = "__debezium_unavailable_value"
_EACH = "FROM generate_series(1, 2000) i"

# Type → SQL of a value that is stored out of line.
_LARGE = {
    "text": "repeat('abcdefghij', 1000)",
    "varchar(20000)": "repeat('abcdefghij', 1000)",
    "char(9000)": "repeat('x', 9000)",
    "jsonb": "to_jsonb(repeat('abcdefghij', 1000))",
    "json": "to_json(repeat('abcdefghij', 1000))",
    "xml": "('<a>' || repeat('abcdefghij', 1000) || '</a>')::xml",
    "bytea": "decode(repeat('00ff5c22', 2000), 'hex')",
    "numeric": "(repeat('1234567890', 2000) || '.5')::numeric",
    "hstore": f"(SELECT hstore(array_agg(i::text), array_agg('v'::text)) {_EACH})",
    "text[]": f"(SELECT array_agg('t' || i) {_EACH})",
    "integer[]": f"(SELECT array_agg(i) {_EACH})",
    "bigint[]": f"(SELECT array_agg(i::bigint) {_EACH})",
    "uuid[]": f"(SELECT array_agg(md5(i::text)::uuid) {_EACH})",
    "date[]": f"(SELECT array_agg(date '2000-01-01' + i) {_EACH})",
    "bytea[]": f"(SELECT array_agg('\\x00ff'::bytea) {_EACH})",
    "json[]": f"(SELECT array_agg(to_json(i)) {_EACH})",
    "numeric[]": f"(SELECT array_agg(i + 0.5) {_EACH})",
    "varbit": "repeat('01', 40000)::varbit",
    "tsvector": f"(SELECT to_tsvector('simple', string_agg('w' || i, ' ')) {_EACH})",
    "path": f"(SELECT ('[' || string_agg('(1,' || i || ')', ',') || ']')::path {_EACH})",
    "int4multirange": f"(SELECT range_agg(int4range(3 * i, 3 * i + 1)) {_EACH})",
}


def table_of(kind: str, identity: str) -> tuple[str, tuple[str, ...]]:
    """Return a name, and what makes a table with one value of the type out of line."""
    name = f'"{identity} {kind}"'
    return name, (
        f"CREATE TABLE {name} (id int PRIMARY KEY, n int, v {kind})",
        f"ALTER TABLE {name} ALTER v SET STORAGE EXTERNAL, REPLICA IDENTITY {identity}",
        f"INSERT INTO {name} VALUES (1, 0, {_LARGE[kind]})",
    )


def _history(kind: str, identity: str, *changes: str) -> tuple[str, ...]:
    table, made = table_of(kind, identity)
    return (*made, *(each.format(table) for each in changes))


@pytest.fixture(scope="module")
def toasted(case: Case) -> dict[str, list[Event]]:
    """Return the events of two tables of each type, one of each identity."""
    own = ("UPDATE {} SET n = 1", "UPDATE {} SET v = NULL, n = 2", "UPDATE {} SET n = 3")
    full = ("UPDATE {} SET n = 1", "UPDATE {} SET id = 2", "DELETE FROM {}")
    return case.by_table(
        *(
            each
            for kind in _LARGE
            for each in (*_history(kind, "DEFAULT", *own), *_history(kind, "FULL", *full))
        )
    )


@pytest.mark.parametrize("kind", _LARGE)
def test_by_default_what_is_unchanged_is_marked_and_never_null(
    case: Case, toasted: dict[str, list[Event]], kind: str
) -> None:
    created, kept, cleared, null = toasted[f"DEFAULT {kind}"]
    assert created.after["v"] not in (None, _PLACEHOLDER)
    assert (kept.after, kept.unchanged) == ({"id": 1, "n": 1, "v": _PLACEHOLDER}, ["v"])
    assert (cleared.after, cleared.unchanged) == ({"id": 1, "n": 2, "v": None}, [])
    assert (null.after, null.unchanged) == ({"id": 1, "n": 3, "v": None}, [])
    assert case.columns(kept)["v"] == case.columns(created)["v"]


@pytest.mark.parametrize("kind", _LARGE)
def test_under_full_what_is_unchanged_is_filled_from_the_old_row(
    toasted: dict[str, list[Event]], kind: str
) -> None:
    created, kept, missing, moved, deleted = toasted[f"FULL {kind}"]
    value: Any = created.after["v"]
    assert value not in (None, _PLACEHOLDER)
    assert kept.before == {"id": 1, "n": 0, "v": value}
    assert kept.after == missing.before == {"id": 1, "n": 1, "v": value}
    assert moved.after == deleted.before == {"id": 2, "n": 1, "v": value}
    assert [e.unchanged for e in (created, kept, moved)] == [[], [], []]


@pytest.mark.parametrize("kind", ["text", "jsonb", "bytea", "text[]", "integer[]", "numeric"])
def test_a_value_out_of_line_arrives_complete(case: Case, kind: str) -> None:
    table, made = table_of(kind, "NOTHING")
    [event] = case(*made)
    value = event.after["v"]
    if kind == "bytea":
        assert len(value) == -(-8000 // 3) * 4
    elif isinstance(value, list):
        assert len(value) == 2000
        assert value[-1] in ("t2000", 2000)
    else:
        assert value == case.ask(f"SELECT v::text FROM {table}")


def test_a_changed_key_leaves_what_is_unchanged_marked_in_the_create(case: Case) -> None:
    _, deleted, created = case(
        "CREATE TABLE moves (id int PRIMARY KEY, v text)",
        "ALTER TABLE moves ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO moves VALUES (1, repeat('x', 9000))",
        "UPDATE moves SET id = 2",
    )
    assert (deleted.before, deleted.tombstone) == ({"id": 1}, True)
    assert (created.op, created.key) == ("c", {"id": 2})
    assert (created.after["v"], created.unchanged) == (_PLACEHOLDER, ["v"])


def test_text_that_reads_like_the_placeholder_is_not_marked(case: Case) -> None:
    [event] = case(
        "CREATE TABLE likeness (id int PRIMARY KEY, v text)",
        f"INSERT INTO likeness VALUES (1, '{_PLACEHOLDER}')",
    )
    assert (event.after["v"], event.unchanged) == (_PLACEHOLDER, [])


def test_a_toasted_key_that_stays_is_the_same_key(case: Case) -> None:
    key = "k" * 2600
    created, updated, moved_from, moved_to = case(
        "CREATE TABLE long_key (k text PRIMARY KEY, n int, v text)",
        "ALTER TABLE long_key ALTER k SET STORAGE EXTERNAL, ALTER v SET STORAGE EXTERNAL",
        f"INSERT INTO long_key VALUES ('{key}', 1, repeat('y', 5000))",
        "UPDATE long_key SET n = 2",
        "UPDATE long_key SET k = 'short'",
    )
    assert created.key_bytes == updated.key_bytes == moved_from.key_bytes
    assert updated.after == {"k": key, "n": 2, "v": _PLACEHOLDER}
    assert updated.unchanged == ["v"]
    assert moved_to.key == {"k": "short"}
    assert moved_to.unchanged == ["v"]


def test_two_updates_of_one_row_in_one_transaction_mark_each_what_it_did_not_send(
    case: Case,
) -> None:
    case(
        "CREATE TABLE twice (id int PRIMARY KEY, n int, v text)",
        "ALTER TABLE twice ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO twice VALUES (1, 0, repeat('x', 9000))",
    )
    with case.connect(autocommit=False) as connection:
        connection.execute("UPDATE twice SET v = repeat('new', 2000)")
        connection.execute("UPDATE twice SET n = 9")
    first, second = case.events()
    assert (first.after["v"], first.unchanged) == ("new" * 2000, [])
    assert (second.after, second.unchanged) == ({"id": 1, "n": 9, "v": _PLACEHOLDER}, ["v"])
