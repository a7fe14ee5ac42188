"""COPY by the extended protocol, which takes one statement where psycopg's own takes several.

What is read is not trusted to be one: parts of it are the operator's SQL, or made from what
somebody asked for.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg import errors, generators, pq

if TYPE_CHECKING:
    from collections.abc import Generator

    from cdc.source.catalog import Connection


def copy(connection: Connection, query: bytes) -> Generator[bytes]:
    """Yield the messages of a COPY to STDOUT; whoever stops before the end has it cancelled."""
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
    """End a COPY that has more to come, and take what comes until it has ended."""
    with suppress(psycopg.Error):
        connection.cancel_safe()
        while isinstance(connection.wait(generators.copy_from(connection.pgconn)), memoryview):
            pass
