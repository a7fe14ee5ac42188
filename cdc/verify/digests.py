"""Compare records of the log with the digests of the frontier records.

Pure: it gets frontier records and, in any number of pieces, each partition's records between two of
them, in the order of their offsets, tombstones included. A partition's digest is computed chunk by
chunk (`cdc.log.digests`). Which record belongs to which chunk follows from its seq: the borders of
the Kafka transactions are in the frontier record. Those of an initial snapshot are mixed in the
partitions: each has a running hash of 2 kB in each partition until the partition is complete.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cdc.log import digests
from cdc.log.digests import ChunkHash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.log.partitions import Partition
    from cdc.log.records import FrontierRecord


class _Source(msgspec.Struct):
    seq: int


class _Event(msgspec.Struct):
    source: _Source


class _LetterKey(msgspec.Struct):
    id: str  # of the dead letter: epoch and seq of its event


# Above every number of seqs that a transaction may have.
_MOST = 1 << 62
_event = msgspec.json.Decoder(_Event).decode
_letter_key = msgspec.json.Decoder(_LetterKey).decode


class DigestDifference(NamedTuple):
    """What does not match a frontier; `topic` is empty if it is about the record itself."""

    topic: str
    partition: int
    what: str
    is_short: bool = False  # whether events are missing


class FrontierChain:
    """Checks frontier records one after another, from the first that is given."""

    def __init__(self, chain: str = "", seq: int | None = None) -> None:
        """`chain` and `seq` are those of the frontier before the first one, if it is known."""
        self._before = chain
        self.seq = seq
        self.is_known = seq is not None

    @property
    def chain(self) -> str:
        """The chain of the newest record."""
        return self._before

    def add(self, record: FrontierRecord) -> list[DigestDifference]:
        """Take the next record; return what is wrong with it."""
        found = []
        counted = sum(events for *_, events in record.partitions)
        if self.seq is not None and self.seq + record.holes + counted != record.seq:
            found.append(
                f"counts {counted} events after seq {self.seq}: frontier records before it are"
                " missing, or it was altered"
            )
        if not record.chain:
            if self._before:
                found.append("has no chain, although the frontier before it has one")
        elif digests.chain(record) != record.chain:
            found.append("does not match its own chain: it was altered")
        elif self.is_known and record.previous != self._before:
            found.append("does not continue the chain of the frontier before it")
        self._before, self.seq, self.is_known = record.chain, record.seq, True
        return [DigestDifference("", 0, what) for what in found]


class PartitionCheck:
    """Takes a partition's records between two frontiers, in their order."""

    def __init__(self, record: FrontierRecord, at: int) -> None:
        """`at` is the partition's index in the record."""
        self._record = record
        self.topic, self.number, self.end, self._events = record.partitions[at]
        self._stated = record.digests and record.digests[at]
        above = record.seq - sum(record.chunks)
        # The last seq of each Kafka transaction.
        self._borders = [above + seqs for seqs in accumulate(record.chunks)]
        self._digest = digests.START
        self._chunk = 0  # index of the current one
        self._hash: ChunkHash | None = None
        # Of an initial snapshot: how many blocks are before each run of them, and each one's hash.
        self._before = [0, *accumulate(count for *_, count in record.blocks)]
        self._blocks: dict[int, ChunkHash] = {}
        self._block = -1  # the newest record's
        self._counted = 0
        self._unreadable = False

    @property
    def partition(self) -> Partition:
        return self.topic, self.number

    def add(self, keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> None:
        """Take the next records."""
        self._counted += sum(value is not None for value in values) if self._are_events else 0
        if self._record.blocks:
            self._add_to_blocks(keys, values)
            return
        at = 0
        while self._stated and at < len(values) and not self._unreadable:
            end = self._end_of_chunk(keys, values, at)
            if end > at:
                self._hash = self._hash or ChunkHash(self._record.format)
                self._hash.add_columns(keys[at:end], values[at:end])
            at = end
            if at < len(values):
                self._end_chunk()
                self._chunk += 1

    def _add_to_blocks(self, keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> None:
        try:
            blocks = [self._block_of(*each) for each in zip(keys, values, strict=True)]
        except (msgspec.MsgspecError, ValueError):
            self._unreadable = True
            return
        at = 0
        for block, same in groupby(blocks):
            end = at + sum(1 for _ in same)
            found = self._blocks.get(block)
            if found is None:
                found = self._blocks[block] = ChunkHash(self._record.format)
            found.add_columns(keys[at:end], values[at:end])
            at = end

    def _block_of(self, key: bytes | None, value: bytes | None) -> int:
        """Return the number of a record's block; raise ValueError if its seq is in none."""
        if value is not None:  # a tombstone directly follows its delete
            seq = self._seq(key, value)
            run = bisect_right(self._record.blocks, (seq, _MOST, 0)) - 1
            first, seqs, count = self._record.blocks[run]
            number = (seq - first) // max(1, seqs)
            if run < 0 or number >= count:
                raise ValueError("a seq that no transaction has")
            self._block = self._before[run] + number
        return self._block

    @property
    def _are_events(self) -> bool:
        return not self.topic.endswith(".cdc.dead")

    def _end_of_chunk(
        self, keys: Sequence[bytes | None], values: Sequence[bytes | None], at: int
    ) -> int:
        """Return the index after the current chunk's last record."""
        if self._chunk >= len(self._borders) - 1:
            return len(values)
        border = self._borders[self._chunk]

        def seq(index: int) -> int:
            while values[index] is None:  # a tombstone directly follows its delete
                if index == at:
                    return 0 if self._hash else border + 1
                index -= 1
            return self._seq(keys[index], values[index])

        try:
            return bisect_right(range(len(values)), border, lo=at, key=seq)
        except (msgspec.MsgspecError, ValueError):
            self._unreadable = True
            return len(values)

    def _seq(self, key: bytes | None, value: bytes | None) -> int:
        if self._are_events:
            return _event(value or b"").source.seq
        return int(_letter_key(key or b"").id.rpartition("-")[2])

    def _end_chunk(self) -> None:
        if self._hash is not None:
            self._digest = digests.fold(self._digest, self._hash.digest())
            self._hash = None
        for block in sorted(self._blocks):
            self._digest = digests.fold(self._digest, self._blocks[block].digest())
        self._blocks.clear()

    def finish(self) -> DigestDifference | None:
        """Return how the records differ from what the frontier states; None if they do not."""
        self._end_chunk()
        if self._counted != self._events:
            what = f"holds {self._counted} events where the frontier counts {self._events}"
        elif self._unreadable or (self._stated and digests.encoded(self._digest) != self._stated):
            what = "holds records that are not those that were written"
        else:
            return None
        return DigestDifference(self.topic, self.number, what, self._counted < self._events)


class CutCheck:
    """Takes the records between the frontiers of a cut, partition by partition, with offsets."""

    def __init__(self, records: Sequence[FrontierRecord]) -> None:
        """`records` are the cut's frontier records, in their order."""
        self._checks: dict[Partition, deque[PartitionCheck]] = {}
        for record in records:
            for at in range(len(record.partitions)):
                check = PartitionCheck(record, at)
                self._checks.setdefault(check.partition, deque()).append(check)

    def partition(self, partition: Partition) -> SpanCheck:
        """Return the check of one partition; it may be taken to another process."""
        return SpanCheck(self._checks.get(partition, deque()))

    @property
    def partitions(self) -> list[Partition]:
        return list(self._checks)


class SpanCheck:
    """Takes one partition's records between the frontiers of a cut."""

    def __init__(self, checks: deque[PartitionCheck]) -> None:
        self._checks = checks
        self._found: list[DigestDifference] = []

    def add(
        self,
        offsets: Sequence[int],
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
    ) -> None:
        """Take the next records."""
        at = 0
        while self._checks and at < len(offsets):
            end = bisect_left(offsets, self._checks[0].end, lo=at)
            self._checks[0].add(keys[at:end], values[at:end])
            at = end
            if at < len(offsets):
                self._next()

    def _next(self) -> None:
        if found := self._checks.popleft().finish():
            self._found.append(found)

    def finish(self) -> list[DigestDifference]:
        """Return how the records differ from what the frontiers state."""
        while self._checks:
            self._next()
        return self._found
