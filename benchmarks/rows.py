"""The table and the rows that every subject is measured with, and how they get into the WAL.

About 240 bytes a row in the pgoutput stream, about 715 as a JSON event without its schema: five
columns of the usual kinds, a text of 100 to 200 characters that does not compress to nothing.
The row of an id is always the same but for `created_at`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.progress import say

if TYPE_CHECKING:
    from typing import LiteralString

    import psycopg

TABLE = "bench"
PUBLICATION = "p"
BASE_SLOT = "base"
ROWS_PER_TRANSACTION = 100

CREATE_TABLE: LiteralString = """
    CREATE TABLE bench (
        id bigint PRIMARY KEY,
        k int,
        payload text,
        amount numeric(12,2),
        created_at timestamptz
    )"""

# One row's values, from its id; `{i}` stands for the expression that gives the id. No percent
# sign: where the id is a parameter, that is the mark of one.
VALUES: LiteralString = """
    {i}, mod({i}, 1000)::int,
    substr(md5({i}::text) || md5(({i} + 1)::text) || md5(({i} + 2)::text) || md5(({i} + 3)::text)
        || md5(({i} + 4)::text) || md5(({i} + 5)::text) || md5(({i} + 6)::text),
        1, (100 + mod({i}, 101))::int),
    (mod({i}, 1000000) / 100.0)::numeric(12,2),
    clock_timestamp()"""

# Single-row INSERT statements on purpose: what an application's statements leave in the WAL.
_LOAD = """
    DO $$
    DECLARE i bigint := {first} - 1;
    BEGIN
        FOR t IN 1..{transactions} LOOP
            FOR j IN 1..{rows_per_transaction} LOOP
                i := i + 1;
                INSERT INTO bench VALUES ({values});
            END LOOP;
            COMMIT;
        END LOOP;
    END $$"""

_CHUNK_ROWS = 100_000


@dataclass(frozen=True)
class Preload:
    """A backlog in the WAL behind the base slot."""

    rows: int
    end_lsn: str
    wal_bytes: int


def create(connection: psycopg.Connection) -> None:
    """Create the table and its publication: both before any slot, or decoding cannot see them."""
    connection.execute(CREATE_TABLE)
    connection.execute("CREATE PUBLICATION p FOR TABLE bench")


def preload(connection: psycopg.Connection, rows: int) -> Preload:
    """Fill the WAL behind a new base slot with `rows` inserts in transactions of 100."""
    connection.execute("CHECKPOINT")
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [BASE_SLOT])
    first_lsn = _insert_lsn(connection)
    for first in range(1, rows + 1, _CHUNK_ROWS):
        chunk = min(_CHUNK_ROWS, rows - first + 1)
        connection.execute(_load_statement(first, chunk).encode())
        say(f"preloading the WAL: {first + chunk - 1:,} of {rows:,} rows")
    # Flushes the WAL, so that the walsender can send all of it.
    connection.execute("CHECKPOINT")
    end_lsn = _insert_lsn(connection)
    row = connection.execute(
        "SELECT pg_wal_lsn_diff(%s::pg_lsn, %s::pg_lsn)::bigint", [end_lsn, first_lsn]
    ).fetchone()
    assert row is not None
    return Preload(rows=rows, end_lsn=end_lsn, wal_bytes=int(row[0]))


def _load_statement(first: int, rows: int) -> str:
    assert rows % ROWS_PER_TRANSACTION == 0
    return _LOAD.format(
        first=first,
        transactions=rows // ROWS_PER_TRANSACTION,
        rows_per_transaction=ROWS_PER_TRANSACTION,
        values=VALUES.format(i="i"),
    )


def _insert_lsn(connection: psycopg.Connection) -> str:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])
