"""Rows of a SELECT as Arrow batches, by ADBC: the one place that knows its driver.

ADBC runs each SELECT as `COPY … TO STDOUT (FORMAT binary)` and decodes it in C++. What it holds of
the result is one batch, whatever the table's size.

https://arrow.apache.org/adbc/current/driver/postgresql.html
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import adbc_driver_manager
from adbc_driver_postgresql import StatementOptions, dbapi

from cdc.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

# Large enough that what each batch costs is little, small enough that a few are no matter.
BATCH_BYTES: Final = 4 << 20


class Rows:
    """A connection whose transaction sees an exported snapshot."""

    def __init__(self, connection: dbapi.Connection) -> None:
        self._connection = connection

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a query."""
        with _translated(), self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(
                **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}
            )
            cursor.execute(query)
            yield from cursor.fetch_record_batch()


@contextmanager
def pinned(conninfo: str, snapshot: str) -> Iterator[Rows]:
    """Connect, and see what `snapshot` does until the block ends."""
    name = snapshot.replace("'", "''")
    with _translated(), dbapi.connect(conninfo, autocommit=True) as connection:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{name}'")
        yield Rows(connection)
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error as error:
        said = str(error).strip().split("\n")[0]
        raise UnavailableError(
            f"reading rows by ADBC: {said}",
            hint="see that Postgres runs and source.dsn reaches it; the range is read again",
        ) from error
