"""What the ways to compute a view take, by which its next cut is computed.

Where Spark joins the affected keys, it reads the tables as a complete computation does, and joins
them, too. Before both have been measured, a share of the rows decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.jobs.views.plans import ViewPlan

_Item = TypeVar("_Item")

# Where more keys are affected than this share of the largest table's rows, finding their rows is
# taken to be slower than computing all of them.
_MOST_SHARE: Final = 0.2
# By how much what joined keys took counts less with each complete computation instead of it: so it
# is tried again, as the tables change.
_FORGOTTEN: Final = 0.9


class Decision(NamedTuple):
    """How a view's changes in a cut were computed, and why."""

    view: str
    how: str  # nothing, keys, full or build
    why: str
    joined: int = 0  # keys that Spark joined to the query


class _Joined(NamedTuple):
    keys: int
    seconds: float


class Costs:
    """The seconds that each way took last, by a view's definition."""

    def __init__(self) -> None:
        self._full = dict[str, float]()
        self._joined = dict[str, _Joined]()

    def note(self, view: ViewPlan, decision: Decision, seconds: float) -> None:
        """Note what a cut took."""
        definition = view.definition.fingerprint
        if decision.joined:
            self._joined[definition] = _Joined(decision.joined, seconds)
        elif decision.how in {"full", "build"}:
            self._full[definition] = seconds
            if (last := self._joined.get(definition)) is not None:
                self._joined[definition] = last._replace(seconds=last.seconds * _FORGOTTEN)

    def why_full(self, view: ViewPlan, keys: int, rows: int) -> str:
        """Return why a complete computation is cheaper than joining keys; "" if it is not.

        `rows`: of the view's largest table.
        """
        definition = view.definition.fingerprint
        full, last = self._full.get(definition), self._joined.get(definition)
        if full is None or last is None:
            return f"more than {_MOST_SHARE:.0%} are affected" if keys > _MOST_SHARE * rows else ""
        seconds = last.seconds * max(1.0, keys / last.keys)
        took = f"they would take {seconds:.1f} s, as the last {last.keys:,}, and all rows"
        return f"{took} {full:.1f} s" if seconds > full else ""


class Stopwatch:
    """Measures what producing items takes, without what is done with them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield the items."""
        while True:
            began = time.monotonic()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.seconds += time.monotonic() - began
            yield item
