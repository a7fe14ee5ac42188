"""What the daemon asks the source's catalogs: facts that the stream does not carry.

Each function asks an ordinary connection a query or few. A relation's columns come from the stream
and never from here: today's catalog may be younger than the change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import GapError
from cdc.events import LSN
from cdc.source import inspection
from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Collection

    import psycopg
    from psycopg.rows import TupleRow

    from cdc.config import Config
    from cdc.log.records import Publication
    from cdc.source.inspection import Slot

    Connection = psycopg.Connection[TupleRow]


class Source(NamedTuple):
    """What the proof of continuity needs of the source; None is something that is not there."""

    database: str
    databases: frozenset[str]
    wal_end: LSN
    slot: Slot | None
    publication: Publication | None
    tables: frozenset[str]  # of those that were asked for, the ones that exist


def source(connection: Connection, config: Config, tables: Collection[str]) -> Source:
    """Return what stands in the source now."""
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
    return _pinned(inspection.publication(connection, name), name)


def publication_beside(
    connection: Connection, name: str, tables: Collection[str]
) -> tuple[Publication, frozenset[str]]:
    """Return the publication, and which of the `schema.table` names were one table's all the time.

    So one that is dropped and created again meanwhile is not taken for one that has left the
    publication. Raises GapError where there is no publication.
    """
    found, existing = _at_once(connection, name, tables)
    return _pinned(found, name), existing


def _pinned(found: inspection.Publication | None, name: str) -> Publication:
    if found is None:
        raise GapError(
            f'the publication "{name}" does not exist',
            hint="`cdc setup` creates it; changes made while it was gone are not streamed, so if"
            " it existed before, re-snapshot its tables",
        )
    return found.pinned


def _at_once(
    connection: Connection, name: str, tables: Collection[str]
) -> tuple[inspection.Publication | None, frozenset[str]]:
    # No snapshot would do: pg_publication_tables sees the catalog as it is, whatever the query's.
    before = _named(connection, tables)
    found = inspection.publication(connection, name)
    stayed = before & _named(connection, tables)
    return found, frozenset(table for table, _ in stayed)


def _named(connection: Connection, tables: Collection[str]) -> set[tuple[str, int]]:
    """Return those of the `schema.table` names that name a table, with its oid."""
    with translated("looking up tables"):
        found = connection.execute(
            "SELECT format('%%I.%%I', n.nspname, c.relname), c.oid::bigint FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE format('%%I.%%I', n.nspname, c.relname) = ANY(%s)",
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


class TableFacts(NamedTuple):
    """What only the catalog knows of a table."""

    primary_key: tuple[str, ...]  # in the key's order; empty where there is none
    nullable: dict[str, bool]  # by column name


def table_facts(connection: Connection, relation_id: int) -> TableFacts:
    """Return the table's facts; empty ones where the table is gone."""
    with translated(f"looking up the columns of relation {relation_id}"):
        columns = connection.execute(
            "SELECT attname, NOT attnotnull FROM pg_attribute"
            " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
            (relation_id,),
        ).fetchall()
        key = connection.execute(
            "SELECT a.attname FROM pg_index i"
            " CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k(attnum, n)"
            " JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum"
            " WHERE i.indrelid = %s AND i.indisprimary AND k.n <= i.indnkeyatts ORDER BY k.n",
            (relation_id,),
        ).fetchall()
    return TableFacts(tuple(row[0] for row in key), dict(columns))


def wal_end(connection: Connection) -> LSN:
    """Return the current WAL end of the server."""
    return LSN.parse(_one(connection, "SELECT pg_current_wal_lsn()")[0])


def _one(connection: Connection, query: str) -> TupleRow:
    with translated(query):
        row = connection.execute(query.encode()).fetchone()
    assert row is not None, "the query gives one row"
    return row
