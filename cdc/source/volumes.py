"""The volume to copy: rows and bytes of tables and partitions, and whether we may read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from cdc.source.connection import translated
from cdc.source.partition_trees import TREES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.source.connection import Connection


class Volume(NamedTuple):
    """A relation that holds rows."""

    schema: str
    name: str
    rows: int  # by the last ANALYZE
    bytes: int  # including TOAST
    may_select: bool
    hidden: bool  # row security applies to our role

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return sql.Identifier(self.schema, self.name).as_string()


def quoted(name: str) -> str:
    """Return an identifier as SQL writes it."""
    return sql.Identifier(name).as_string()


_VOLUMES: Final = f"""
{TREES}
SELECT DISTINCT n.nspname::text, c.relname::text, greatest(c.reltuples, 0)::bigint,
       coalesce(pg_table_size(c.oid), 0)::bigint,
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),
       row_security_active(c.oid)
FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' ORDER BY 1, 2
"""  # noqa: S608 - our own rules
_WAL_RATE: Final = """
SELECT (wal_bytes / nullif(extract(epoch FROM clock_timestamp() - stats_reset), 0))::float8
FROM pg_stat_wal
"""


def volumes(connection: Connection, tables: Iterable[int]) -> list[Volume]:
    """Return the relations that hold these tables' rows."""
    with translated("reading the tables' sizes"):
        rows = connection.execute(_VOLUMES, (list(tables),)).fetchall()
    return [Volume(*row) for row in rows]


def wal_bytes_per_second(connection: Connection) -> float | None:
    """Return the rate at which WAL was written since the server's statistics were reset."""
    with translated("reading the statistics of the WAL"):
        row = connection.execute(_WAL_RATE).fetchone()
    return row[0] if row else None
