"""Whether the rows that a view's store has are those that Postgres answers, value by value.

The rows are copied into a temporary table of the query's own types, and Postgres compares: EXCEPT
ALL both ways, so that a row that is there twice is found, too.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql
from pyarrow import csv

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

_STORED: Final = sql.Identifier("pg_temp", "stored")
_ANSWER: Final = sql.Identifier("pg_temp", "answer")
# Of one write to the server.
_ROWS: Final = 100_000


class Differing(NamedTuple):
    """How many rows only Postgres has, and how many only the store has."""

    missing: int
    extra: int


def differing(connection: psycopg.Connection, query: str, rows: pa.Table) -> Differing:
    """Return how rows differ from what Postgres answers to a query."""
    columns = sql.SQL(", ").join(map(sql.Identifier, rows.column_names))
    with connection.transaction(force_rollback=True), connection.cursor() as cursor:
        cursor.execute(
            sql.SQL("CREATE TEMP TABLE answer AS SELECT {} FROM ({}) AS v").format(
                columns, sql.SQL(query)
            )
        )
        cursor.execute("CREATE TEMP TABLE stored AS TABLE answer WITH NO DATA")
        with cursor.copy(sql.SQL("COPY {} FROM STDIN (FORMAT csv)").format(_STORED)) as copy:
            for part in rows.to_batches(max_chunksize=_ROWS):
                out = io.BytesIO()
                csv.write_csv(part, out, csv.WriteOptions(include_header=False))
                copy.write(out.getvalue())
        counted = sql.SQL("SELECT count(*) FROM (TABLE {} EXCEPT ALL TABLE {}) AS d")
        return Differing(
            *(
                (cursor.execute(counted.format(*pair)).fetchone() or (0,))[0]
                for pair in ((_ANSWER, _STORED), (_STORED, _ANSWER))
            )
        )
