"""A backlog: a workload's changes in the WAL after a base slot, the same for every subject."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psycopg

    from benchmarks.workload import Workload

PUBLICATION = "p"
BASE_SLOT = "base"


@dataclass(frozen=True)
class Backlog:
    """The changes in the WAL after the base slot."""

    rows: int
    end_lsn: str
    wal_bytes: int


def create(connection: psycopg.Connection, workload: Workload, rows: int) -> None:
    """Create tables and publication, before any slot: otherwise decoding cannot see them."""
    workload.create(connection, rows)
    publish(connection, workload.tables)


def publish(connection: psycopg.Connection, tables: tuple[str, ...]) -> None:
    connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {', '.join(tables)}".encode())


def preload(connection: psycopg.Connection, workload: Workload, rows: int) -> Backlog:
    """Create the base slot, then fill the WAL after it."""
    connection.execute("CHECKPOINT")
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [BASE_SLOT])
    first_lsn = insert_lsn(connection)
    workload.load(connection, rows)
    # Flushes the WAL, so that the walsender can send all of it.
    connection.execute("CHECKPOINT")
    end_lsn = insert_lsn(connection)
    row = connection.execute(
        "SELECT pg_wal_lsn_diff(%s::pg_lsn, %s::pg_lsn)::bigint", [end_lsn, first_lsn]
    ).fetchone()
    assert row is not None
    return Backlog(rows=rows, end_lsn=end_lsn, wal_bytes=int(row[0]))


def insert_lsn(connection: psycopg.Connection) -> str:
    """Return the LSN at which the WAL currently ends."""
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])
