"""The cuts after a frontier, as its records arrive in the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cdc.log.frontier_tail import FrontierTail
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.cutting import Cutter, Limits

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.events import LSN
    from lockstep.jobs.cuts.cutting import Cut
    from lockstep.sinks.contract import StoreState


class CutTail:
    """One follower's cuts, from the store's frontier on; none ends above the LSN `through`."""

    def __init__(self, config: Config, name: str, state: StoreState, through: LSN | None) -> None:
        follower = config.followers[name]
        self._cutter = Cutter(
            state.applied,
            Chosen(config, follower).follows,
            Limits(follower.max_events, follower.max_bytes, follower.max_events_per_second),
            state.reached,
            through,
        )
        self._tail = FrontierTail(config, state.applied.place, state.applied.seq)

    def close(self) -> None:
        self._tail.close()

    @property
    def has_caught_up(self) -> bool:
        """Whether all cuts were returned that were in the log when it was opened."""
        return self._tail.has_caught_up and not self._cutter.waiting

    def limit(self, events: int, event_bytes: float) -> None:
        """Limit cuts to so many events, and in bytes by this recent size of an event."""
        self._cutter.limits.events = events
        self._cutter.limits.event_bytes = event_bytes

    def next(self, seconds: float) -> Cut | None:
        """Return the next cut; None if there is none within these seconds. Raises GapError."""
        cutter = self._cutter
        self._gather(seconds if cutter.waiting == 0 else 0.0)
        cut = cutter.take(time.monotonic())
        if cut is None and cutter.waiting:
            time.sleep(seconds / 10)  # the next cut is not due yet
        return cut

    def full(self) -> Cut | None:
        """Return the next cut if it is full already: what arrives later changes nothing of it."""
        self._gather(0.0)
        return self._cutter.take(time.monotonic()) if self._cutter.has_enough else None

    def _gather(self, seconds: float) -> None:
        if not self._cutter.has_enough:
            for record, offset in self._tail.arrivals(seconds):
                self._cutter.add(record, offset)
