"""COPY by the extended protocol, which accepts one statement where psycopg's own accepts several.

The text is not trusted to be one statement: parts of it are SQL from the configuration, or made
from a user's request.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg import errors, generators, pq

if TYPE_CHECKING:
    from collections.abc import Generator

    from cdc.source.connection import Connection


def copy(connection: Connection, query: bytes) -> Generator[bytes]:
    """Yield the messages of a COPY to STDOUT; closing the generator early cancels the COPY."""
    pgconn = connection.pgconn
    pgconn.send_query_params(query, None)
    result = connection.wait(generators.execute(pgconn))[0]
    if result.status != pq.ExecStatus.COPY_OUT:
        raise errors.error_from_result(result)
    ended = False
    try:
        while True:
            try:
                data = connection.wait(generators.copy_from(pgconn))
            except psycopg.Error:
                ended = True
                raise
            if not isinstance(data, memoryview):  # the final result
                ended = True
                return
            yield bytes(data)
    finally:
        if not ended and not connection.closed:
            _cancel(connection)


def _cancel(connection: Connection) -> None:
    """Cancel a COPY that has not ended, and read until it has."""
    with suppress(psycopg.Error):
        connection.cancel_safe()
        while isinstance(connection.wait(generators.copy_from(connection.pgconn)), memoryview):
            pass
