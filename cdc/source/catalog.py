"""What the daemon reads from the source's catalogs: facts that the stream does not carry.

Each function runs one or a few queries on an ordinary connection. A relation's columns come from
the stream and never from here: the catalog may be newer than the change.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import GapError, UnavailableError
from cdc.events import LSN
from cdc.log.records import ColumnNumbers, NumberedColumn
from cdc.source import server as inspection
from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Collection

    import psycopg
    from psycopg.rows import TupleRow

    from cdc.config import Config
    from cdc.log.records import Publication
    from cdc.source.server import Slot

    Connection = psycopg.Connection[TupleRow]

# A reading takes milliseconds: tools that add tables one by one do not disturb 20 in a row.
_READS: Final = 20


class Source(NamedTuple):
    """What the continuity check needs to know of the source; None is something that is missing."""

    database: str
    databases: frozenset[str]
    wal_end: LSN
    slot: Slot | None
    publication: Publication | None
    tables: frozenset[str]  # those of the given tables that exist


def source(connection: Connection, config: Config, tables: Collection[str]) -> Source:
    """Return the source's state now."""
    databases = "SELECT array_agg(datname::text) FROM pg_database WHERE datallowconn"
    found, existing = _at_once(connection, config.publication, tables)
    return Source(
        str(_one(connection, "SELECT current_database()")[0]),
        frozenset(_one(connection, databases)[0]),
        wal_end(connection),
        inspection.slot(connection, config.slot),
        found and found.pinned,
        existing,
    )


def publication(connection: Connection, name: str) -> Publication:
    """Return the publication with its member tables; GapError where it does not exist."""
    return _pinned(_settled(connection, name), name)


def publication_mark(connection: Connection, name: str) -> inspection.Mark:
    """Return a value that changes with each change of the publication, at the cost of one row.

    Raises GapError where there is no publication.
    """
    mark = inspection.publication_mark(connection, name)
    if mark is None:
        raise _missing(name)
    return mark


def publication_beside(
    connection: Connection, name: str, tables: Collection[str]
) -> tuple[Publication, frozenset[str]]:
    """Return the publication, and which of the `schema.table` names were the same table throughout.

    So a table that is dropped and created again meanwhile is not taken for one that has left the
    publication. Raises GapError where there is no publication.
    """
    found, existing = _at_once(connection, name, tables)
    return _pinned(found, name), existing


def _pinned(found: inspection.Publication | None, name: str) -> Publication:
    if found is None:
        raise _missing(name)
    return found.pinned


def _missing(name: str) -> GapError:
    return GapError(
        f'the publication "{name}" does not exist',
        hint="`cdc setup` creates it; changes made while it was missing are not streamed, so if"
        " it existed before, re-snapshot its tables",
    )


def _at_once(
    connection: Connection, name: str, tables: Collection[str]
) -> tuple[inspection.Publication | None, frozenset[str]]:
    # A snapshot would not help: pg_get_publication_tables sees the current catalog, whatever the
    # query's snapshot.
    before = _oids(connection, tables)
    found = _settled(connection, name)
    stayed = before & _oids(connection, tables)
    return found, frozenset(table for table, _ in stayed)


def _settled(connection: Connection, name: str) -> inspection.Publication | None:
    """Return the publication as read between two equal values of `publication_mark`."""
    mark = inspection.publication_mark(connection, name)
    for _ in range(_READS):
        found = inspection.publication(connection, name)
        before, mark = mark, inspection.publication_mark(connection, name)
        if before == mark:
            return found
    raise UnavailableError(
        f'the publication "{name}" changed {_READS} times while it was read',
        hint="wait until whoever changes it has ended",
    )


def tables_named(connection: Connection, tables: Collection[str]) -> set[str]:
    """Return the `schema.table` names that name an existing table."""
    return {table for table, _ in _oids(connection, tables)} if tables else set()


def _oids(connection: Connection, tables: Collection[str]) -> set[tuple[str, int]]:
    """Return the `schema.table` names that name an existing table, with its oid."""
    with translated("looking up tables"):
        found = connection.execute(
            "SELECT format('%%I.%%I', n.nspname, c.relname), c.oid::bigint FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE format('%%I.%%I', n.nspname, c.relname) = ANY(%s) AND c.relkind IN ('r', 'p')",
            (list(tables),),
        ).fetchall()
    return {(table, oid) for table, oid in found}


def names(connection: Connection, tables: Collection[int]) -> dict[int, tuple[str, str]]:
    """Return schema and name of each of the tables that exist, by oid."""
    with translated("looking up tables"):
        found = connection.execute(
            "SELECT c.oid::bigint, n.nspname::text, c.relname::text FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY(%s)",
            (list(tables),),
        ).fetchall()
    return {oid: (schema, name) for oid, schema, name in found}


def oids(connection: Connection, tables: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the oid of each of the tables that exist, by schema and name."""
    with translated("looking up tables"):
        found = connection.execute(
            "SELECT n.nspname::text, c.relname::text, c.oid::bigint FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " JOIN unnest(%s::text[], %s::text[]) AS named(schema, name)"
            " ON n.nspname = named.schema AND c.relname = named.name",
            ([schema for schema, _ in tables], [name for _, name in tables]),
        ).fetchall()
    return {(schema, name): oid for schema, name, oid in found}


class TableFacts(NamedTuple):
    """What only the catalog knows of a table."""

    primary_key: tuple[str, ...]  # in the key's order; empty where there is none
    nullable: dict[str, bool]  # by column name
    numbers: ColumnNumbers | None = None  # None: not requested


class NumbersAt(NamedTuple):
    """Column numbers, and the snapshot that shows them."""

    numbers: ColumnNumbers
    snapshot: str  # pg_current_snapshot()


# Catalog rows are read as JSON, so that what a major lacks is simply absent. The LSN is read after
# the snapshot is taken: what the snapshot shows had committed before this LSN.
_NUMBERS: Final = """
SELECT n.nspname::text, c.relname::text, coalesce(r.oid, 0)::bigint,
       pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text,
       a.attnum::int, CASE WHEN a.attisdropped THEN '' ELSE a.attname::text END,
       a.atttypid::bigint, a.atttypmod::int, a.xmin::text::bigint,
       coalesce(nullif(to_jsonb(r)->'prattrs', 'null') @> to_jsonb(a.attnum::int),
                a.attgenerated = '' OR a.attgenerated = to_jsonb(p)->>'pubgencols', true),
       a.attisdropped, one.oid::bigint
FROM unnest(%(relations)s::oid[]) AS one(oid)
LEFT JOIN pg_publication p ON p.pubname = %(publication)s
LEFT JOIN pg_class c ON c.oid = one.oid
LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
ORDER BY one.oid, a.attnum
"""


def column_numbers(connection: Connection, publication: str, relation_id: int) -> NumbersAt:
    """Return every column that the table ever had; none where the table is dropped."""
    return all_column_numbers(connection, publication, [relation_id])[relation_id]


def all_column_numbers(
    connection: Connection, publication: str, relations: Collection[int]
) -> dict[int, NumbersAt]:
    """Return every column that each of the tables ever had, by one query for all of them."""
    with translated(f"looking up the column numbers of {len(relations)} relations"):
        rows = connection.execute(
            _NUMBERS, {"publication": publication, "relations": list(relations)}
        ).fetchall()
    return {
        relation: _numbers_at(relation, list(its))
        for relation, its in groupby(rows, itemgetter(-1))
    }


def _numbers_at(relation_id: int, rows: list[TupleRow]) -> NumbersAt:
    schema, table, membership, snapshot, lsn, *_ = rows[0]
    columns = tuple(
        NumberedColumn(
            row[5], row[6], type_id=row[7], type_modifier=row[8], xmin=row[9], sent=row[10],
            dropped=row[11],
        )
        for row in rows
        if row[5] is not None
    )  # fmt: skip
    numbers = ColumnNumbers(
        relation_id=relation_id,
        schema=schema or "",
        table=table or "",
        lsn=LSN.parse(lsn),
        membership=membership,
        columns=columns,
    )
    return NumbersAt(numbers, snapshot)


def wal_end(connection: Connection) -> LSN:
    """Return the current WAL end of the server."""
    return LSN.parse(_one(connection, "SELECT pg_current_wal_lsn()")[0])


def _one(connection: Connection, query: str) -> TupleRow:
    with translated(query):
        row = connection.execute(query.encode()).fetchone()
    assert row is not None, "the query gives one row"
    return row
