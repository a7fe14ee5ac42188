"""The newest frontier of a mirror that another process writes, by the commits since the last look.

A look costs what was committed since: a read of the next commit, and of the files that it adds, of
one row each. Where a commit does anything but append rows, or the table is another one, the table
is loaded again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.sinks.delta import frontier_rows, lake
from lockstep.sinks.delta.actions import Files, log_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Applied
    from lockstep.sinks.delta.actions import TaggedVersion
    from lockstep.sinks.delta.frontier_rows import FrontierRow, Place

# The actions of a commit that only appends rows.
_APPENDING: Final = frozenset({"add", "commitInfo", "txn"})
# How many of the newest rows are in memory, for readers that are at one of them.
_MOST_ROWS: Final = 64
# A full row has a version of every table.
_MOST_FULL_ROWS: Final = 2


class FrontierTail:
    """One reader's view of `_frontiers`."""

    def __init__(self, root: str, storage: Mapping[str, str]) -> None:
        self._path = f"{root.rstrip('/')}/{frontier_rows.NAME}"
        self._storage = storage
        self._files: Files | None = None
        # What was read: up to which version, and the newest rows by order.
        self._read: TaggedVersion | None = None
        self._rows: dict[Place, FrontierRow] = {}
        # The versions of the newest full rows, on which partial ones depend.
        self._full: dict[Place, Mapping[str, int]] = {}

    @property
    def exists(self) -> bool:
        """Whether the last look found the table."""
        return self._read is not None

    def table(self) -> DeltaTable | None:
        """Return the table at its newest version; None if there is none."""
        return lake.opened(self._path, self._storage)

    def newest(self) -> FrontierRow | None:
        """Return the newest row; None if there is none, or no table."""
        if not self._has_followed():
            self._load()
        return frontier_rows.newest(self._rows.values())

    def at(self, applied: Applied) -> FrontierRow | None:
        """Return the newest row for a store's frontier; None if the mirror has none.

        It is of the mirror's generation that the store was made from, where that is known: the rows
        at one frontier may differ between generations.
        """
        place, generation = (applied.seq, applied.lsn), applied.mirror_generation
        known = [row for at, row in self._rows.items() if at[1:] == place]
        found = _of_generation(known, generation)
        if found is not None:
            return found
        table = self.table()
        if table is None:
            return None
        stored = frontier_rows.rows(table, frontier_rows.at_frontier(applied))
        return _of_generation(stored, generation)

    def _load(self) -> None:
        self._read, self._rows, self._full = None, {}, {}
        table = self.table()
        if table is None:
            return
        files = Files(self._path, self._storage)
        read = files.tagged(table.version())
        found = frontier_rows.as_of(table, None, None)
        if found is not None:
            self._add(found)
        # Last: after an error the next look loads the table.
        self._files, self._read = files, read

    def _has_followed(self) -> bool:
        """Read what was appended since the last look; return False if that is not all."""
        if self._files is None or self._read is None or not self._files.has(self._read):
            return False
        while (commit := self._commit(self._read.number + 1)) is not None:
            actions = [json.loads(line) for line in commit.splitlines() if line.strip()]
            if not {name for action in actions for name in action} <= _APPENDING:
                return False
            for action in actions:
                if "add" in action and not self._append(action["add"]["path"]):
                    return False
            self._read = self._files.tagged(self._read.number + 1)
        return True

    def _commit(self, version: int) -> bytes | None:
        assert self._files is not None, "the table was loaded"
        try:
            return self._files.read(log_name(version))
        except FileNotFoundError:
            return None

    def _append(self, path: str) -> bool:
        """Read a file of rows; return False if it was deleted."""
        assert self._files is not None, "the table was loaded"
        try:
            data = self._files.read(unquote(path))
        except FileNotFoundError:
            return False
        read = lake.under(pq.read_table(pa.BufferReader(data)), frontier_rows.ARROW)
        for each in read.to_pylist():
            self._know_full(each)
            if each["is_whole"]:
                self._add(frontier_rows.row_of(each, self._full))
        return True

    def _know_full(self, row: Mapping[str, Any]) -> None:
        """Remember a full row's versions, or those of the one that a partial row depends on."""
        if row["versions"] is not None:
            self._full[row["generation"], row["seq"], row["lsn"]] = dict(row["versions"])
        elif (place := frontier_rows.depends_on(row)) not in self._full:
            table = self.table()
            assert table is not None, "its commits were read"
            self._full |= frontier_rows.full_rows(table, {place})
        for old in list(self._full)[:-_MOST_FULL_ROWS]:
            del self._full[old]

    def _add(self, row: FrontierRow) -> None:
        self._rows[frontier_rows.order(row)] = row
        for old in sorted(self._rows)[:-_MOST_ROWS]:
            del self._rows[old]


def _of_generation(rows: Iterable[FrontierRow], generation: int) -> FrontierRow | None:
    """Return the newest row of a generation; 0: of any."""
    return frontier_rows.newest(row for row in rows if generation in (0, row.generation))
