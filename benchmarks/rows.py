"""The table that most workloads fill, and how its rows get into the WAL.

About 240 bytes per row in the pgoutput stream, about 715 as a JSON event without its schema: five
columns of common types, and a text of 100 to 200 characters that does not compress to nothing. The
row of an id is always the same except for `created_at`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.progress import say

if TYPE_CHECKING:
    from typing import LiteralString

    import psycopg

TABLE = "bench"
ROWS_PER_TRANSACTION = 100

CREATE_TABLE: LiteralString = """
    CREATE TABLE bench (
        id bigint PRIMARY KEY,
        k int,
        payload text,
        amount numeric(12,2),
        created_at timestamptz
    )"""

# One row's values, from its id; `{i}` stands for the expression that gives the id. No percent sign:
# where the id is a parameter, it marks a placeholder.
VALUES: LiteralString = """
    {i}, mod({i}, 1000)::int,
    substr(md5({i}::text) || md5(({i} + 1)::text) || md5(({i} + 2)::text) || md5(({i} + 3)::text)
        || md5(({i} + 4)::text) || md5(({i} + 5)::text) || md5(({i} + 6)::text),
        1, (100 + mod({i}, 101))::int),
    (mod({i}, 1000000) / 100.0)::numeric(12,2),
    clock_timestamp()"""

# Single-row INSERT statements on purpose: they write the same WAL as an application's.
_SINGLY = """
    DO $$
    DECLARE i bigint := {first} - 1;
    BEGIN
        FOR t IN 1..{transactions} LOOP
            FOR j IN 1..{rows_per_transaction} LOOP
                i := i + 1;
                INSERT INTO {table} VALUES ({values});
            END LOOP;
            COMMIT;
        END LOOP;
    END $$"""

_CHUNK_ROWS = 100_000


def insert_singly(connection: psycopg.Connection, table: str, values: str, rows: int) -> None:
    """Insert the rows 1 to `rows`, one statement per row, in transactions of 100."""
    for first in range(1, rows + 1, _CHUNK_ROWS):
        chunk = min(_CHUNK_ROWS, rows - first + 1)
        connection.execute(_singly(table, values, first, chunk).encode())
        say(f"preloading the WAL: {first + chunk - 1:,} of {rows:,} rows")


def insert_at_once(connection: psycopg.Connection, table: str, values: str, rows: int) -> None:
    """Insert the rows 1 to `rows` in one statement, one transaction."""
    chosen = values.format(i="i")
    statement = f"INSERT INTO {table} SELECT {chosen} FROM generate_series(1, {rows}::bigint) i"
    connection.execute(statement.encode())


def _singly(table: str, values: str, first: int, rows: int) -> str:
    assert rows % ROWS_PER_TRANSACTION == 0
    return _SINGLY.format(
        table=table,
        first=first,
        transactions=rows // ROWS_PER_TRANSACTION,
        rows_per_transaction=ROWS_PER_TRANSACTION,
        values=values.format(i="i"),
    )
