"""Compare the publication with what the log knows of it, at little cost while nothing has changed.

One row tells that the publication itself is as it was (`catalog.publication_mark`). It does not
tell of tables that come and go without being named: by their schema, with ALL TABLES, or as
partitions of a named one. Nor of a table that is created under the name of one that was dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc import publication
from cdc.source import catalog, inspection

if TYPE_CHECKING:
    from cdc.log.records import Publication
    from cdc.source.catalog import Connection


class PublicationLook:
    """Looks as often as it is asked. Of one thread."""

    def __init__(self, name: str, *, members: bool) -> None:
        """`members`: see those too that come and go without being named, at their number's cost."""
        self._name, self._members = name, members
        self._mark: inspection.Mark | None = None
        self._told_by_mark = False
        self._dropped: frozenset[str] = frozenset()

    def look(self, sql: Connection, known: Publication, since: str = "") -> Publication:
        """Return the publication to go on with; raise GapError where it has lost changes. Blocks.

        `known` is the log's, and what is returned where nothing has changed.
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
    """Return whether every member is named: then none comes or goes without a new mark."""
    sends = found.sends
    if sends is None or sends.all_tables or sends.schemas:
        return False
    return inspection.named_members(mark) == len(found.tables) and all(found.tables.values())
