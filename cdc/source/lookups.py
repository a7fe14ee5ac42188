"""What the catalogs know of the relations that the stream describes.

The first transaction over thousands of tables describes each of them, and a query per table would
cost more than its rows: so there is one query of each kind for all of them, which names them by oid
and costs only those. A relation's columns come from the stream: the catalog may be newer than the
change that is being read. A comparison with the stream's own description of the table shows whether
the catalog is about that time at all.
"""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.events import LSN
from cdc.log.records import ColumnNumbers, NumberedColumn
from cdc.source.connection import translated
from cdc.source.partition_trees import TREES
from cdc.source.row_filters import read_filters

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from psycopg.rows import TupleRow

    from cdc.source.connection import Connection
    from cdc.source.row_filters import RowFilter


class StoredColumns(NamedTuple):
    """How the rows of a table hold its columns."""

    attributes: int  # the highest attnum that was ever given
    storage: str  # the filenodes, which every rewrite of the table changes
    # By attnum, Postgres' text of the value of rows that are older than the column.
    missing: dict[int, str]
    # The columns of a partitioned table for which its partitions differ in that.
    mixed: frozenset[int] = frozenset()
    # By attnum, the transaction that rewrote the table and changed the column (`_REWRITTEN`).
    rewritten: Mapping[int, int] = MappingProxyType({})


class TableFacts(NamedTuple):
    """What only the catalog knows of a table."""

    primary_key: tuple[str, ...]  # in the key's order; empty where there is none
    nullable: dict[str, bool]  # by column name
    numbers: ColumnNumbers | None = None  # None: not requested
    stored: StoredColumns | None = None  # None: not known
    # By name, of columns that have one (`cdc.log.records.SchemaColumn.collation`); none: not known.
    collations: Mapping[str, str] = MappingProxyType({})


class SentTable(NamedTuple):
    """What Postgres currently sends of a table, in the terms of a relation message."""

    columns: tuple[tuple[str, int, int], ...]  # name, type and modifier; none: the table is dropped
    where: str | None  # as Postgres writes the filter
    ancestors: tuple[tuple[str, str], ...] = ()  # the partitioned tables that it is a part of
    attnums: tuple[int, ...] = ()  # of the columns
    where_mark: str = ""  # of the filter (`cdc.source.row_filters`)
    xmins: tuple[int, ...] = ()  # of the columns' catalog rows: who changed each of them last


class Lookup(NamedTuple):
    """The catalogs' facts about one relation; empty where it is dropped."""

    facts: TableFacts
    published: SentTable


# Catalog rows are read as JSON, so that what a major lacks is simply absent. A column list names
# what is sent, generated or not; without one it is every column that is not generated, and the
# stored generated ones where the publication is set to. The built-in provider orders texts by code
# points, as their bytes in UTF-8 are ordered.
_COLUMNS = """
SELECT a.attrelid::bigint, a.attname::text, NOT a.attnotnull, a.atttypid::bigint, a.atttypmod,
       a.attnum::int,
       coalesce(nullif(to_jsonb(r)->'prattrs', 'null') @> to_jsonb(a.attnum::int),
                a.attgenerated = '' OR a.attgenerated = to_jsonb(p)->>'pubgencols'),
       CASE WHEN a.atthasmissing THEN textin(anyarray_out(a.attmissingval)) END,
       CASE WHEN NOT l.collisdeterministic THEN 'nondeterministic'
            WHEN pg_encoding_to_char(d.encoding) <> 'UTF8' THEN 'linguistic'
            WHEN l.collprovider = 'd' THEN
                CASE coalesce(to_jsonb(d)->>'datlocprovider', 'c')
                WHEN 'c' THEN CASE WHEN d.datcollate IN ('C', 'POSIX') THEN 'C' END
                WHEN 'b' THEN 'C' END
            WHEN l.collprovider = 'c' THEN CASE WHEN l.collcollate IN ('C', 'POSIX') THEN 'C' END
            WHEN l.collprovider = 'b' THEN 'C' END,
       l.oid IS NOT NULL, a.xmin::text::bigint
FROM pg_attribute a
JOIN pg_database d ON d.datname = current_database()
LEFT JOIN pg_collation l ON l.oid = a.attcollation
LEFT JOIN pg_publication p ON p.pubname = %s
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = a.attrelid
WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""
# A partitioned table's rows are in its partitions, and each has such values of its own.
_STORAGE = f"""
{TREES}
SELECT c.oid::bigint, c.relnatts::int, c.relkind = 'p',
       CASE c.relkind WHEN 'p' THEN
           md5(string_agg(f.oid || ':' || f.relfilenode, ',' ORDER BY f.oid)
               FILTER (WHERE f.relkind <> 'p'))
       ELSE c.relfilenode::text END
FROM tree t JOIN pg_class c ON c.oid = t.root JOIN pg_class f ON f.oid = t.oid
GROUP BY c.oid, c.relnatts, c.relkind, c.relfilenode
"""  # noqa: S608 - our own rules
_MISSING_IN_PARTITIONS = f"""
{TREES}
SELECT t.root::bigint, a.attnum::int,
       array_agg(DISTINCT CASE WHEN leaf.atthasmissing
                          THEN textin(anyarray_out(leaf.attmissingval)) END)
FROM tree t
JOIN pg_attribute a ON a.attrelid = t.root AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_attribute leaf ON leaf.attrelid = t.oid AND leaf.attname = a.attname
WHERE t.relkind <> 'p' GROUP BY 1, 2
"""  # noqa: S608 - our own rules
# `ALTER … TYPE … USING` changes the column's row and then gives the table and its indexes other
# files, all in one transaction. VACUUM FULL, CLUSTER and SET LOGGED change a column's row after the
# files (they clear its missing value), or not at all: so the order of commands (cmin) decides. An
# index that the transaction has created may have kept the file of another one, so older ones count,
# or the table itself where none is older. The row of a system column has the transaction that
# created the table. A first file has the oid as its number.
_REWRITTEN = f"""
{TREES}
SELECT DISTINCT a.attrelid::bigint, a.attnum::int, a.xmin::text::bigint
FROM tree t
JOIN pg_attribute a ON a.attrelid = t.root AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_attribute leaf
    ON leaf.attrelid = t.oid AND leaf.attname = a.attname AND leaf.xmin = a.xmin
JOIN pg_attribute made ON made.attrelid = t.oid AND made.attname = 'tableoid'
CROSS JOIN LATERAL (
    SELECT array_agg(i.indexrelid) AS oids FROM pg_index i
    JOIN pg_attribute first ON first.attrelid = i.indexrelid AND first.attnum = 1
    WHERE i.indrelid = t.oid AND first.xmin <> leaf.xmin) older
WHERE t.relkind <> 'p' AND leaf.xmin <> made.xmin
AND EXISTS (
    SELECT FROM pg_class x WHERE x.oid = ANY(coalesce(older.oids, ARRAY[t.oid]))
    AND x.xmin = leaf.xmin AND x.relfilenode <> x.oid
    AND leaf.cmin::text::bigint < x.cmin::text::bigint)
"""  # noqa: S608 - our own rules
_KEYS = """
SELECT i.indrelid::bigint, a.attname::text
FROM pg_index i
CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k(attnum, n)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = ANY(%s::oid[]) AND i.indisprimary AND k.n <= i.indnkeyatts
ORDER BY i.indrelid, k.n
"""
# Most relations are not partitions, and the function is called only for those that are.
_ANCESTORS = """
SELECT one.oid::bigint, n.nspname::text, c.relname::text
FROM pg_class one CROSS JOIN LATERAL pg_partition_ancestors(one.oid) a
JOIN pg_class c ON c.oid = a.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE one.oid = ANY(%s::oid[]) AND one.relispartition AND c.oid <> one.oid
"""


def look_up(
    connection: Connection,
    publication: str,
    relations: Collection[int],
    known: Mapping[int, RowFilter] | None = None,
) -> dict[int, Lookup]:
    """Return the facts of each relation; `known` are row filters (`row_filters.read_filters`)."""
    oids = list(relations)
    nullable: dict[int, dict[str, bool]] = {oid: {} for oid in oids}
    sent: dict[int, list[tuple[str, int, int]]] = {oid: [] for oid in oids}
    attnums: dict[int, list[int]] = {oid: [] for oid in oids}
    xmins: dict[int, list[int]] = {oid: [] for oid in oids}
    keys: dict[int, list[str]] = {oid: [] for oid in oids}
    ancestors: dict[int, list[tuple[str, str]]] = {oid: [] for oid in oids}
    missing: dict[int, dict[int, str]] = {oid: {} for oid in oids}
    collations: dict[int, dict[str, str]] = {oid: {} for oid in oids}
    with translated(f"looking up {len(oids)} relations"):
        for (
            oid,
            name,
            null,
            kind,
            modifier,
            attnum,
            is_sent,
            value,
            collation,
            is_collated,
            xmin,
        ) in connection.execute(_COLUMNS, (publication, oids)):
            nullable[oid][name] = null
            if is_collated:
                collations[oid][name] = collation or "linguistic"
            if value is not None:
                missing[oid][attnum] = element(value)
            if is_sent:
                sent[oid].append((name, kind, modifier))
                attnums[oid].append(attnum)
                xmins[oid].append(xmin)
        for oid, name in connection.execute(_KEYS, (oids,)):
            keys[oid].append(name)
        filters = read_filters(connection, publication, oids, known)
        for oid, schema, name in connection.execute(_ANCESTORS, (oids,)):
            ancestors[oid].append((schema, name))
        stored = _stored(connection, oids, missing)
    return {
        oid: Lookup(
            TableFacts(tuple(keys[oid]), nullable[oid], None, stored.get(oid), collations[oid]),
            _sent(sent[oid], filters.get(oid), ancestors[oid], attnums[oid], xmins[oid]),
        )
        for oid in oids
    }


def _sent(
    columns: list[tuple[str, int, int]],
    row_filter: RowFilter | None,
    ancestors: list[tuple[str, str]],
    attnums: list[int],
    xmins: list[int],
) -> SentTable:
    mark, where = row_filter or ("", None)
    return SentTable(tuple(columns), where, tuple(ancestors), tuple(attnums), mark, tuple(xmins))


def _stored(
    connection: Connection, oids: list[int], missing: dict[int, dict[int, str]]
) -> dict[int, StoredColumns]:
    """Return how each table's rows hold its columns; of partitioned tables, in their partitions."""
    mixed: dict[int, set[int]] = {}
    tables = connection.execute(_STORAGE, (oids,)).fetchall()
    if partitioned := [oid for oid, _, is_partitioned, _ in tables if is_partitioned]:
        for oid, attnum, values in connection.execute(_MISSING_IN_PARTITIONS, (partitioned,)):
            if len(values) > 1:
                mixed.setdefault(oid, set()).add(attnum)
            elif values[0] is not None:
                missing[oid][attnum] = element(values[0])
    rewritten: dict[int, dict[int, int]] = {}
    for oid, attnum, xid in connection.execute(_REWRITTEN, (oids,)):
        rewritten.setdefault(oid, {})[attnum] = xid
    return {
        oid: StoredColumns(
            attributes,
            storage or "",
            missing[oid],
            frozenset(mixed.get(oid, ())),
            rewritten.get(oid, {}),
        )
        for oid, attributes, _, storage in tables
    }


def element(array: str) -> str:
    """Return the text of the one element of an array, which is not NULL, as Postgres writes it."""
    content = array[1:-1]
    return _ESCAPED.sub(r"\1", content[1:-1]) if content.startswith('"') else content


_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
# Catalog rows are read as JSON, so that what a major lacks is simply absent. The LSN is read after
# the snapshot is taken: what the snapshot shows had committed before this LSN. Each partition may
# compute a column in a way of its own; by the major, column or default depend on the others.
_NUMBERS: Final = """
SELECT n.nspname::text, c.relname::text, coalesce(r.oid, 0)::bigint,
       pg_current_wal_insert_lsn()::text,
       a.attnum::int, CASE WHEN a.attisdropped THEN '' ELSE a.attname::text END,
       a.atttypid::bigint, a.atttypmod::int, a.xmin::text::bigint,
       coalesce(nullif(to_jsonb(r)->'prattrs', 'null') @> to_jsonb(a.attnum::int),
                a.attgenerated = ''
                OR coalesce(a.attgenerated = to_jsonb(p)->>'pubgencols', false), true),
       a.attisdropped,
       CASE WHEN a.attgenerated <> '' THEN ARRAY(
           WITH RECURSIVE part(oid) AS (
               SELECT c.oid
               UNION ALL
               SELECT i.inhrelid FROM part JOIN pg_inherits i ON i.inhparent = part.oid
               JOIN pg_class k ON k.oid = i.inhrelid AND k.relispartition)
           SELECT DISTINCT origin.attnum::int FROM part
           JOIN pg_attribute made ON made.attrelid = part.oid AND made.attname = a.attname
           JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = part.oid
               AND d.refobjsubid > 0 AND d.refobjsubid <> made.attnum
           LEFT JOIN pg_attrdef f ON f.adrelid = part.oid AND f.adnum = made.attnum
           JOIN pg_attribute source
               ON source.attrelid = part.oid AND source.attnum = d.refobjsubid
           JOIN pg_attribute origin
               ON origin.attrelid = c.oid AND origin.attname = source.attname
           WHERE (d.classid, d.objid) = ('pg_attrdef'::regclass, f.oid)
           OR (d.classid, d.objid, d.objsubid) = ('pg_class'::regclass, part.oid, made.attnum)
           ORDER BY 1)
       ELSE '{}' END,
       one.oid::bigint
FROM unnest(%(relations)s::oid[]) AS one(oid)
LEFT JOIN pg_publication p ON p.pubname = %(publication)s
LEFT JOIN pg_class c ON c.oid = one.oid
LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
ORDER BY one.oid, a.attnum
"""


def current_snapshot(connection: Connection) -> str:
    """Return what a lookup sees now: pg_current_snapshot()."""
    with translated("reading which transactions are visible"):
        row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None, "a SELECT without FROM gives a row"
    return str(row[0])


def look_up_column_numbers(
    connection: Connection, publication: str, relations: Collection[int]
) -> dict[int, ColumnNumbers]:
    """Return every column that each of the tables ever had; none where the table is dropped."""
    with translated(f"looking up the column numbers of {len(relations)} relations"):
        rows = connection.execute(
            _NUMBERS, {"publication": publication, "relations": list(relations)}
        ).fetchall()
    return {
        relation: _numbers(relation, list(its)) for relation, its in groupby(rows, itemgetter(-1))
    }


def _numbers(relation_id: int, rows: list[TupleRow]) -> ColumnNumbers:
    schema, table, membership, lsn, *_ = rows[0]
    columns = tuple(
        NumberedColumn(
            row[4], row[5], type_id=row[6], type_modifier=row[7], xmin=row[8], sent=row[9],
            dropped=row[10], computed_from=tuple(row[11]),
        )
        for row in rows
        if row[4] is not None
    )  # fmt: skip
    return ColumnNumbers(
        relation_id=relation_id,
        schema=schema or "",
        table=table or "",
        lsn=LSN.parse(lsn),
        membership=membership,
        columns=columns,
    )


def defined_by_users(connection: Connection, names: Collection[str]) -> frozenset[str]:
    """Return the `schema.type` names that are enums, composites, ranges or domains."""
    with translated("looking up types"):
        found = connection.execute(
            "SELECT n.nspname || '.' || t.typname FROM pg_type t"
            " JOIN pg_namespace n ON n.oid = t.typnamespace"
            " WHERE t.typtype IN ('c', 'd', 'e', 'm', 'r')"
            " AND n.nspname || '.' || t.typname = ANY (%s)",
            (list(names),),
        ).fetchall()
    return frozenset(name for (name,) in found)
