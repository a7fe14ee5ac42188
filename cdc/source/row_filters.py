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
_TEXT: Final = """
SELECT pg_get_expr(r.prqual, r.prrelid) FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = %s AND r.prrelid = %s AND r.prqual IS NOT NULL
"""
# Who holds the lock that no other session gets meanwhile.
_HOLDERS: Final = """
SELECT one.oid::regclass::text,
       (SELECT string_agg(DISTINCT l.pid::text, ', ') FROM pg_locks l WHERE l.relation = one.oid
        AND l.mode = 'AccessExclusiveLock' AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
FROM (SELECT %s::oid) one
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
    marks = connection.execute(_MARKS.encode(), (publication, list(relations))).fetchall()
    found = {}
    for oid, mark in marks:
        before = known.get(oid) if known else None
        if before is not None and before.mark == mark:
            found[oid] = before
        elif text := _text(connection, publication, oid, limited=known is not None):
            found[oid] = RowFilter(mark, text)
    return found


def _text(connection: Connection, publication: str, oid: int, *, limited: bool) -> str | None:
    """Return a filter's text; None if the table or its filter is dropped meanwhile."""
    if not limited:
        row = connection.execute(_TEXT, (publication, oid)).fetchone()
        return row and row[0]
    try:
        with connection.transaction():
            connection.execute(_LOCK_TIMEOUT)
            row = connection.execute(_TEXT, (publication, oid)).fetchone()
    except psycopg.errors.LockNotAvailable as error:
        holders = connection.execute(_HOLDERS, (oid,)).fetchone()
        table, pids = holders or (oid, None)
        raise UnavailableError(
            f"{table} is locked exclusively{f' by process {pids}' if pids else ''}, and its row"
            " filter, which the log does not know yet, can't be read until that ends",
            hint="pg_stat_activity shows what it does; the daemon tries again by itself",
        ) from error
    return row and row[0]
