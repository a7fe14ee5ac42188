"""The rows of views at the last frontier that this process has computed, while they are few.

A cut is compared with them, so that the query is computed in one state only. They are those of one
frontier: where the next cut begins at another, as after a failure, both states are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from lockstep.jobs.documents.mirror_cuts import MirrorCut
    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.sinks.delta.frontier_rows import FrontierRow

# Of a view: more rows are not kept.
MOST_ROWS: Final = 20_000


class Row(NamedTuple):
    """A row of a view."""

    anchor: tuple[Any, ...]
    data: bytes  # JSON, as sinks get it


Answer = dict[bytes, Row]  # by the key's JSON


class _Kept(NamedTuple):
    at: tuple[int, int]
    definition: str
    answer: Answer


class Answers:
    """What a follower's views hold."""

    def __init__(self) -> None:
        self._kept = dict[str, _Kept]()
        self._large = set[str]()

    def before(self, view: ViewPlan, cut: MirrorCut) -> Answer | None:
        """Return the view's rows before a cut; None if they are not known."""
        kept = self._kept.get(view.name)
        if kept is None or cut.before is None or kept.at != _place(cut.before):
            return None
        return kept.answer if kept.definition == view.definition.fingerprint else None

    def keep(self, view: ViewPlan, cut: MirrorCut, answer: Answer | None) -> None:
        """Note the view's rows after a cut; None: they are not known."""
        self._kept.pop(view.name, None)
        if answer is not None and len(answer) <= MOST_ROWS:
            fingerprint = view.definition.fingerprint
            self._kept[view.name] = _Kept(_place(cut.after), fingerprint, answer)

    def note_large(self, view: ViewPlan) -> None:
        """Note that a view has more rows than are kept."""
        self._large.add(view.name)

    def is_large(self, view: ViewPlan) -> bool:
        """Return whether a view had more rows than are kept."""
        return view.name in self._large


def _place(row: FrontierRow) -> tuple[int, int]:
    return row.generation, row.applied.seq
