"""Which frontier is due, and which events no frontier record covers yet.

Pure. A partition's end offset is known only when its batch has been acknowledged, so a frontier
record is written with the next one. Events whose frontier is not in the log yet are `pending`, and
counted in the resume record, so that a crash in between loses no count: the next frontier covers
them. An end that the broker did not report delays the frontier, never falsifies it.

Digests are folded batch by batch (`cdc.log.digests`), and what is pending of them is in the resume
record too. A batch whose commit fails ends its session, and the next one continues from the resume
record: so an aborted batch is in no digest.

Records acknowledged one after another are in the partition in that order. So an end that is lower
than the sum of what was acknowledged shows that records were lost, however much was written since.

Records of the schema topic have no seq, and others than the daemon may write some. So a frontier
states key and digest of each one that the daemon has written since the one before. After a start it
also states the column numbers that it found there; and the first time, all that is there. A version
that another has written is never stated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import InvariantError
from cdc.log import digests, names, records
from cdc.log.records import BLAKE3_FORMAT, SHA256_FORMAT, FrontierRecord, ResumePosition

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.partitions import Partition
    from cdc.log.reader import SchemaTopic


class Pending(NamedTuple):
    """What no frontier record covers yet, as fields of the resume record."""

    pending: tuple[tuple[str, int, int], ...]
    chunks: tuple[int, ...]
    digests: tuple[str, ...] | None
    chain: str
    schemas: tuple[tuple[str, str], ...]
    schemas_end: int


class FrontierCounts:
    """The count and the end of every partition that moved since the last frontier record."""

    def __init__(
        self, pipeline: str, epoch: int, resume: ResumePosition, ends: dict[Partition, int]
    ) -> None:
        """Start at `resume`; `ends` are the ends of its pending partitions."""
        self._pipeline = pipeline
        self._epoch = epoch
        self._acknowledged = resume
        self._pending = {(topic, number): events for topic, number, events in resume.pending}
        # None if they are not known of all that is pending: an older version wrote some of it, and
        # hashed it in another way, or not at all.
        self._digests: dict[Partition, bytes] | None = None
        if not resume.pending:
            self._digests = {}
        elif resume.digests is not None and resume.format > SHA256_FORMAT:
            known = map(digests.decoded, resume.digests)
            self._digests = dict(zip(self._pending, known, strict=True))
        self._chunks = list(resume.chunks)
        self._chain = resume.chain
        self._schemas = dict.fromkeys(resume.schemas)
        self._schemas_end = resume.schemas_end
        self._states_all = resume.format <= BLAKE3_FORMAT  # an older version has stated nothing
        self._seq = resume.seq  # of the newest batch
        self.ends = dict(ends)  # of every partition so far; -1 if a broker did not report it
        # Of partitions that have lost records: where one ended, and the lowest valid end.
        self.regressed: dict[Partition, tuple[int, int]] = {}
        self._covered: dict[Partition, int] = {}  # ends in the newest frontier records
        self._unreported = {partition for partition in self._pending if self._end(partition) < 0}

    @property
    def due(self) -> bool:
        """Whether the log ends on a source-transaction boundary that has no frontier record."""
        return bool(self._pending) and self._at_boundary()

    def take(self, lsn: LSN | None = None) -> FrontierRecord | None:
        """Return the frontier record to write now, if one is due, and stop counting what it covers.

        `lsn`, if given, is a position up to which the WAL holds nothing for us since the boundary:
        the frontier advances to it, even if nothing is pending.
        """
        if not (self.due or (lsn is not None and self._at_boundary())):
            return None
        pending, self._pending = self._pending, {}
        hashed, self._digests = self._digests, {}
        chunks, self._chunks = self._chunks, []
        schemas, self._schemas = self._schemas, {}
        for partition, events in pending.items():
            self._expect_at_least(
                partition, self.ends[partition], self._covered.get(partition, 0) + events
            )
            self._covered[partition] = self.ends[partition]
        record = FrontierRecord(
            pipeline=self._pipeline,
            epoch=self._epoch,
            lsn=lsn or self._acknowledged.end_lsn,
            seq=self._acknowledged.seq,
            committed_at_us=self._acknowledged.committed_at_us,
            partitions=tuple(
                (*partition, self.ends[partition], events)
                for partition, events in sorted(pending.items())
            ),
            chunks=tuple(chunks) if hashed is not None else (),
            digests=_in_order(pending, hashed),
            schemas=tuple(schemas),
        )
        record = digests.sealed(record, self._chain)
        self._chain = record.chain
        return record

    def add(
        self, events: dict[Partition, int], chunks: dict[Partition, bytes], seq: int
    ) -> Pending:
        """Count a batch's events; return what is pending, for the resume record of that batch.

        `chunks` are the digests of what the batch has for each partition, `seq` is its newest.
        """
        assert events.keys() == chunks.keys(), "each partition of a batch has a digest"
        for partition, count in events.items():
            self._pending[partition] = self._pending.get(partition, 0) + count
            if self._end(partition) < 0:
                self._unreported.add(partition)
        if self._digests is not None:
            for partition, chunk in chunks.items():
                before = self._digests.get(partition, digests.START)
                self._digests[partition] = digests.fold(before, chunk)
        if events:
            self._chunks.append(seq - self._seq)
        self._seq = seq
        return Pending(
            tuple((*partition, count) for partition, count in sorted(self._pending.items())),
            tuple(self._chunks),
            _in_order(self._pending, self._digests),
            self._chain,
            tuple(self._schemas),
            self._schemas_end,
        )

    def state(self, key: bytes, value: bytes | None) -> None:
        """Note a record of the schema topic, which the next frontier is to state."""
        self._schemas[digests.stated(key, value)] = None

    def state_found(self, found: SchemaTopic) -> None:
        """Note the records that the schema topic has from the resume record's `schemas_end` on."""
        for key, value in found.since(self._schemas_end):
            if self._states_all or records.is_numbers_key(key):
                self.state(key, value)
        self._schemas_end = found.end

    def acknowledged(self, position: ResumePosition, ends: dict[Partition, int]) -> None:
        """Note that the log holds `position`'s batch, whose commit comes before any later one's.

        `ends` are the ends of the partitions that it touched.
        """
        self._acknowledged = position
        for partition, end in ends.items():
            self._expect_at_least(partition, end, self._end(partition) + 1)
            if end >= 0:
                self._unreported.discard(partition)
            elif partition in self._pending:
                self._unreported.add(partition)
        self.ends.update(ends)

    def _expect_at_least(self, partition: Partition, end: int, least: int) -> None:
        if 0 <= end < least:
            self.regressed.setdefault(partition, (end, least))

    def _end(self, partition: Partition) -> int:
        return self.ends.get(partition, -1)

    def _at_boundary(self) -> bool:
        return not self._unreported and not self._acknowledged.open


def _in_order(
    partitions: dict[Partition, int], hashed: dict[Partition, bytes] | None
) -> tuple[str, ...] | None:
    """Return the partitions' digests as a record has them; None if they are not known."""
    if hashed is None:
        return None
    return tuple(digests.encoded(hashed[each]) for each in sorted(partitions))


def record(config: Config, frontier: FrontierRecord) -> tuple[str, bytes, bytes]:
    """Return topic, key and value of a frontier record; raise InvariantError if it is invalid."""
    numbers = [frontier.epoch, frontier.lsn, frontier.seq, frontier.holes]
    numbers += [n for _, *its in frontier.partitions for n in its]
    if min(numbers) < 0:
        raise InvariantError(
            f"a frontier record with a negative number: seq {frontier.seq}, holes"
            f" {frontier.holes}, partitions {frontier.partitions}"
        )
    key = records.frontier_key(config.pipeline)
    return names.frontier_topic(config.prefix), key, records.encode(frontier)
