"""Which user-defined types are of which kind, by the current catalog: for reports only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Collection

    from cdc.source.catalog import Connection


def defined_by_users(connection: Connection, names: Collection[str]) -> frozenset[str]:
    """Return the `schema.type` names that are enums, composites, ranges or domains."""
    with translated("looking up types"):
        found = connection.execute(
            "SELECT n.nspname || '.' || t.typname FROM pg_type t"
            " JOIN pg_namespace n ON n.oid = t.typnamespace"
            " WHERE t.typtype IN ('c', 'd', 'e', 'm', 'r')"
            " AND n.nspname || '.' || t.typname = ANY (%s)",
            (list(names),),
        ).fetchall()
    return frozenset(name for (name,) in found)
