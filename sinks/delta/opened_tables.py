"""A lake's tables at the versions that a reader's cuts span, without loading each version again.

Of a table the two versions that were asked for last stay open, a cut's beginning and its end. The
next cut begins where the last one ended, and the table of the other version moves on to its end,
which costs the commits in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from deltalake import DeltaTable

from lockstep.sinks.delta.actions import Files, log_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSIONS: Final = 2


class _Opened(NamedTuple):
    """A table at a version, and the tag of that version's commit."""

    table: DeltaTable
    tag: str | None


class OpenedTables:
    """The tables of one reader. Of each table its versions, in the order of use."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = dict(storage)
        self._files: dict[str, Files] = {}
        self._tables: dict[str, dict[int, _Opened]] = {}

    def at(self, path: str, version: int) -> DeltaTable:
        """Return a table at a version; it stays there until two others are asked for."""
        known, tag = self._tables.setdefault(path, {}), self._tag(path, version)
        found = known.pop(version, None)
        if found is not None and found.tag != tag:
            known.clear()  # another table is there
            found = None
        table = found.table if found else self._moved(path, version)
        if table is None:
            table = DeltaTable(path, version, storage_options=self._storage or None)
        if tag is not None:
            known[version] = _Opened(table, tag)
        return table

    def _moved(self, path: str, version: int) -> DeltaTable | None:
        """Return the table that was asked for before the last one, at a later version.

        None if there is none, or it can't become that. A cut's beginning is asked for before its
        end, and must not become that.
        """
        known = self._tables[path]
        if len(known) < _VERSIONS:
            return None
        older = next(iter(known))
        table, tag = known.pop(older)
        if older > version:
            return None
        if self._tag(path, older) != tag:  # another table is there
            known.clear()
            return None
        table.load_as_version(version)
        return table

    def _tag(self, path: str, version: int) -> str | None:
        if path not in self._files:
            self._files[path] = Files(path, self._storage)
        return self._files[path].tag(log_name(version))
