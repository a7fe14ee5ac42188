"""Rows of a SELECT as Arrow batches, by ADBC: the only module that uses its driver.

ADBC runs each SELECT as `COPY … TO STDOUT (FORMAT binary)` and decodes it in C++. It holds one
batch of the result in memory, regardless of the table's size.

https://arrow.apache.org/adbc/current/driver/postgresql.html
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import adbc_driver_manager
from adbc_driver_postgresql import StatementOptions, dbapi

from cdc.errors import (
    UnavailableError,
    gist,
)
from cdc.source.connection import PIN, expect_pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

# Large enough that the cost per batch is small, small enough that a few of them fit in memory.
BATCH_BYTES: Final = 4 << 20


class Reading:
    """A connection that reads as of an exported snapshot, one transaction per range."""

    def __init__(self, conninfo: str) -> None:
        with _translated():
            # Connecting reads the catalog of types, so one connection serves all ranges.
            self._connection = dbapi.connect(conninfo, autocommit=True)
            with self._connection.cursor() as cursor:
                # The executor's environment may have settings that the connection string can't
                # override.
                cursor.execute(PIN)
                answer = cursor.fetchone()
        expect_pinned(tuple(map(str, answer or ())))

    def batches(self, query: str, snapshot: str) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a query that runs in the exported snapshot `snapshot`."""
        name = snapshot.replace("'", "''")
        with _translated(), self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(
                **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}
            )
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{name}'")
            cursor.execute(query)
            yield from cursor.fetch_record_batch()
            cursor.execute("COMMIT")

    def close(self) -> None:
        """Disconnect; an open transaction is rolled back."""
        self._connection.close()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error as error:
        state = f", SQLSTATE {error.sqlstate}" if error.sqlstate else ""
        raise UnavailableError(
            f"reading rows by ADBC: {gist(error)}{state}",
            hint="see that Postgres runs and source.dsn reaches it; the range is read again",
        ) from error
