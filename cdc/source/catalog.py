"""What the daemon asks the source's catalogs: facts that the stream does not carry.

Each function is one query on an ordinary connection. A relation's columns come from the stream and
never from here: today's catalog may be younger than the change.
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
    found = inspection.publication(connection, config.publication)
    return Source(
        str(_one(connection, "SELECT current_database()")[0]),
        frozenset(_one(connection, databases)[0]),
        wal_end(connection),
        inspection.slot(connection, config.slot),
        found and found.pinned,
        existing(connection, tables),
    )


def publication(connection: Connection, name: str) -> Publication:
    """Return the publication with its member tables; GapError where it does not exist."""
    found = inspection.publication(connection, name)
    if found is None:
        raise GapError(
            f'the publication "{name}" does not exist',
            hint="`cdc setup` creates it; changes made while it was gone are not streamed, so if"
            " it existed before, re-snapshot its tables",
        )
    return found.pinned


def existing(connection: Connection, tables: Collection[str]) -> frozenset[str]:
    """Return those of the `schema.table` names that still name a table."""
    with translated("looking up tables"):
        found = connection.execute(
            "SELECT format('%%I.%%I', n.nspname, c.relname) FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE format('%%I.%%I', n.nspname, c.relname) = ANY(%s)",
            (list(tables),),
        ).fetchall()
    return frozenset(row[0] for row in found)


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
