"""Compare the publication with what the log knows of it, at little cost while nothing has changed.

One row shows that the publication itself is as it was (`catalog.publication_mark`). It does not
cover tables that join and leave without being named: by their schema, with ALL TABLES, or as
partitions of a named one. Nor a table that is created under the name of one that was dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.publication import diff as publication
from cdc.source import catalog
from cdc.source import server as inspection

if TYPE_CHECKING:
    from cdc.log.records import Publication
    from cdc.source.catalog import Connection


class PublicationLook:
    """Compares on each call of `look`. For one thread."""

    def __init__(self, name: str, *, members: bool) -> None:
        """`members`: also compare tables that are not named; costs grow with their number."""
        self._name, self._members = name, members
        self._mark: inspection.Mark | None = None
        self._told_by_mark = False
        self._dropped: frozenset[str] = frozenset()

    def look(self, sql: Connection, known: Publication, since: str = "") -> Publication:
        """Return the publication to continue with; raise GapError if it lost changes. Blocks.

        `known` is the log's; it is returned if nothing has changed.
        """
        mark = catalog.publication_mark(sql, self._name)
        by_mark = self._told_by_mark or not self._members
        if mark == self._mark and by_mark and not catalog.tables_named(sql, self._dropped):
            return known
        found, existing = catalog.publication_beside(sql, self._name, known.tables)
        after = publication.follow(known, found, existing, since)
        self._mark, self._told_by_mark = mark, _told_by_mark(found, mark)
        self._dropped = frozenset(after.tables) - frozenset(found.tables)
        return after


def _told_by_mark(found: Publication, mark: inspection.Mark) -> bool:
    """Return whether every member is named: then none joins or leaves without a new mark."""
    sends = found.sends
    if sends is None or sends.all_tables or sends.schemas:
        return False
    return inspection.named_members(mark) == len(found.tables) and all(found.tables.values())
