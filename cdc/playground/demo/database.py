"""Read the published tables from Postgres in the log's JSON values, independently of the daemon.

docs/EVENTS.md ("Values") is implemented in SQL here, and Postgres does the formatting. The encoders
are not used: the proof compares two independent readings of one contract. Row filters, column lists
and generated columns are left out as in the publication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
import psycopg
from psycopg import sql

from cdc.events import LSN
from cdc.source import server
from cdc.source.connection import connect, translated
from cdc.source.slots import read_slot
from cdc.verify.events import Row

if TYPE_CHECKING:
    from cdc.config import Config

_BATCH_ROWS: Final = 5000
_MS_PRECISION: Final = 3  # timestamps of up to three digits are milliseconds

_PLAIN: Final = "to_json({0})"
_TEXT: Final = "to_json({0}::text)"
# Postgres' own text of any type: unlike a cast it keeps the blanks of char(n). A row value with a
# NULL in it is neither NULL nor NOT NULL, so the test is IS DISTINCT FROM.
_OUTPUT: Final = "CASE WHEN {0} IS DISTINCT FROM NULL THEN to_json(concat({0})) END"
# Outside these years, and at infinity, the log holds Postgres' own text.
_FORMED: Final = (
    "CASE WHEN isfinite({0}) AND extract(year FROM {0}) BETWEEN 1 AND 9999"
    " THEN to_json(%s) WHEN {0} IS NOT NULL THEN to_json({0}::text) END"
)
_MICROSECONDS: Final = "(extract(epoch FROM {0}) * 1000000)::bigint"
_MILLISECONDS: Final = "(extract(epoch FROM {0}) * 1000)::bigint"

_EXPRESSIONS: Final = {
    "int2": _PLAIN,
    "int4": _PLAIN,
    "int8": _PLAIN,
    "oid": "to_json({0}::bigint)",
    "float4": _PLAIN,
    "float8": _PLAIN,
    "bool": _PLAIN,
    "numeric": _TEXT,
    "json": _TEXT,
    "jsonb": _TEXT,
    "bytea": "to_json(translate(encode({0}, 'base64'), E'\\n', ''))",
    "date": _FORMED % "{0} - date '1970-01-01'",
    "time": f"to_json({_MICROSECONDS})",
    "money": "to_json({0}::numeric::text)",
    "timestamp": _FORMED % _MICROSECONDS,
    # As many fractional digits as needed, none for a full second.
    "timestamptz": _FORMED
    % """regexp_replace(to_char({0}, 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), '[.]?0+Z$', 'Z')""",
}

# Where a mirror's types differ: real as a double, times of day as text, timestamps in microseconds
# whatever their precision.
MIRROR: Final = {
    "float4": "to_json({0}::float8)",
    "time": _OUTPUT,
    "timestamp": _FORMED % _MICROSECONDS,
    "timestamptz": _FORMED % _MICROSECONDS,
}

# An array with explicit lower bounds is Postgres' own text.
_ARRAY: Final = (
    "CASE WHEN left({0}::text, 1) = '[' THEN to_json({0}::text) WHEN {0} IS NOT NULL THEN %s END"
)
_ARRAYS_AS_TEXT: Final = {
    **dict.fromkeys(["int2", "int4", "int8", "float4", "float8", "bool"], "to_json({0})"),
    "oid": "to_json({0}::bigint[])",
    "money": "to_json({0}::numeric[]::text[])",
}
# One dimension, each element in its own form.
_ELEMENTS: Final = (
    "coalesce((SELECT json_agg(%s ORDER BY u.i) FROM unnest({0}) WITH ORDINALITY u(e, i)), '[]')"
)
_FORMED_ELEMENTS: Final = frozenset(
    # A cast of inet to text writes /32 for a host, its output function does not.
    ["bpchar", "bytea", "date", "inet", "time", "timestamp", "timestamptz"]
)

_TABLES: Final = """
SELECT t.schemaname, t.tablename, {}
FROM pg_publication_tables t WHERE t.pubname = %s ORDER BY 1, 2
"""
_COLUMNS: Final = """
SELECT a.attname, t.typname, t.typnamespace = 'pg_catalog'::regnamespace, t.modifier,
       t.typcategory = 'A' AND t.typname NOT IN ('int2vector', 'oidvector'),
       coalesce(array_position((k.indkey::int2[])[0:k.indnkeyatts - 1], a.attnum), -1)
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid
CROSS JOIN LATERAL (
    WITH RECURSIVE base(oid, modifier) AS (
        SELECT a.atttypid, a.atttypmod
        UNION ALL SELECT d.typbasetype, -1 FROM base
        JOIN pg_type d ON d.oid = base.oid AND d.typtype = 'd')
    SELECT b.*, base.modifier FROM base JOIN pg_type b ON b.oid = base.oid AND b.typtype <> 'd'
) t
LEFT JOIN pg_index k ON k.indrelid = c.oid AND
     CASE c.relreplident WHEN 'i' THEN k.indisreplident ELSE k.indisprimary END
WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
  AND (a.attname = ANY(%s) OR %s::name[] IS NULL AND a.attgenerated = '')
ORDER BY a.attnum
"""


class ComparedTable(NamedTuple):
    """A published table: the columns that the log has, and its key columns."""

    schema: str
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    query: sql.Composed

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"


@contextmanager
def snapshot(config: Config) -> Iterator[psycopg.Connection]:
    """Open a connection that sees one snapshot of the database: that of its first query."""
    with connect(config) as connection, translated("reading the database"):
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with connection.transaction():
            yield connection


def published(
    connection: psycopg.Connection,
    publication: str,
    forms: Mapping[str, str] = {},
) -> list[ComparedTable]:
    """Return the publication's tables; some types' values have other `forms` than the log's."""
    from_15 = connection.info.server_version >= 150000  # noqa: PLR2004 - column lists came with 15
    narrowed = "t.attnames, t.rowfilter" if from_15 else "NULL::name[], NULL::text"
    tables = connection.execute(_TABLES.format(narrowed).encode(), [publication])
    return [_table(connection, forms, *row) for row in tables.fetchall()]


def rows(connection: psycopg.Connection, table: ComparedTable) -> Iterator[Row]:
    """Yield every row as the log must show it."""
    with connection.cursor(name="lockstep_proof") as cursor:
        cursor.itersize = _BATCH_ROWS
        for (values,) in cursor.execute(table.query):
            yield dict(zip(table.columns, orjson.loads(values), strict=True))


def wal_end(config: Config) -> LSN:
    """Return how far the WAL has been written: at or after the end of every commit so far."""
    with connect(config) as connection:
        return server.wal_end(connection)


def confirmed(config: Config) -> LSN:
    """Return up to which LSN the slot's reader has confirmed; 0/0 for a missing slot."""
    with connect(config) as connection:
        slot = read_slot(connection, config.slot)
    return (slot and slot.confirmed_flush_lsn) or LSN(0)


def _table(
    connection: psycopg.Connection,
    forms: Mapping[str, str],
    schema: str,
    table: str,
    published_columns: list[str] | None,
    row_filter: str | None,
) -> ComparedTable:
    found = connection.execute(
        _COLUMNS, (schema, table, published_columns, published_columns)
    ).fetchall()
    values = sql.SQL(", ").join(
        sql.SQL(_expression(type_ if built_in else "", modifier, forms, array=array)).format(
            sql.Identifier(name)
        )
        for name, type_, built_in, modifier, array, _ in found
    )
    query = sql.SQL("SELECT json_build_array(VARIADIC ARRAY[{}]::json[])::text FROM {}").format(
        values, sql.Identifier(schema, table)
    )
    if row_filter is not None:
        # As Postgres writes the publication's expression.
        query += sql.SQL(" WHERE ") + sql.SQL(row_filter)
    in_key = sorted((place, name) for name, _, _, _, _, place in found if place >= 0)
    return ComparedTable(
        schema, table, tuple(c[0] for c in found), tuple(n for _, n in in_key), query
    )


def _expression(type_: str, modifier: int, forms: Mapping[str, str], *, array: bool) -> str:
    if array:
        return _ARRAY % _array(type_.removeprefix("_"), modifier, forms)
    if type_ in forms:
        return forms[type_]
    if type_ in ("time", "timestamp") and 0 <= modifier <= _MS_PRECISION:
        return f"to_json({_MILLISECONDS})" if type_ == "time" else _FORMED % _MILLISECONDS
    return _EXPRESSIONS.get(type_, _OUTPUT)


def _array(element: str, modifier: int, forms: Mapping[str, str]) -> str:
    if element in _FORMED_ELEMENTS or element in forms:
        one = _expression(element, modifier, forms, array=False)
        return _ELEMENTS % one.replace("{0}", "u.e")
    return _ARRAYS_AS_TEXT.get(element, "to_json({0}::text[])")
