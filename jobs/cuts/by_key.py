"""Reduce events that are sorted by key and, within a key, by seq. Pure.

A piece at a time, however many events a key has: what `newest` makes of a piece's last key is kept
for the next piece, which may continue it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.jobs.cuts.reduce import newest
from lockstep.sinks.delta.gathered import over

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
