"""Compare the publication with what the log knows of it, at little cost while nothing has changed.

One row shows that the publication itself is as it was (`PublicationVersion`). It does not cover
tables that join and leave without being named: by their schema, with ALL TABLES, or as partitions
of a named one. Nor a table that is created under the name of one that was dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.publication import diff
from cdc.source.publications import read_pinned_with_tables, read_publication_version
from cdc.source.tables import tables_by_oid

if TYPE_CHECKING:
    from cdc.log.records import PinnedPublication
    from cdc.source.connection import Connection
    from cdc.source.publications import PublicationVersion


class PublicationCheck:
    """Compares on each call of `continue_with`. For one thread."""

    def __init__(self, name: str, *, members: bool) -> None:
        """`members`: also compare tables that are not named; costs grow with their number."""
        self._name, self._members = name, members
        self._version: PublicationVersion | None = None
        self._names_every_member = False
        self._dropped: frozenset[str] = frozenset()

    def continue_with(
        self, connection: Connection, known: PinnedPublication, since: str = ""
    ) -> PinnedPublication:
        """Return the publication to continue with; raise GapError if it lost changes. Blocks.

        `known` is the log's; it is returned if nothing has changed.
        """
        version = read_publication_version(connection, self._name)
        covered = self._names_every_member or not self._members
        is_same = version == self._version and covered
        if is_same and not (self._dropped and tables_by_oid(connection, self._dropped)):
            return known
        now, existing = read_pinned_with_tables(connection, self._name, known)
        after = diff.continue_with(known, now, existing, since)
        self._version, self._names_every_member = version, _names_every_member(now, version)
        self._dropped = frozenset(after.tables) - frozenset(now.tables)
        return after


def _names_every_member(publication: PinnedPublication, version: PublicationVersion) -> bool:
    """Return whether no table joins or leaves without a new version."""
    options = publication.options
    if options is None or options.all_tables or options.schemas:
        return False
    tables = publication.tables
    return version.entries == len(tables) and all(tables.values())
