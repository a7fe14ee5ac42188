"""The keys with which the triggers of `migrations/` sign what they write.

Each is in a table of its own in the schema `lockstep`, which only its owner may read, and the roles
that the owner granted it to. Where a table is missing, or not readable for us, there is no key, and
no message is believed that claims to be signed with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psycopg

from cdc.source.authority import DDL_PURPOSE, SIGNAL_PURPOSE, TriggerKey
from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.source.connection import Connection

# The tables by the purpose of their keys.
TABLES: Final = {DDL_PURPOSE: "ddl_key", SIGNAL_PURPOSE: "signal_key"}

# By the catalog, not to_regclass, which asks for rights on the schema.
_EXISTING: Final = """
SELECT c.relname::text FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'lockstep' AND c.relname = ANY (%s) AND c.relkind = 'r'
"""

TriggerKeys = dict[str, dict[str, TriggerKey]]


def read(connection: Connection) -> TriggerKeys:
    """Return the keys that our role may read, by purpose and name."""
    found: TriggerKeys = {purpose: {} for purpose in TABLES}
    with translated("reading the keys of the triggers"):
        rows = connection.execute(_EXISTING, (list(TABLES.values()),)).fetchall()
        there = {row[0] for row in rows}
        for purpose, table in TABLES.items():
            if table not in there:
                continue
            query = f"SELECT name::text, inner_key, outer_key FROM lockstep.{table}"  # noqa: S608
            try:
                keys = connection.execute(query.encode()).fetchall()
            except psycopg.errors.InsufficientPrivilege:
                continue
            found[purpose] = {name: TriggerKey(inner, outer) for name, inner, outer in keys}
    return found
