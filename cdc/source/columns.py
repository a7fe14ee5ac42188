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
           SELECT FROM pg_index i WHERE i.indrelid = c.oid
           AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1])
           AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                   WHEN 'i' THEN i.indisreplident ELSE false END),
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary
               AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1]))
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


class Partition(NamedTuple):
    """A partition that holds rows."""

    schema: str
    name: str
    identifies_rows: bool  # whether its updates and deletes can be published

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


_PARTITIONS = """
SELECT n.nspname::text, c.relname::text, c.relreplident = 'f' OR EXISTS (
    SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid
    AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                            WHEN 'i' THEN i.indisreplident ELSE false END)
FROM unnest(%s::oid[]) AS root(oid), pg_partition_tree(root.oid) t
JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.isleaf AND c.relkind = 'r' ORDER BY 1, 2
"""


def partitions(connection: psycopg.Connection, tables: Iterable[int]) -> list[Partition]:
    """Return the leaf partitions of these tables."""
    with translated("reading the partitions"):
        rows = connection.execute(_PARTITIONS, (list(tables),)).fetchall()
    return [Partition(*row) for row in rows]
