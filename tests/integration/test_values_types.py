"""Every type's values from a real server into events and back: the same under every option."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import TupleRow

from cdc.config.value_options import Values
from cdc.decode.types import TYPE_NAMES
from tests.fixtures.decoded import Decoded
from tests.integration.value_table import UNWRITABLE, VALUES
from tests.property.values_back import text_of

# Each choice of each option, except `numeric` intervals, which can't be converted back.
OPTIONS = (
    Values(),
    Values(decimal_handling_mode="precise"),
    Values(decimal_handling_mode="double"),
    Values(time_precision_mode="adaptive_time_microseconds"),
    Values(time_precision_mode="connect", binary_handling_mode="base64"),
    Values(time_precision_mode="isostring", binary_handling_mode="base64-url-safe"),
    Values(time_precision_mode="microseconds", binary_handling_mode="hex"),
    Values(time_precision_mode="nanoseconds", interval_handling_mode="string"),
    Values(bigint_handling_mode="string", hstore_handling_mode="map"),
    Values(invalid_text_handling_mode="base64", hstore_handling_mode="json"),
)


class Column(NamedTuple):
    """A column's base type as the stream names it, without its schema, and its modifier."""

    type: str
    modifier: int


def columns(decoded: Decoded, table: str) -> dict[str, Column]:
    """Return the table's columns; a domain as its base type, whose modifier is unknown."""
    rows = decoded.sql.execute(
        "WITH RECURSIVE base(attname, typid, modifier) AS ("
        " SELECT attname, atttypid, atttypmod FROM pg_attribute"
        " WHERE attrelid = %s::regclass AND attnum > 0"
        " UNION SELECT attname, typbasetype, -1 FROM base JOIN pg_type ON oid = typid"
        " WHERE typtype = 'd')"
        " SELECT attname, typname, modifier FROM base JOIN pg_type ON oid = typid"
        " WHERE typtype <> 'd'",
        [table],
    ).fetchall()
    return {name: Column(kind, modifier) for name, kind, modifier in rows}


def come_back(decoded: Decoded, table: str, events: list[dict[str, Any]], options: Values) -> None:
    """Fail unless every value of the events' rows converts back to the value in the table."""
    kinds = columns(decoded, table)
    declared: dict[str, str] = dict(
        decoded.sql.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0",
            [table],
        ).fetchall()
    )
    wanted = {
        row[0]: dict(zip(kinds, row[1:], strict=True))
        for row in decoded.sql.execute(
            sql.SQL("SELECT id::text, {} FROM {}").format(
                sql.SQL(", ").join(map(_written, map(sql.Identifier, kinds))),
                sql.SQL(table),
            )
        ).fetchall()
    }
    assert len(events) == len(wanted) > 0
    for event in events:
        row = event["after"]
        back = {
            name: text_of(kind.type, kind.modifier, row[name], options)
            for name, kind in kinds.items()
        }
        read = [
            _written(sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(declared[name])))
            for name, text in back.items()
        ]
        found = decoded.sql.execute(
            sql.SQL("SELECT {}").format(sql.SQL(", ").join(read))
        ).fetchone()
        assert found is not None
        differ = {
            name: (row[name], text, wanted[row["id"]][name])
            for name, text in zip(kinds, found, strict=True)
            if text != wanted[row["id"]][name]
        }
        assert differ == {}, (table, declared, options)


def _written(value: sql.Composable) -> sql.Composable:
    """Return SQL for the value as its type's output function writes it; a cast would trim char."""
    return sql.SQL("CASE WHEN {0} IS NULL THEN NULL ELSE format('%s', {0}) END").format(value)


def fill(decoded: Decoded, table: str, kind: str, values: tuple[str, ...]) -> None:
    """Create a table with a column of the type and one of its arrays, and fill it with `values`."""
    filling(decoded.sql, table, kind, values)


def filling(
    connection: psycopg.Connection[TupleRow], table: str, kind: str, values: tuple[str, ...]
) -> None:
    """Do the same through `connection`."""
    made, type_ = sql.SQL(table), sql.SQL(kind)
    connection.execute(
        sql.SQL("CREATE TABLE {} (id serial PRIMARY KEY, v {}, a {}[])").format(made, type_, type_)
    )
    each = [sql.SQL("{}::{}").format(sql.Literal(value), type_) for value in values]
    first, last = each[0], each[-1]
    arrays = [
        sql.SQL("NULL"),
        sql.SQL("ARRAY[{}, NULL]").format(sql.SQL(", ").join(each)),
        sql.SQL("ARRAY[[{0}, NULL], [{1}, {0}]]").format(first, last),
        sql.SQL("array_fill({}, ARRAY[1, 2], ARRAY[0, -7])").format(last),
        sql.SQL("'{}'"),
        *(sql.SQL("ARRAY[{}]").format(value) for value in each),
    ]
    for i, array in enumerate(arrays):
        value = each[i] if i < len(each) else sql.SQL("NULL")
        connection.execute(
            sql.SQL("INSERT INTO {} (v, a) VALUES ({}, {}::{}[])").format(made, value, array, type_)
        )


def test_every_value_of_every_built_in_type_comes_back_under_every_option(
    decoded: Decoded,
) -> None:
    decoded.sql.execute('CREATE SCHEMA other CREATE TABLE "odd.Table" (id int)')
    decoded.sql.execute("CREATE TYPE other.\"Odd\" AS ENUM ('x')")
    tables = {f"public.t{i}": kind for i, kind in enumerate(VALUES)}
    for table, kind in tables.items():
        fill(decoded, table, kind, VALUES[kind])
    for options, events in zip(OPTIONS, decoded.events(*OPTIONS), strict=True):
        for table in tables:
            name = table.removeprefix("public.")
            rows = [event for event in events if event["source"]["table"] == name]
            come_back(decoded, table, rows, options)


def test_the_table_of_values_has_every_type_of_the_server(decoded: Decoded) -> None:
    """So that no type is missing, of a new major or of an old one."""
    rows = decoded.sql.execute(
        "SELECT typname FROM pg_type WHERE oid < 10000 AND typtype IN ('b', 'r', 'm')"
        " AND typcategory <> 'A'"
    ).fetchall()
    covered = decoded.sql.execute(
        "SELECT typname FROM pg_type WHERE oid = ANY (%s::regtype[])",
        [[kind.partition("(")[0] if "interval" not in kind else "interval" for kind in VALUES]],
    ).fetchall()
    on_server = {name for (name,) in rows}
    assert on_server - {name for (name,) in covered} - UNWRITABLE == set()
    assert on_server <= set(TYPE_NAMES.values())


def test_only_boxes_are_separated_by_other_marks_than_commas(decoded: Decoded) -> None:
    found = decoded.sql.execute(
        "SELECT DISTINCT typname, typdelim FROM pg_type WHERE typdelim <> ',' AND typtype = 'b'"
        " AND typelem <> typarray AND left(typname, 1) <> '_'"
    ).fetchall()
    assert found == [("box", ";")]


@pytest.mark.pg(">= 15")
def test_the_longest_intervals_come_back(decoded: Decoded) -> None:
    """Older majors write them but can't read them."""
    fill(decoded, "public.t", "interval", ("2562047788:00:54.775807", "-2562047788:00:54.775807"))
    for options, events in zip(OPTIONS, decoded.events(*OPTIONS), strict=True):
        come_back(decoded, "public.t", events, options)


@pytest.mark.pg(">= 17")
def test_infinite_intervals_come_back(decoded: Decoded) -> None:
    fill(decoded, "public.t", "interval", ("infinity", "-infinity"))
    options = (*OPTIONS, Values(interval_handling_mode="numeric"))
    for choice, events in zip(options, decoded.events(*options), strict=True):
        come_back(decoded, "public.t", events, choice)


def test_a_numeric_interval_is_debeziums_and_not_exact(decoded: Decoded) -> None:
    fill(decoded, "public.t", "interval", ("1 mon", "30 days 10:30:00", "-00:00:01.5"))
    [events] = decoded.events(Values(interval_handling_mode="numeric"))
    found = [event["after"]["v"] for event in events[:3]]
    assert found == ["2629800000000", "2629800000000", "-1500000"]
    assert events[1]["after"]["a"] == [*found, None]


def test_a_database_with_other_money_says_how_many_digits(decoded: Decoded) -> None:
    fill(decoded, "public.t", "money", ("1234.11",))
    [yen] = decoded.events(Values(money_fraction_digits=0))
    assert yen[0]["after"]["v"] == "123411"
