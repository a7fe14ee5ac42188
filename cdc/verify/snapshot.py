"""The rows of an initial snapshot, as the fold processes them.

They come before the stream's first change, range by range, several ranges at a time: so their seqs
ascend neither in a partition nor over the log, and leave holes. What holds instead: no seq occurs
twice, a key's seqs ascend in a partition, and the first frontier counts them all. Until it does,
the stream's events wait.

An older generation may have put a key's row into another partition, if the topic got more
partitions between the two. So the highest seq of each key is kept, and an event that arrives later
with a lower one is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.events import Frontier
    from cdc.verify.events import Arrival


@dataclass(slots=True)
class SnapshotEvents:
    """Which of the snapshot's events have arrived."""

    seqs: set[int] = field(default_factory=set)
    applied: int = 0
    ended: bool = False
    _newest: dict[tuple[str, bytes], int] = field(default_factory=dict)
    # Deletes whose row has not arrived yet, by key: it may be in a partition that is read later.
    _early: dict[tuple[str, bytes], Arrival] = field(default_factory=dict)

    def takes(self, seq: int) -> bool:
        """Note the seq; return whether it is allowed: once, and before the stream."""
        if seq < 1 or self.ended or seq in self.seqs:
            return False
        self.seqs.add(seq)
        return True

    def is_newest(self, arrival: Arrival, key: bytes) -> bool:
        """Note an event of a key; return whether none with a higher seq has arrived."""
        of, seq = (arrival.topic, key), arrival.event.source.seq
        if seq < self._newest.get(of, 0):
            self._early.pop(of, None)
            return False
        self._newest[of] = seq
        return True

    def deletes_early(self, arrival: Arrival, key: bytes) -> None:
        """Note a delete of a row that has not arrived."""
        self._early[arrival.topic, key] = arrival

    def unmatched(self) -> list[Arrival]:
        """Return the deletes whose row never arrived; each is returned once."""
        found, self._early = list(self._early.values()), {}
        return found

    def end(self, frontiers: Sequence[Frontier]) -> Frontier | None:
        """Return the frontier that counts all of it, once, when all of it was applied."""
        if self.ended or not frontiers or not (self.seqs or frontiers[0].holes):
            return None
        if self.applied < sum(end.events for end in frontiers[0].partitions):
            return None
        self.ended = True
        self.seqs.clear()
        self._newest.clear()
        return frontiers[0]
