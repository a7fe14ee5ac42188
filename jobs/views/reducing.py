"""The rows on which the affected rows of a view depend, read in this process while they are few.

The changed rows lead to the affected anchors, and these lead back to rows of every table, by equal
columns (`jobs.views.paths`). A query over these rows only has the same rows with these anchors as
over all, and Spark plans it without a Delta table. The states around the cut are followed as one
that has the rows of both: that may find more anchors and more rows, never fewer.

Nothing of this is done where much would be read or found: then Spark finds the anchors, and reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from lockstep.jobs.views.states import SMALL_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lockstep.jobs.views.paths import Path
    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.jobs.views.states import StateRows, TableStates, Test

# Rows of a table, or values of an anchor, that are kept in this process.
MOST_ROWS: Final = 250_000
# Where more of a large table's rows than this share are needed, Spark reads them as fast.
_MOST_SHARE: Final = 0.2
# A table with more rows than these is read by executors.
_MOST_SCANNED: Final = 50_000_000


class Reduction(NamedTuple):
    """The affected values of each anchor, and rows by table; Spark reads the tables without."""

    anchors: Mapping[str, pa.Array]
    rows: Mapping[str, StateRows]


def reduction(
    view: ViewPlan, tables: Mapping[str, TableStates], changed: Sequence[str]
) -> Reduction | None:
    """Return what decides a view's changes; None if that can't be found here, or is much."""
    names = _reached(view, changed)
    if not names or any(table in view.full_for for table in changed):
        return None
    reading = _Reading(view, tables)
    anchors = reading.anchors(names, changed)
    if anchors is None:
        return None
    rows = {name: reading.rows_of(name, anchors) for name in tables}
    return Reduction(anchors, {name: each for name, each in rows.items() if each is not None})


def joined(
    view: ViewPlan, tables: Mapping[str, TableStates], table: str
) -> dict[str, StateRows] | None:
    """Return the rows of other tables to which the changed rows of one lead; None if many.

    Not among them are tables to which no equal columns lead.
    """
    found: dict[str, StateRows] = {}
    reading, changes = _Reading(view, tables), tables[table].changes
    for path in (path for each in view.routes if each.table == table for path in each.paths):
        reached = changes and reading.along(changes, path)
        if reached is None:
            return None
        found |= {hop.table: rows for hop, rows in zip(path.hops, reached[1:], strict=True)}
    return found


def _reached(view: ViewPlan, changed: Sequence[str]) -> set[str]:
    """Return the anchors to which each row of the changed tables leads."""
    routes = [each for each in view.routes if each.table in changed]
    reached = ({path.anchor for path in each.paths} for each in routes)
    return set.intersection(*reached) if routes else set()


class _Reading:
    """Follows the paths of a view's tables."""

    def __init__(self, view: ViewPlan, tables: Mapping[str, TableStates]) -> None:
        self._view, self._tables = view, tables

    def anchors(self, names: Iterable[str], changed: Sequence[str]) -> dict[str, pa.Array] | None:
        """Return the values of these anchors to which changed rows lead; None if they are many."""
        found: dict[str, list[pa.Array]] = {name: [] for name in names}
        for route in self._view.routes:
            if route.table not in changed:
                continue
            rows = self._tables[route.table].changes
            if rows is None:
                return None
            for path in route.paths:
                if path.anchor in found:
                    values = self._led(rows, path)
                    if values is None:
                        return None
                    found[path.anchor].append(values)
        every = {name: pa.chunked_array(each).unique() for name, each in found.items()}
        return None if any(len(each) > MOST_ROWS for each in every.values()) else every

    def _led(self, rows: StateRows, path: Path) -> pa.Array | None:
        """Return the values of an anchor to which rows of the path's first table lead."""
        reached = self.along(rows, path)
        return reached and reached[-1].values(path.end, nulls=True)

    def along(self, rows: StateRows, path: Path) -> list[StateRows] | None:
        """Return the rows that a path starts with, and those of each hop; None if many."""
        reached = [rows]
        for hop in path.hops:
            found = self._among(hop.table, [(hop.other, reached[-1].values(hop.column))])
            if found is None:
                return None
            reached.append(found)
        return reached

    def rows_of(self, table: str, anchors: Mapping[str, pa.Array]) -> StateRows | None:
        """Return the rows of a table that lead to these anchors; None if they are many."""
        if (small := self._tables[table].small) is not None:
            return small
        routes = [each for each in self._view.routes if each.table == table]
        if not routes or table in self._view.full_for:
            return None
        tests = []
        for route in routes:
            paths = [path for path in route.paths if path.anchor in anchors]
            shortest = min(paths, key=lambda path: len(path.hops), default=None)
            test = shortest and self._back(shortest, anchors)
            if test is None:
                return None
            tests.append(test)
        return self._share(table, tests)

    def _back(self, path: Path, anchors: Mapping[str, pa.Array]) -> Test | None:
        """Return what rows of the path's first table must have to lead to these anchors."""
        test = path.end, anchors[path.anchor]
        for hop in reversed(path.hops):
            found = self._share(hop.table, [test])
            if found is None:
                return None
            test = hop.column, found.values(hop.other)
        return test

    def _share(self, table: str, tests: Sequence[Test]) -> StateRows | None:
        most = max(SMALL_ROWS, int(self._tables[table].rows * _MOST_SHARE))
        return self._among(table, tests, most)

    def _among(self, table: str, tests: Sequence[Test], most: int = MOST_ROWS) -> StateRows | None:
        states = self._tables[table]
        if states.rows > _MOST_SCANNED:
            return None
        return states.among(tests, self._view.column_names, min(most, MOST_ROWS))
