"""Compare frontier records with chains of them that were noted in a place of its own.

Pure. Who can write to the log's topics and to the archive's storage can compute everything from
some frontier on again, and it is sound. The chains that were noted before are others then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.events import LSN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.log.records import FrontierRecord

# Sentences kept of one kind.
_MOST = 20


class NotedChain(NamedTuple):
    """The chain of a frontier, as it was noted."""

    seq: int
    lsn: LSN
    chain: str

    def __str__(self) -> str:
        return f"the frontier {self.lsn} (seq {self.seq})"


class NotedCheck:
    """Takes the frontier records of a log or of its archive, in any order."""

    def __init__(self, noted: Iterable[NotedChain]) -> None:
        self._left = set(noted)
        self._of: dict[tuple[LSN, int], set[str]] = {}
        for each in self._left:
            self._of.setdefault((each.lsn, each.seq), set()).add(each.chain)
        self._other: list[str] = []
        self.found = 0

    def add(self, record: FrontierRecord) -> None:
        """Compare a frontier record with what was noted of it."""
        chains = self._of.get((record.lsn, record.seq))
        if chains is None:
            return
        this = NotedChain(record.seq, record.lsn, record.chain)
        if chains == {record.chain}:
            self.found += this in self._left
        elif len(self._other) < _MOST:
            self._other.append(f"{this} has another chain than was noted: all up to it may differ")
        self._left -= {NotedChain(record.seq, record.lsn, chain) for chain in chains}

    def finish(
        self, *, above: int = 0, end: NotedChain, upto: LSN | None, after_end: str
    ) -> list[str]:
        """Return what differs, and what was noted and is missing, from `above` on and up to `upto`.

        `end` is the newest frontier; `after_end` says what it means that more was noted.
        """
        missing = sorted(
            each for each in self._left if each.seq > above and (upto is None or each.lsn <= upto)
        )
        # A later frontier with the same seq covers no event more.
        inside = [each for each in missing if each[:2] <= end[:2]]
        after = [each for each in missing if each.seq > end.seq]
        found = [*self._other, *(f"{each} was noted and is missing" for each in inside[:_MOST])]
        if after:
            found.append(f"it ends at seq {end.seq}, and {after[-1]} was noted: {after_end}")
        return found
