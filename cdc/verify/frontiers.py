"""Check frontier records against the events between them.

Pure: the fold hands over what it has seen of each partition and of the source transactions, and
gets a sentence for each broken promise of docs/EVENTS.md ("Frontier record"). A cut is what lies
between two frontiers; it must hold the events it counts and complete source transactions only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc.events import LSN, Frontier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Sentences kept. One fault early on can break every later promise; the rest are only counted.
MAX_FINDINGS = 100


@dataclass(slots=True)
class Findings:
    """Sentences about broken promises: the first hundred, and how many there were."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, sentence: str) -> None:
        self.count += 1
        if self.count <= MAX_FINDINGS:
            self.first.append(sentence)

    def include(self, others: Findings) -> None:
        """Add those of another."""
        for sentence in others.first:
            self.add(sentence)
        self.count += others.count - len(others.first)

    def sentences(self) -> tuple[str, ...]:
        """Return the sentences, with a last one for those that were only counted."""
        more = self.count - len(self.first)
        return (*self.first, f"and {more} more findings") if more else tuple(self.first)


@dataclass(slots=True)
class PartitionSeqs:
    """The events of one partition in arrival order: offset and seq. Tombstones are not events."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    seqs: array[int] = field(default_factory=lambda: array("q"))

    def add(self, offset: int, seq: int) -> None:
        self.offsets.append(offset)
        self.seqs.append(seq)

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(slots=True)
class TransactionEnds:
    """Where each source transaction ends: its last seq, its epoch and commit LSN, ascending."""

    seqs: array[int] = field(default_factory=lambda: array("q"))
    epochs: array[int] = field(default_factory=lambda: array("q"))
    lsns: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, seq: int, epoch: int, commit_lsn: LSN) -> None:
        self.seqs.append(seq)
        self.epochs.append(epoch)
        self.lsns.append(commit_lsn)

    def position(self, index: int) -> tuple[int, LSN]:
        """Return epoch and commit LSN, which compare as one."""
        return self.epochs[index], LSN(self.lsns[index])


def check_cuts(
    findings: Findings,
    frontiers: Sequence[Frontier],
    partitions: Mapping[tuple[str, int], PartitionSeqs],
    ends: TransactionEnds,
    *,
    newest: int,
) -> None:
    """Check each frontier against the one before it, and the last against the end of the log.

    `newest` is the last seq that the log holds; it starts with 1.
    """
    before = Frontier(0, LSN(0), 0, 0, ())
    reached: dict[tuple[str, int], int] = {}
    for frontier in frontiers:
        if (frontier.epoch, frontier.lsn) < (before.epoch, before.lsn) or frontier.seq < before.seq:
            findings.add(f"the frontier goes back from {_named(before)} to {_named(frontier)}")
        _check_counts(findings, partitions, reached, before, frontier)
        if frontier.seq:
            _check_boundary(findings, ends, frontier)
        before = frontier
    if before.seq != newest:
        findings.add(f"the last frontier is {_named(before)}, but the newest event is seq {newest}")
    for (topic, partition), seen in partitions.items():
        after = len(seen) - reached.get((topic, partition), 0)
        if after:
            findings.add(f"{after} events of {topic}/{partition} are after the last frontier")


def _check_counts(
    findings: Findings,
    partitions: Mapping[tuple[str, int], PartitionSeqs],
    reached: dict[tuple[str, int], int],
    before: Frontier,
    frontier: Frontier,
) -> None:
    """Compare the events of the cut's partitions with the frontier's counts."""
    total = 0
    for topic, partition, offset, events in frontier.partitions:
        seen = partitions.get((topic, partition), PartitionSeqs())
        low = reached.get((topic, partition), 0)
        high = max(low, bisect_left(seen.offsets, offset))
        if high - low != events:
            findings.add(
                f"the cut up to {_named(frontier)} counts {events} events of {topic}/{partition}"
                f" up to offset {offset}, where there are {high - low}"
            )
        for seq in (seen.seqs[low], seen.seqs[high - 1]) if high > low else ():
            if not before.seq < seq <= frontier.seq:
                findings.add(
                    f"seq {seq} of {topic}/{partition} is in the cut from {_named(before)} to"
                    f" {_named(frontier)}"
                )
        reached[topic, partition] = high
        total += high - low
    due = frontier.seq - before.seq - frontier.holes
    if total != due:
        findings.add(
            f"the cut from {_named(before)} to {_named(frontier)} holds {total} events instead of"
            f" {due}"
        )


def _check_boundary(findings: Findings, ends: TransactionEnds, frontier: Frontier) -> None:
    """Check that the frontier lies between two source transactions, in `seq` and in the WAL."""
    index = bisect_left(ends.seqs, frontier.seq)
    if index == len(ends.seqs) or ends.seqs[index] != frontier.seq:
        findings.add(f"the frontier {_named(frontier)} cuts through a source transaction")
        return
    here = (frontier.epoch, frontier.lsn)
    commit = ends.position(index)
    if commit >= here:
        findings.add(f"the frontier {_named(frontier)} is not after its commit at {commit[1]}")
    if index + 1 < len(ends.seqs) and (later := ends.position(index + 1)) < here:
        findings.add(
            f"the frontier {_named(frontier)} claims the commit at {later[1]}, whose events"
            " are after it"
        )


def _named(frontier: Frontier) -> str:
    return f"{frontier.lsn} (seq {frontier.seq})"
