"""What the daemon asks the source's catalogs: facts that the stream does not carry.

Each function is one query on an ordinary connection. A relation's columns come from the stream and
never from here: today's catalog may be younger than the change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psycopg

from cdc.errors import GapError
from cdc.events import LSN
from cdc.log.records import Publication
from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Collection

    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]


class Slot(NamedTuple):
    """A logical slot as the server sees it."""

    plugin: str
    database: str
    wal_status: str | None
    confirmed_lsn: LSN
    active_pid: int | None


def slot(connection: Connection, name: str) -> Slot:
    """Return the slot; GapError where it is gone or was lost, which both mean a gap."""
    with translated(f'looking up slot "{name}"'):
        row = connection.execute(
            "SELECT plugin, database, wal_status, confirmed_flush_lsn, active_pid"
            " FROM pg_replication_slots WHERE slot_name = %s",
            (name,),
        ).fetchone()
    if row is None:
        raise GapError(
            f'the replication slot "{name}" does not exist',
            hint="on a new pipeline run `cdc setup`; if it existed before, changes since then are"
            " not in the WAL any more: `cdc teardown --topics`, `cdc setup` and a snapshot",
        )
    if row[2] == "lost":
        raise GapError(
            f'the replication slot "{name}" was invalidated: the WAL it needs is gone',
            hint="raise max_slot_wal_keep_size or run the daemon more steadily; then"
            " `cdc teardown --topics`, `cdc setup` and a snapshot",
        )
    return Slot(row[0], row[1], row[2], LSN.parse(row[3] or "0/0"), row[4])


def database(connection: Connection) -> str:
    """Return the name of the connection's database."""
    return str(_one(connection, "SELECT current_database()")[0])


def publication(connection: Connection, name: str) -> Publication:
    """Return the publication with its member tables; GapError where it does not exist."""
    with translated(f'looking up publication "{name}"'):
        row = connection.execute(
            "SELECT oid FROM pg_publication WHERE pubname = %s", (name,)
        ).fetchone()
        if row is None:
            raise GapError(
                f'the publication "{name}" does not exist',
                hint="`cdc setup` creates it; changes made while it was gone are not streamed, so"
                " if it existed before, re-snapshot its tables",
            )
        tables = connection.execute(
            "SELECT format('%%I.%%I', t.schemaname, t.tablename), coalesce(r.oid, 0)::bigint"
            " FROM pg_publication_tables t"
            " JOIN pg_namespace n ON n.nspname = t.schemaname"
            " JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename"
            " LEFT JOIN pg_publication_rel r ON r.prrelid = c.oid AND r.prpubid = %s"
            " WHERE t.pubname = %s ORDER BY 1",
            (row[0], name),
        ).fetchall()
    return Publication(name, row[0], dict(tables))


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
            " WHERE i.indrelid = %s AND i.indisprimary ORDER BY k.n",
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
