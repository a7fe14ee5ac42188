"""Reduce events that are sorted by key and, within a key, by seq. Pure.

A piece at a time, however many events a key has: what `newest` makes of a piece's last key is kept
for the next piece, which may continue it. For a history all of them remain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import InvariantError
from lockstep.jobs.cuts.in_order import in_order
from lockstep.jobs.cuts.reduce import newest
from lockstep.sinks.delta.gathered import over

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import NoReturn

    from lockstep.jobs.cuts.reduce import Bounds, Events
    from lockstep.sinks.contract import Change


def by_key(pieces: Iterable[Events], bounds: Bounds) -> Iterator[list[Change]]:
    """Yield the newest change of every key, each key once."""
    last: Change | None = None
    for piece in pieces:
        changes = newest([piece], bounds).changes
        if last is not None:
            if changes[0].key == last.key:
                changes[0] = over(changes[0], last)
            else:
                changes.insert(0, last)
        last = changes.pop()
        yield changes
    if last is not None:
        yield [last]


def every(pieces: Iterable[Events], bounds: Bounds) -> Iterator[list[Change]]:
    """Yield every change, in pieces: of a key in seq order.

    A value that was not sent and is in an earlier piece, or in the store, stays `unchanged`.
    """
    for piece in pieces:
        yield in_order([piece], bounds, letter=_elsewhere, rows=_elsewhere, every=True).changes


def _elsewhere(*_: object) -> NoReturn:
    """Fail: events are complete, and none takes values from another key's row."""
    raise InvariantError("a change needs more than its key's events")
