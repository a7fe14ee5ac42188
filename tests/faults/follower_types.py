"""Every type that a column can have, with values of every kind, through the full pipeline.

One wide table: a column of each type (built in, an extension's or user-defined), and one of arrays
of it. Redis and OpenSearch must hold the log's JSON (docs/EVENTS.md, "Values"); a mirror the types
of docs/DELTA.md, with Postgres' own text in `_exact` exactly where a value does not fit. Both are
compared with Postgres' own output.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson
import psycopg
from deltalake import DeltaTable
from psycopg import sql

from cdc.playground.demo import database
from cdc.playground.demo.stores import form
from tests.integration.value_table import EXTENSIONS, MADE, VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cdc.config import Config

SCHEMA: Final = "kinds"
_EXTENSIONS: Final = ("hstore", "ltree", "citext", "isn")
_DOMAINS: Final = {f"{SCHEMA}.{name}": base for name, (_, base, _) in MADE.items()}
_VALUES: Final = (
    VALUES
    | {
        f"{SCHEMA}.{kind}": texts
        for extension in _EXTENSIONS
        for kind, texts in EXTENSIONS[extension].items()
    }
    | {f"{SCHEMA}.{name}": texts for name, (_, _, texts) in MADE.items()}
)
_KINDS: Final = tuple(_VALUES)
# The oracle's SQL reads elements of these one by one, and so supports one dimension only.
_ONE_DIMENSION: Final = re.compile(r"bpchar|char\(|bytea|date|inet|time")
_NATURAL: Final = {
    "boolean": "boolean",
    "bytea": "binary",
    "smallint": "short",
    "integer": "integer",
    "bigint": "long",
    "oid": "long",
    "real": "float",
    "double precision": "double",
    "money": "decimal(19,2)",
    "numeric(6,4)": "decimal(6,4)",
    "numeric(4)": "decimal(4,0)",
    "numeric(38,2)": "decimal(38,2)",
    "date": "date",
    **dict.fromkeys(("timestamp", "timestamp(0)", "timestamp(3)"), "timestamp_ntz"),
    **dict.fromkeys(("timestamptz", "timestamptz(2)"), "timestamp"),
}
_MORE_ROWS: Final = 6


def make(connection: psycopg.Connection[Any]) -> None:
    """Create the table, and the types that are not built in."""
    connection.execute(b'CREATE SCHEMA other CREATE TABLE "odd.Table" (id int)')
    connection.execute(b"CREATE TYPE other.\"Odd\" AS ENUM ('x')")
    connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
    for extension in _EXTENSIONS:
        connection.execute(f"CREATE EXTENSION {extension} SCHEMA {SCHEMA}".encode())
    for name, (statement, _, _) in MADE.items():
        connection.execute(statement.format(f"{SCHEMA}.{name}").encode())
    columns = "".join(f", v{i} {kind}, a{i} {kind}[]" for i, kind in enumerate(_KINDS))
    connection.execute(f"CREATE TABLE {SCHEMA}.every (id int PRIMARY KEY{columns})".encode())


def fill(connection: psycopg.Connection[Any]) -> None:
    """Write each value of each type, alone and in arrays of every shape; and NULLs."""
    most = max(map(len, _VALUES.values()))
    for number in range(most + _MORE_ROWS):
        values: list[sql.Composable] = [sql.Literal(number)]
        for kind, texts in _VALUES.items():
            values += _pair(kind, texts, number)
        row = sql.SQL(", ").join(values)
        connection.execute(
            sql.SQL("INSERT INTO {} VALUES ({})").format(sql.Identifier(SCHEMA, "every"), row)
        )


def _pair(kind: str, texts: tuple[str, ...], number: int) -> list[sql.Composable]:
    """Return a value, or NULL, and an array, in SQL."""
    type_ = sql.SQL(kind)
    each = [sql.SQL("{}::{}").format(sql.Literal(text), type_) for text in texts]
    value = each[number] if number < len(each) else sql.SQL("NULL")
    one, last = each[0], each[-1]
    shapes = [
        sql.SQL("NULL"),
        sql.SQL("ARRAY[{}, NULL]").format(sql.SQL(", ").join(each)),
        sql.SQL("array_fill({}, ARRAY[2], ARRAY[-7])").format(last),
        sql.SQL("'{}'"),
        sql.SQL("ARRAY[{}]").format(one),
        sql.SQL("ARRAY[[{0}, NULL], [{1}, {0}]]").format(one, last),
    ]
    if _ONE_DIMENSION.search(kind):
        shapes.pop()
    array = shapes[number % len(shapes)]
    return [value, sql.SQL("{}::{}[]").format(array, type_)]


def rows(config: Config, *, mirrored: bool) -> dict[int, dict[str, Any]]:
    """Return the rows by id in the log's form, or in a mirror's."""
    with database.snapshot(config) as connection:
        tables = database.published(
            connection, config.publication, database.MIRROR if mirrored else {}
        )
        (table,) = (each for each in tables if each.schema == SCHEMA)
        return {row["id"]: row for row in database.rows(connection, table)}


def texts(config: Config) -> dict[int, dict[str, tuple[str | None, bool]]]:
    """Return Postgres' own text of every value, and whether it is an odd array."""
    names = [f"{letter}{i}" for i in range(len(_KINDS)) for letter in "va"]
    asked = ", ".join(
        f"CASE WHEN {name} IS NOT NULL THEN concat({name}) END,"
        + (f" coalesce(array_ndims({name}) > 1 OR array_lower({name}, 1) <> 1, false)"
           if name[0] == "a" else " false")
        for name in names
    )  # fmt: skip
    found: dict[int, dict[str, tuple[str | None, bool]]] = {}
    with database.snapshot(config) as connection:
        for number, *values in connection.execute(f"SELECT id, {asked} FROM kinds.every".encode()):
            pairs = zip(values[::2], values[1::2], strict=True)
            found[number] = dict(zip(names, pairs, strict=True))
    return found


def wrong_json(name: str, stored: dict[int, dict[str, Any]], config: Config) -> list[str]:
    """Return where a store's rows differ from the log's form."""
    expected = rows(config, mirrored=False)
    found = [] if stored.keys() == expected.keys() else [f"{name}: other keys"]
    return found + [
        f"{name}: {_kind(column)} {column} of {number}: {stored[number].get(column)!r} is not"
        f" {value!r}"
        for number, row in expected.items()
        for column, value in row.items()
        if number in stored and _json(stored[number].get(column)) != _json(value)
    ]


def _json(value: Any) -> bytes:  # noqa: ANN401 - any type's
    return orjson.dumps(form(value))  # 1 and 1.0 are one number


def _kind(column: str) -> str:
    return "" if column == "id" else _KINDS[int(column[1:])] + "[]" * (column[0] == "a")


def wrong_mirror(root: Path, config: Config) -> list[str]:
    """Return where the mirror differs from docs/DELTA.md: types, values, texts."""
    table = DeltaTable(str(root / f"{SCHEMA}.every"))
    found = list(_wrong_types(table))
    expected, own = rows(config, mirrored=True), texts(config)
    stored = {row["id"]: row for row in table.to_pyarrow_table().to_pylist()}
    if stored.keys() != expected.keys():
        found.append("the mirror has other keys")
    for number in stored.keys() & expected.keys():
        exact = dict(stored[number]["_exact"] or ())
        for column, (text, odd) in own[number].items():
            value = form(stored[number][column])
            log = expected[number][column]
            kind = _base(_KINDS[int(column[1:])])
            if column[0] == "a" and _KINDS[int(column[1:])] not in VALUES:
                # For such an array the log has only the type's name, which a user may have chosen.
                right = value == text and column not in exact
            elif odd or _unfit(kind, log):
                right = value is None and exact.get(column) == text
            else:
                right = column not in exact and _json(value) == _json(log)
            if not right:
                output = f"{value!r} and exactly {exact.get(column)!r}"
                found.append(
                    f"{_kind(column)} {column} of {number}: {output}, not {log!r} = {text!r}"
                )
    return found


def _wrong_types(table: DeltaTable) -> Iterator[str]:
    for each in table.schema().fields:
        if each.name == "id" or each.name.startswith("_"):
            continue
        kind, output = _KINDS[int(each.name[1:])], orjson.loads(each.type.to_json())
        wanted = _NATURAL.get(_base(kind), "string")
        if each.name[0] == "a":
            output, wanted = (
                (output["elementType"], wanted) if kind in VALUES else (output, "string")
            )
        if output != wanted:
            yield f"{_kind(each.name)} is {output}, not {wanted}"


def _base(kind: str) -> str:
    """Return a domain's base type; any other type as it is."""
    return _DOMAINS.get(kind) or kind


def _unfit(kind: str, value: Any) -> bool:  # noqa: ANN401 - any type's
    """Return whether a value, or an element of it, does not fit its natural type."""
    if isinstance(value, list):
        return any(_unfit(kind, each) for each in value)
    if kind.startswith(("date", "timestamp")) and "range" not in kind:
        return isinstance(value, str)
    return kind.startswith("numeric(") and value in ("NaN", "Infinity", "-Infinity")
