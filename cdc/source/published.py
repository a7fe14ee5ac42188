"""What Postgres sends of a table today: columns and row filter, as the catalogs have them.

Today's catalog may be younger than the change that is being read. Held against what the stream says
of the table it tells whether the catalog speaks of that time at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.source.catalog import Connection


class Published(NamedTuple):
    """A published table, in the terms of a relation message."""

    columns: tuple[tuple[str, int, int], ...]  # name, type and modifier; none: the table is gone
    where: str | None  # as Postgres writes the filter
    ancestors: tuple[tuple[str, str], ...] = ()  # the partitioned tables that it is a part of


# Catalog rows are read as JSON, so that what a major lacks is simply absent. A column list names
# what is sent, generated or not; without one it is every column that is not generated, and the
# stored generated ones where the publication says so.
_COLUMNS = """
SELECT a.attname, a.atttypid::bigint, a.atttypmod
FROM pg_attribute a
LEFT JOIN pg_publication p ON p.pubname = %s
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = a.attrelid
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
  AND coalesce(nullif(to_jsonb(r)->'prattrs', 'null') @> to_jsonb(a.attnum::int),
               a.attgenerated = '' OR a.attgenerated = to_jsonb(p)->>'pubgencols')
ORDER BY a.attnum
"""
_FILTER = """
SELECT pg_get_expr(r.prqual, r.prrelid) FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid WHERE r.prrelid = %s AND p.pubname = %s
"""
_FILTERS_SINCE = 150_000
_ANCESTORS = """
SELECT n.nspname::text, c.relname::text
FROM pg_partition_ancestors(%s::oid::regclass) a
JOIN pg_class c ON c.oid = a.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid <> %s
"""


def published(connection: Connection, publication: str, relation_id: int) -> Published:
    """Return what the publication sends of the table."""
    with translated(f"looking up what is published of relation {relation_id}"):
        columns = connection.execute(_COLUMNS, (publication, relation_id)).fetchall()
        row = None
        if connection.info.server_version >= _FILTERS_SINCE:
            row = connection.execute(_FILTER, (relation_id, publication)).fetchone()
        ancestors = connection.execute(_ANCESTORS, (relation_id, relation_id)).fetchall()
    told = tuple((name, kind, modifier) for name, kind, modifier in columns)
    names = tuple((schema, name) for schema, name in ancestors)
    return Published(told, row[0] if row else None, names)
