"""Wait until each earlier transaction in the log is visible to a SELECT.

A commit is decoded once its record is flushed, but visible to others only when its backend has
ended it: a moment later or, where it waits for a synchronous standby, whenever that answers. From
now on the sequencer records which transactions it has decoded (`Sequencer.decoded`), and each
chunk's snapshot is compared with them. What an earlier session decoded was not recorded. So the
first chunk waits for each transaction that was open when the recording started, until it has ended,
or is decoded now, or is known not to be committing: two checks find it waiting for no standby.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cdc.snapshot.incremental.visibility import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from cdc.runtime.background import Worker
    from cdc.snapshot.incremental.fetcher import Fetcher
    from cdc.source.chunks import InProgress

# A backend that has flushed its commit and does not wait for a standby has ended it well before the
# next check.
_LOOK_SECONDS: Final = 0.5


class Settling:
    """One wait; start the recording first."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._over = False
        self._open: frozenset[int] | None = None  # when the recording started
        self._suspected: frozenset[int] = frozenset()
        self._future: Future[InProgress] | None = None
        self._not_before = 0.0

    def turn(self, worker: Worker, fetcher: Fetcher, decoded: Mapping[int, int]) -> bool:
        """Poll; return whether the wait is over. Raises the errors of the poll."""
        if self._over:
            return True
        if self._future is not None:
            if not self._future.done():
                return False
            future, self._future = self._future, None
            self._take(future.result(), decoded)
        elif time.monotonic() >= self._not_before:
            self._future = worker.submit(fetcher.in_progress)
        return self._over

    def _take(self, look: InProgress, decoded: Mapping[int, int]) -> None:
        self._not_before = time.monotonic() + _LOOK_SECONDS
        snapshot = Snapshot.parse(look.snapshot)
        if self._open is None:
            self._open = self._suspected = snapshot.in_progress
            self._over = not self._open
            return
        left = frozenset(xid for xid in self._open & snapshot.in_progress if xid not in decoded)
        committing = left if look.hidden else left & {xid % (1 << 32) for xid in look.committing}
        # Twice not committing: then it had not committed before the first of the two checks.
        waits = (committing | self._suspected) & left
        self._suspected = committing
        self._over = not waits
        self.why = None
        if committing:
            self.why = (
                f"waits for transaction {min(committing)}, which may have committed before we"
                " listened and waits for a synchronous standby"
            )
