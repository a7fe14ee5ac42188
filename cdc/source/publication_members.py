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

from typing import Final

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


def members(server_version: int) -> str:
    """Return a WITH clause that ends in `lockstep_members(relid)`, for %(publication)s."""
    schemas = server_version >= SCHEMAS_SINCE
    return _MEMBERS.format(
        publishable=_PUBLISHABLE,
        by_schema=_BY_SCHEMA.format(publishable=_PUBLISHABLE) if schemas else "",
    )
