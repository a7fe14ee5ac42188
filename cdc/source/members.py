"""Which tables a publication sends, read only from the catalogs.

`pg_get_publication_tables` and the view on top of it open every table that has no column list
(Postgres 15 and later), so they wait for any session that holds one of them exclusively: a VACUUM
FULL or a long ALTER TABLE of one table would keep a daemon from starting with all others. This
reads the rows that the function itself uses, and waits for no lock. The result is the same as the
function's:

- FOR ALL TABLES: every permanent user table; with `publish_via_partition_root`, partitions through
  their root, without it each partition that holds rows;
- tables by name and schemas: the same of what they name. Of a table that is named along with its
  ancestor only the ancestor counts where the root publishes.

https://www.postgresql.org/docs/current/catalog-pg-publication-rel.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.source.connection import translated
from cdc.source.partition_trees import TREES

if TYPE_CHECKING:
    from cdc.source.connection import Connection

# Schemas can be published.
SCHEMAS_SINCE: Final = 150_000

# `is_publishable_class`: lower oids are the system's own and information_schema's.
_PUBLISHABLE: Final = "c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384"
_BY_SCHEMA: Final = """
    UNION
    SELECT c.oid, c.relkind, c.relispartition
    FROM lockstep_pub p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
    JOIN pg_class c ON c.relnamespace = s.pnnspid AND {publishable}"""
_MEMBERS: Final = """
WITH RECURSIVE lockstep_pub AS (
    SELECT oid, puballtables, pubviaroot FROM pg_publication WHERE pubname = %(publication)s
), lockstep_named(oid, relkind, relispartition) AS (
    SELECT c.oid, c.relkind, c.relispartition
    FROM lockstep_pub p JOIN pg_publication_rel r ON r.prpubid = p.oid
    JOIN pg_class c ON c.oid = r.prrelid{by_schema}
), lockstep_above(oid, ancestor) AS (
    SELECT m.oid, i.inhparent FROM lockstep_named m JOIN pg_inherits i ON i.inhrelid = m.oid
    WHERE m.relispartition
    UNION
    SELECT a.oid, i.inhparent FROM lockstep_above a JOIN pg_inherits i ON i.inhrelid = a.ancestor
), lockstep_below(oid, relkind) AS (
    SELECT oid, relkind FROM lockstep_named
    UNION
    SELECT c.oid, c.relkind FROM lockstep_below b
    JOIN pg_inherits i ON i.inhparent = b.oid AND NOT i.inhdetachpending
    JOIN pg_class c ON c.oid = i.inhrelid WHERE b.relkind = 'p'
), lockstep_members(relid) AS (
    SELECT c.oid FROM lockstep_pub p JOIN pg_class c ON p.puballtables AND {publishable}
    WHERE CASE WHEN p.pubviaroot THEN NOT c.relispartition ELSE c.relkind = 'r' END
    UNION ALL
    SELECT b.oid FROM lockstep_pub p JOIN lockstep_below b
    ON NOT p.puballtables AND NOT p.pubviaroot AND b.relkind <> 'p'
    UNION ALL
    SELECT m.oid FROM lockstep_pub p JOIN lockstep_named m
    ON NOT p.puballtables AND p.pubviaroot
        AND NOT EXISTS (SELECT FROM lockstep_above a JOIN lockstep_named up ON up.oid = a.ancestor
                        WHERE a.oid = m.oid)
)
"""


def members_clause(server_version: int) -> str:
    """Return a WITH clause that ends in `lockstep_members(relid)`, for %(publication)s."""
    schemas = server_version >= SCHEMAS_SINCE
    return _MEMBERS.format(
        publishable=_PUBLISHABLE,
        by_schema=_BY_SCHEMA.format(publishable=_PUBLISHABLE) if schemas else "",
    )


class Member(NamedTuple):
    oid: int
    schema: str
    table: str
    replica_identity: str  # relreplident
    rows: int  # estimated
    root: str | None  # the partitioned table that it is a partition of

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


_PUBLISHED: Final = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relreplident::text,
       greatest(c.reltuples, 0)::bigint,
       (SELECT rn.nspname || '.' || rc.relname FROM pg_class rc
        JOIN pg_namespace rn ON rn.oid = rc.relnamespace
        WHERE rc.oid = pg_partition_root(c.oid) AND rc.oid <> c.oid)
FROM lockstep_members m
JOIN pg_class c ON c.oid = m.relid JOIN pg_namespace n ON n.oid = c.relnamespace
ORDER BY n.nspname::text, c.relname::text
"""
# With all partitions. Reading a size waits for sessions that hold the table exclusively.
_SIZES: Final = f"""
{TREES}
SELECT one.oid::bigint,
       coalesce((SELECT sum(pg_relation_size(t.oid)) FROM tree t WHERE t.root = one.oid), 0)::bigint
FROM unnest(%s::oid[]) AS one(oid)
"""  # noqa: S608 - our own rules


def read_members(connection: Connection, publication: str) -> list[Member]:
    """Return every table that the publication publishes under a name of its own."""
    query = members_clause(connection.info.server_version) + _PUBLISHED
    with translated(f"reading the tables of {publication}"):
        rows = connection.execute(query.encode(), {"publication": publication}).fetchall()
    return [Member(*row) for row in rows]


def read_sizes(connection: Connection, tables: list[int]) -> dict[int, int]:
    """Return the bytes of each table, by its oid."""
    with translated("reading the sizes of tables"):
        return dict(connection.execute(_SIZES, (tables, tables)).fetchall())
