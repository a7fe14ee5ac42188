"""The visibility barrier: what the log holds before a low watermark must be visible to the SELECT.

A commit is decoded once its record is flushed, but visible to others only when its backend has
ended it: a moment later or, where it waits for a synchronous standby, whenever that answers. A row
of such a transaction would be read as it was before. So the transactions that are decoded while
snapshots run are recorded, and each chunk's snapshot is compared with them. What was decoded before
the recording started is not known. So the first chunk waits for each transaction that was open
then, until it has ended, or is decoded, or is known not to be committing: two checks find it
waiting for no standby. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.decode.pg_snapshot import PgSnapshot

if TYPE_CHECKING:
    from cdc.source.chunks import InProgress

# A backend that has flushed its commit and does not wait for a standby has ended it well before the
# next check.
_CHECK_SECONDS: Final = 0.5


class VisibilityBarrier:
    """A recording of what is decoded, and the wait at its start."""

    def __init__(self) -> None:
        self.decoded: dict[int, int] = {}  # commit LSNs by xid, of what may not be visible
        self.passed = False
        self.why: str | None = None  # why it is not passed, where a person may want to know
        self._open: frozenset[int] | None = None  # when the recording started
        self._suspected: frozenset[int] = frozenset()
        self._next_check_at = 0.0  # monotonic

    def is_due(self, now: float) -> bool:
        """Whether the open transactions are to be checked, as the next step of the wait."""
        return not self.passed and now >= self._next_check_at

    def check(self, found: InProgress, now: float) -> None:
        """Note which transactions are open now."""
        self._next_check_at = now + _CHECK_SECONDS
        snapshot = PgSnapshot.parse(found.snapshot)
        if self._open is None:
            self._open = self._suspected = snapshot.in_progress
            self.passed = not self._open
            return
        left = frozenset(
            xid for xid in self._open & snapshot.in_progress if xid not in self.decoded
        )
        committing = left if found.hidden else left & {xid % (1 << 32) for xid in found.committing}
        # Twice not committing: then it had not committed before the first of the two checks.
        waits = (committing | self._suspected) & left
        self._suspected = committing
        self.passed = not waits
        self.why = None
        if committing:
            self.why = (
                f"waits for transaction {min(committing)}, which may have committed before this"
                " session started to listen and waits for a synchronous standby"
            )

    def drop_visible(self, snapshot: PgSnapshot) -> None:
        """Forget the transactions that a SELECT has seen: later ones see them too."""
        self.decoded = {xid: lsn for xid, lsn in self.decoded.items() if not snapshot.sees(xid)}
