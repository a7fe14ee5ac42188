"""The columns of tables that are or may be published, and what Postgres does with each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg


class Column(NamedTuple):
    """A column as the catalog has it today."""

    name: str
    generated: str  # empty, s stored, v virtual
    in_identity: bool  # sent with updates and deletes
    in_primary_key: bool


_COLUMNS = """
SELECT a.attrelid::bigint, a.attname::text, a.attgenerated::text,
       c.relreplident = 'f' OR EXISTS (
           SELECT FROM pg_index i WHERE i.indrelid = c.oid AND a.attnum = ANY(i.indkey)
           AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                   WHEN 'i' THEN i.indisreplident ELSE false END),
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary
               AND a.attnum = ANY(i.indkey))
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE a.attrelid = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""


def columns(connection: psycopg.Connection, tables: Iterable[int]) -> dict[int, list[Column]]:
    """Return the columns of each table, by its oid."""
    with translated("reading the columns"):
        rows = connection.execute(_COLUMNS, (list(tables),)).fetchall()
    found: dict[int, list[Column]] = {}
    for table, *fields in rows:
        found.setdefault(table, []).append(Column(*fields))
    return found


_LEAVES = """
SELECT r.oid::bigint, n.nspname || '.' || c.relname
FROM unnest(%s::oid[]) AS r(oid), pg_partition_tree(r.oid) t
JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.isleaf AND c.relkind = 'r' AND NOT (
    c.relreplident = 'f' OR EXISTS (
        SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid
        AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                WHEN 'i' THEN i.indisreplident ELSE false END))
ORDER BY 2
"""


def blind_partitions(connection: psycopg.Connection, tables: Iterable[int]) -> list[str]:
    """Return the partitions below these tables on which updates and deletes can't be published."""
    with translated("reading the partitions"):
        return [row[1] for row in connection.execute(_LEAVES, (list(tables),)).fetchall()]
