"""Row filters of a publication: recognized without a lock, and written out where they are new.

`pg_get_expr` opens the filter's table, so it waits for a session that holds the table exclusively:
a VACUUM FULL or a long ALTER TABLE of one table would hold up a daemon with all its others. What
the catalog stores, the tree, is a value like any other. So a filter is known by its mark, a hash of
the tree and of the names of the table's columns, which the text uses; only a filter with an unknown
mark is written out. A tree that differs without another meaning, as after an upgrade of the server,
costs that once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg

from cdc.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from psycopg.rows import TupleRow

    from cdc.source.connection import Connection

# Publications have row filters.
FILTERS_SINCE: Final = 150_000
_HASH: Final = "CASE WHEN r.prqual IS NOT NULL THEN '#' || to_hex(hashtextextended({}, 0)) END"
# Of the tree in the row `r` of pg_publication_rel: the same as long as the filter is. Not md5: a
# server in FIPS mode refuses it.
TREE_HASH: Final = _HASH.format("r.prqual::text")
# Of the tree and the names, so of the text.
_MARK: Final = _HASH.format(
    "r.prqual::text || (SELECT string_agg(a.attname, ',' ORDER BY a.attnum) FROM pg_attribute a"
    " WHERE a.attrelid = r.prrelid AND a.attnum > 0 AND NOT a.attisdropped)"
)
_MARKS: Final = f"""
SELECT r.prrelid::bigint, {_MARK} FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = %s AND r.prrelid = ANY(%s::oid[]) AND r.prqual IS NOT NULL
"""  # noqa: S608 - our own rule
_TEXTS: Final = """
SELECT r.prrelid::bigint, pg_get_expr(r.prqual, r.prrelid) FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = %s AND r.prrelid = ANY(%s::oid[]) AND r.prqual IS NOT NULL
"""
# Which of the tables no other session may read now, and who holds the lock.
_HOLDERS: Final = """
SELECT l.relation::regclass::text, l.pid FROM pg_locks l
WHERE l.relation = ANY(%s::oid[]) AND l.mode = 'AccessExclusiveLock' AND l.granted
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY 1 LIMIT 1
"""
# How long the stream waits for a table's lock before it reports which one.
_LOCK_TIMEOUT: Final = b"SET LOCAL lock_timeout = '30s'"


class RowFilter(NamedTuple):
    """A row filter: its mark, and its text as Postgres writes it."""

    mark: str
    text: str


def read_filters(
    connection: Connection,
    publication: str,
    relations: Collection[int],
    known: Mapping[int, RowFilter] | None,
) -> dict[int, RowFilter]:
    """Return the filter of each table that has one, by its oid.

    A filter of `known` costs no lock. Waits for the lock of the table of any other one, without
    `known` as long as it takes; else raises UnavailableError after half a minute.
    """
    if connection.info.server_version < FILTERS_SINCE:
        return {}
    rows = connection.execute(_MARKS.encode(), (publication, list(relations))).fetchall()
    marked: dict[int, str] = dict(rows)
    found = {oid: each for oid, each in (known or {}).items() if each.mark == marked.get(oid)}
    unknown = [oid for oid in marked if oid not in found]
    if unknown:
        # A filter that is dropped meanwhile has no text.
        texts: dict[int, str] = dict(
            _texts(connection, publication, unknown, limited=known is not None)
        )
        found |= {oid: RowFilter(mark, texts[oid]) for oid, mark in marked.items() if oid in texts}
    return found


def _texts(
    connection: Connection, publication: str, relations: list[int], *, limited: bool
) -> list[TupleRow]:
    if not limited:
        return connection.execute(_TEXTS, (publication, relations)).fetchall()
    try:
        with connection.transaction():
            connection.execute(_LOCK_TIMEOUT)
            return connection.execute(_TEXTS, (publication, relations)).fetchall()
    except psycopg.errors.LockNotAvailable as error:
        holder = connection.execute(_HOLDERS, (relations,)).fetchone()
        who = (
            f"{holder[0]} is locked exclusively by process {holder[1]}"
            if holder
            else f"one of {len(relations)} tables is locked exclusively"
        )
        raise UnavailableError(
            f"{who}, and its row filter, which the log does not know yet, can't be read until that"
            " ends",
            hint="pg_stat_activity shows what it does; the daemon tries again by itself",
        ) from error
