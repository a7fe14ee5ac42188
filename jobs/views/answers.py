"""The rows of views at the last frontier that this process has computed, while they fit.

A cut is compared with them, so that the query is computed in one state only. They are those of one
frontier: where the next cut begins at another, as after a failure, both states are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from lockstep.jobs.documents.mirror_cuts import MirrorCut
    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.sinks.delta.frontier_rows import FrontierRow

# Of a view, in Arrow: more are not kept.
MOST_ROWS: Final = 1_000_000
MOST_BYTES: Final = 64 << 20
# Of all views of a follower.
_EVERY_BYTES: Final = 256 << 20
# Rows that are copied into one piece when they have become so many.
_MOST_PIECES: Final = 50


class _Kept(NamedTuple):
    at: tuple[int, int]
    definition: str
    rows: pa.Table


class GatheredRows:
    """Rows that come in parts, while they fit."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._parts = most_bytes, list[pa.Table]()
        self._rows = self._bytes = 0
        self.is_over = False

    def add(self, part: pa.Table) -> None:
        """Add rows."""
        self._rows, self._bytes = self._rows + part.num_rows, self._bytes + part.nbytes
        self.is_over = not _fit(self._rows, self._bytes, self._most_bytes)
        self._parts.append(part)
        if self.is_over:
            self._parts.clear()

    @property
    def rows(self) -> pa.Table | None:
        """The rows; None if they are many, or without any part."""
        return pa.concat_tables(self._parts) if self._parts else None


class Answers:
    """What a follower's views hold, with their columns' types in Delta."""

    def __init__(self) -> None:
        self._kept = dict[str, _Kept]()
        self._large = set[str]()

    def before(self, view: ViewPlan, cut: MirrorCut) -> pa.Table | None:
        """Return the view's rows before a cut; None if they are not known."""
        kept = self._kept.get(view.name)
        if kept is None or cut.before is None or kept.at != _place(cut.before):
            return None
        return kept.rows if kept.definition == view.definition.fingerprint else None

    def keep(self, view: ViewPlan, cut: MirrorCut, rows: pa.Table | None) -> None:
        """Note the view's rows after a cut; None: they are not known."""
        self._kept.pop(view.name, None)
        if rows is None:
            return
        others = sum(kept.rows.nbytes for kept in self._kept.values())
        if not _fit(rows.num_rows, rows.nbytes) or others + rows.nbytes > _EVERY_BYTES:
            self.note_large(view)
            return
        joined = rows.combine_chunks() if rows.column(0).num_chunks > _MOST_PIECES else rows
        self._kept[view.name] = _Kept(_place(cut.after), view.definition.fingerprint, joined)

    def forget(self, view: str) -> None:
        """Forget the rows of a view that is no longer computed, and those they are chosen from."""
        for name in [each for each in self._kept if each.partition(" ")[0] == view]:
            del self._kept[name]

    def note_large(self, view: ViewPlan) -> None:
        """Note that a view has more rows than are kept."""
        self._large.add(view.name)

    def is_large(self, view: ViewPlan) -> bool:
        """Return whether a view had more rows than are kept."""
        return view.name in self._large


def _fit(rows: int, size: int, most_bytes: int = MOST_BYTES) -> bool:
    return rows <= MOST_ROWS and size <= most_bytes


def _place(row: FrontierRow) -> tuple[int, int]:
    return row.generation, row.applied.seq
