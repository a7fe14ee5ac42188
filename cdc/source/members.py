"""The publication's tables by name, and messages into the stream: for commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.source.catalog import Connection

# A published table, or a partition of one that is published by its root or by its partitions.
_MEMBERS: Final = """
SELECT n.nspname::text, c.relname::text, greatest(c.reltuples, 0)::bigint,
       CASE WHEN c.relkind = 'p' THEN
           (SELECT coalesce(sum(pg_relation_size(t.relid)), 0) FROM pg_partition_tree(c.oid) t)
       ELSE pg_relation_size(c.oid) END::bigint,
       (SELECT rn.nspname || '.' || rc.relname FROM pg_class rc
        JOIN pg_namespace rn ON rn.oid = rc.relnamespace
        WHERE rc.oid = pg_partition_root(c.oid) AND rc.oid <> c.oid)
FROM pg_publication_tables t
JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
WHERE t.pubname = %s ORDER BY 1, 2
"""


class Member(NamedTuple):
    """A published table."""

    schema: str
    table: str
    rows: int  # estimated
    bytes: int
    root: str | None  # the partitioned table that it is a partition of

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


def members(connection: Connection, publication: str) -> list[Member]:
    """Return every table that the publication publishes under a name of its own."""
    with translated(f"reading the tables of {publication}"):
        return [Member(*row) for row in connection.execute(_MEMBERS, (publication,)).fetchall()]


def emit(connection: Connection, prefix: str, content: bytes) -> str:
    """Write a transactional logical message; return where."""
    with translated(f"writing a message {prefix}"):
        row = connection.execute(
            "SELECT pg_logical_emit_message(true, %s, %s::bytea)::text", (prefix, content)
        ).fetchone()
    assert row is not None
    return str(row[0])
