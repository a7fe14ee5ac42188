"""Catalog lookups for many relations at once: one query of each kind for all of them.

The first transaction over thousands of tables describes each of them, and a query per table would
cost more than its rows. Each query names its relations by oid and costs only those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.source.catalog import TableFacts
from cdc.source.connection import translated
from cdc.source.publications import Published

if TYPE_CHECKING:
    from collections.abc import Collection

    from cdc.source.catalog import Connection


class Lookup(NamedTuple):
    """The catalogs' facts about one relation; empty where it is dropped."""

    facts: TableFacts
    published: Published


# Catalog rows are read as JSON, so that what a major lacks is simply absent. A column list names
# what is sent, generated or not; without one it is every column that is not generated, and the
# stored generated ones where the publication is set to.
_COLUMNS = """
SELECT a.attrelid::bigint, a.attname::text, NOT a.attnotnull, a.atttypid::bigint, a.atttypmod,
       a.attnum::int,
       coalesce(nullif(to_jsonb(r)->'prattrs', 'null') @> to_jsonb(a.attnum::int),
                a.attgenerated = '' OR a.attgenerated = to_jsonb(p)->>'pubgencols')
FROM pg_attribute a
LEFT JOIN pg_publication p ON p.pubname = %s
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = a.attrelid
WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""
_KEYS = """
SELECT i.indrelid::bigint, a.attname::text
FROM pg_index i
CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k(attnum, n)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = ANY(%s::oid[]) AND i.indisprimary AND k.n <= i.indnkeyatts
ORDER BY i.indrelid, k.n
"""
_FILTERS = """
SELECT r.prrelid::bigint, pg_get_expr(r.prqual, r.prrelid) FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = %s AND r.prrelid = ANY(%s::oid[]) AND r.prqual IS NOT NULL
"""
_FILTERS_SINCE = 150_000
# Most relations are not partitions, and the function is called only for those that are.
_ANCESTORS = """
SELECT one.oid::bigint, n.nspname::text, c.relname::text
FROM pg_class one CROSS JOIN LATERAL pg_partition_ancestors(one.oid) a
JOIN pg_class c ON c.oid = a.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE one.oid = ANY(%s::oid[]) AND one.relispartition AND c.oid <> one.oid
"""


def look_up(
    connection: Connection, publication: str, relations: Collection[int]
) -> dict[int, Lookup]:
    """Return the catalogs' facts about each relation."""
    oids = list(relations)
    nullable: dict[int, dict[str, bool]] = {oid: {} for oid in oids}
    sent: dict[int, list[tuple[str, int, int]]] = {oid: [] for oid in oids}
    attnums: dict[int, list[int]] = {oid: [] for oid in oids}
    keys: dict[int, list[str]] = {oid: [] for oid in oids}
    where: dict[int, str] = {}
    ancestors: dict[int, list[tuple[str, str]]] = {oid: [] for oid in oids}
    with translated(f"looking up {len(oids)} relations"):
        for oid, name, null, kind, modifier, attnum, is_sent in connection.execute(
            _COLUMNS, (publication, oids)
        ):
            nullable[oid][name] = null
            if is_sent:
                sent[oid].append((name, kind, modifier))
                attnums[oid].append(attnum)
        for oid, name in connection.execute(_KEYS, (oids,)):
            keys[oid].append(name)
        if connection.info.server_version >= _FILTERS_SINCE:
            where = dict(connection.execute(_FILTERS, (publication, oids)).fetchall())
        for oid, schema, name in connection.execute(_ANCESTORS, (oids,)):
            ancestors[oid].append((schema, name))
    return {
        oid: Lookup(
            TableFacts(tuple(keys[oid]), nullable[oid]),
            Published(tuple(sent[oid]), where.get(oid), tuple(ancestors[oid]), tuple(attnums[oid])),
        )
        for oid in oids
    }


def look_up_one(connection: Connection, publication: str, relation: int) -> Lookup:
    """Return the catalogs' facts about one relation."""
    return look_up(connection, publication, [relation])[relation]
