"""The rows of an initial snapshot, as the fold takes them in.

They come before the stream's first change, range by range, several ranges at a time: so their seqs
ascend neither in a partition nor over the log, and leave holes. What holds instead: no seq comes
twice, a key's ascend, and the first frontier counts them all. Until it does, the stream's events
wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.events import Frontier


@dataclass(slots=True)
class SnapshotEvents:
    """Which of the snapshot's events have come."""

    seqs: set[int] = field(default_factory=set)
    applied: int = 0
    ended: bool = False

    def takes(self, seq: int, first: int) -> bool:
        """Note the seq; return whether it may come: once, and before the stream."""
        if seq < first or self.ended or seq in self.seqs:
            return False
        self.seqs.add(seq)
        return True

    def end(self, frontiers: Sequence[Frontier]) -> Frontier | None:
        """Return the frontier that counts all of it, once, when all of it was applied."""
        if self.ended or not frontiers or not (self.seqs or frontiers[0].holes):
            return None
        if self.applied < sum(end.events for end in frontiers[0].partitions):
            return None
        self.ended = True
        self.seqs.clear()
        return frontiers[0]
