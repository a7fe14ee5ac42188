"""Compare what the topics hold with the digests of the frontier records.

Reads the frontier topic from its beginning, and between each two frontiers the records of every
partition. What retention or compaction has deleted can't be compared: it is only named. At the end
the schema topic's records are compared with those that frontiers state.
"""

from __future__ import annotations

import time
from contextlib import closing
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import CDCError, GapError, UnreadableError
from cdc.events import LSN
from cdc.log import compaction, digests, names, reader, records, topics
from cdc.log.client import SOUND_COPY
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from cdc.log.records import BLAKE3_FORMAT
from cdc.verify.digests import CutCheck, FrontierChain
from cdc.verify.noted import NotedChain, NotedCheck
from cdc.verify.schemas import SchemaCheck

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.records import FrontierRecord, ResumeIdentity, ResumePosition
    from cdc.verify.digests import SpanCheck

# How many events are read at a time, unless one frontier counts more.
_MOST_EVENTS: Final = 200_000
_MOST_FRONTIERS: Final = 1_000
# Sentences kept.
MOST_FINDINGS: Final = 100


class TopicsProof(NamedTuple):
    """What was found; the topics are unaltered if there are no findings."""

    seq_from: int | None  # the first seq that was compared with digests; None: none was
    seq: int  # of the last frontier
    lsn: LSN | None
    chain: str
    events: int
    undigested: int  # events whose frontiers have no digests
    findings: tuple[str, ...]
    compacted: tuple[str, ...]  # ranges that lack events because Kafka compacts their topic
    anchored: bool  # whether a frontier has the chain that was looked for
    above: int | None  # the seq after which the log's frontiers begin; None: it has none
    noted: int  # chains noted elsewhere that it has


class KnownChains(NamedTuple):
    """What is known of the chain: by LSN and seq of some frontiers, one to look for, some noted."""

    chains: Mapping[tuple[LSN, int], str] = MappingProxyType({})
    anchor: str | None = None
    noted: Sequence[NotedChain] = ()


def prove(config: Config, upto: LSN | None = None, known: KnownChains | None = None) -> TopicsProof:
    """Read and compare everything up to an LSN, or to the newest frontier."""
    schemas = names.schema_topic(config.prefix), 0
    with closing(RangeReader(config)) as ranges:
        # Read in this order: what an earlier answer has, a later one states.
        there = ranges.confirmed_if_exists(schemas) or OffsetRange(0, 0)
        resume = reader.read_resume(config)
        return _Proving(config, ranges, upto, known or KnownChains(), resume, there).run()


class _Proving:
    def __init__(
        self,
        config: Config,
        reader: RangeReader,
        upto: LSN | None,
        known: KnownChains,
        resume: tuple[ResumeIdentity, ResumePosition] | None,
        schemas: OffsetRange,
    ) -> None:
        self._identity = resume[0] if resume else None
        self._resume = resume[1] if resume else None
        self._schemas_held = schemas
        self._schemas = SchemaCheck(names.schema_topic(config.prefix))
        self._config, self._reader, self._upto, self._known = config, reader, upto, known
        self._noted = NotedCheck(known.noted)
        self._topic = names.frontier_topic(config.prefix)
        self._ends: dict[Partition, int] = {}
        self._chain = FrontierChain()
        self._findings: list[str] = []
        self._compacted: list[str] = []
        self._is_compacted: dict[str, bool] = {}
        self._published_ms = 0  # the last frontier
        self._from: int | None = None
        self._last: FrontierRecord | None = None
        self._events = self._undigested = 0
        self._anchored = False
        self._above: int | None = None
        self._has_newest = False  # whether a frontier has the chain that the resume record states

    def run(self) -> TopicsProof:
        batch: list[FrontierRecord] = []
        events = 0
        for record in self._frontiers():
            batch.append(record)
            events += sum(count for *_, count in record.partitions)
            if events >= _MOST_EVENTS or len(batch) >= _MOST_FRONTIERS:
                self._compare(batch)
                batch, events = [], 0
        self._compare(batch)
        self._expect_end()
        self._compare_schemas()
        last = self._last
        self._findings += self._noted.finish(
            above=self._above or 0,
            end=NotedChain(last.seq if last else 0, last.lsn if last else LSN(0), ""),
            upto=self._upto,
            after_end="newer frontiers are missing",
        )
        return TopicsProof(
            self._from,
            last.seq if last else 0,
            last.lsn if last else None,
            self._chain.chain,
            self._events,
            self._undigested,
            tuple(self._findings[:MOST_FINDINGS]),
            tuple(self._compacted[:MOST_FINDINGS]),
            self._anchored,
            self._above,
            self._noted.found,
        )

    def _frontiers(self) -> Iterator[FrontierRecord]:
        """Yield the frontier records, each after its place in the chain was checked."""
        for offset, published_ms, key, value in self._messages():
            at = f"{self._topic} [0] offset {offset}"
            try:
                record = records.decode(records.FrontierRecord, value, self._topic)
            except CDCError:
                self._findings.append(f"{at}: a frontier record that can't be read")
                continue
            if record.pipeline != self._config.pipeline:
                if record.chain and digests.chain(record) != record.chain:
                    self._findings.append(f"{at}: does not match its own chain: it was altered")
                continue
            if self._upto is not None and record.lsn > self._upto:
                return
            if key != records.frontier_key(record.pipeline):
                self._findings.append(f"{at}: the frontier {record.lsn} has another key")
            if self._above is None:
                self._above = record.above
            self._findings += [
                f"{at}: the frontier {record.lsn} (seq {record.seq}) {each.what}"
                for each in self._chain.add(record)
            ]
            self._last, self._published_ms = record, published_ms
            self._compare_chain(record)
            self._noted.add(record)
            self._schemas.state(record.schemas, f"the frontier {record.lsn} (seq {record.seq})")
            yield record

    def _messages(self) -> Iterator[tuple[int, int, bytes | None, bytes]]:
        """Yield offset, time, key and value of each frontier record, up to an unreadable one."""
        place = (self._topic, 0)
        with closing(RangeReader(self._config)) as own:
            try:
                for _, messages in own.pieces(own.confirmed([place])):
                    for each in messages:
                        at_ms, value = each.timestamp()[1], each.value() or b""
                        yield each.offset() or 0, at_ms, each.key(), value
            except UnreadableError as error:
                self._findings.append(self._cut_off(self._topic, error))

    @staticmethod
    def _cut_off(topic: str, error: UnreadableError) -> str:
        return f"{topic} [0] can't be read to its end: {error.what}; {SOUND_COPY}"

    def _expect_end(self) -> None:
        """Check that the newest frontier is not older than the one that the resume record states.

        Of a newer one it may be that retention has deleted those before.
        """
        resume, last = self._resume, self._last
        if resume is None or last is None or self._upto is not None or self._has_newest:
            return
        stated = resume.seq - sum(resume.chunks)
        if resume.chain and last.seq <= stated:
            self._findings.append(
                f"{self._topic} ends with the frontier {last.lsn} (seq {last.seq}): a newer one, of"
                f" seq {stated}, which the resume record states, is missing or was altered"
            )

    def _compare_schemas(self) -> None:
        """Compare the schema topic with what the frontiers have stated, and will state next.

        Of a log that an older version has written, or whose first frontiers retention has deleted,
        not every record is stated.
        """
        resume, all_stated = self._resume, False
        if resume is not None and self._upto is None:
            self._schemas.state(resume.schemas, "the resume record")
            is_new = resume.format > BLAKE3_FORMAT and self._above == 0
            all_stated = is_new and self._identity is not None and self._identity.snapshot != "due"
        held, topic = self._schemas_held, names.schema_topic(self._config.prefix)
        try:
            for _, messages in self._reader.pieces({(topic, 0): held}):
                for each in messages:
                    self._schemas.add(each.offset() or 0, each.key(), each.value())
        except UnreadableError as error:
            self._findings.append(self._cut_off(topic, error))
            return
        self._findings += self._schemas.finish(all_stated=all_stated)

    def _compare_chain(self, record: FrontierRecord) -> None:
        self._anchored |= record.chain == self._known.anchor
        self._has_newest |= self._resume is not None and record.chain == self._resume.chain
        expected = self._known.chains.get((record.lsn, record.seq), record.chain)
        if expected != record.chain:
            at = f"the frontier {record.lsn} (seq {record.seq})"
            self._findings.append(f"{at} has another chain than in the archive")

    def _compare(self, batch: list[FrontierRecord]) -> None:
        """Compare the records between the frontier before the batch and its last one."""
        if batch and not self._ends and batch[0].above:
            # Where its records begin is in a frontier that retention has deleted.
            self._move(batch.pop(0))
        if not batch:
            return
        above = batch[0].above
        seqs = f"seq {above + 1} to {batch[-1].seq}"
        ranges = self._ranges(batch)
        try:
            left = {each: self._reader.remaining(each, wanted) for each, wanted in ranges.items()}
        except GapError as error:
            self._findings.append(f"{seqs}: {error.what}")
            return
        kept = {each: wanted for each, wanted in ranges.items() if left[each] == wanted}
        is_complete = self._read(batch, kept, seqs)
        if not is_complete:
            self._from = None
        elif kept == ranges and self._from is None:
            self._from = above + 1
        for record in batch:
            events = sum(n for *_, n in record.partitions)
            self._events += events
            self._undigested += events if record.digests is None else 0

    def _ranges(self, batch: list[FrontierRecord]) -> dict[Partition, OffsetRange]:
        """Return the offsets that frontiers cover, and move past them."""
        ranges: dict[Partition, OffsetRange] = {}
        for record in batch:
            for topic, number, end, _ in record.partitions:
                place = (topic, number)
                first = ranges.get(place, OffsetRange(self._ends.get(place, 0), end)).start
                ranges[place] = OffsetRange(first, end)
            self._move(record)
        return ranges

    def _read(
        self, batch: list[FrontierRecord], ranges: dict[Partition, OffsetRange], seqs: str
    ) -> bool:
        """Compare the records in the ranges; return whether all of them could be compared."""
        before = len(self._compacted)
        checks = self._fed(batch, ranges, seqs)
        for partition, each in checks.items():
            start, end = ranges[partition]
            for found in each.finish():
                place = f"{found.topic} [{found.partition}] offsets {start} to {end - 1}"
                compacted = found.is_short and self._may_be_compacted(found.topic)
                to = self._compacted if compacted else self._findings
                to.append(f"{place} ({seqs}) {found.what}")
        return len(self._compacted) == before and len(checks) == len(ranges)

    def _fed(
        self, batch: list[FrontierRecord], ranges: dict[Partition, OffsetRange], seqs: str
    ) -> dict[Partition, SpanCheck]:
        """Return the checks of partitions with their records, but of those that can't be read."""
        try:
            return self._feed(batch, ranges)
        except UnreadableError:
            checks: dict[Partition, SpanCheck] = {}
        for (topic, number), (start, end) in ranges.items():
            try:
                checks |= self._feed(batch, {(topic, number): OffsetRange(start, end)})
            except UnreadableError as error:
                place = f"{topic} [{number}] offsets {start} to {end - 1} ({seqs})"
                self._findings.append(f"{place} can't be read: {error.what}; {SOUND_COPY}")
        return checks

    def _feed(
        self, batch: list[FrontierRecord], ranges: dict[Partition, OffsetRange]
    ) -> dict[Partition, SpanCheck]:
        check = CutCheck(batch)
        checks = {each: check.partition(each) for each in ranges}
        # The check of an initial snapshot's rows needs memory for each partition that is read.
        alone = any(record.blocks for record in batch)
        for some in [{each: ranges[each]} for each in ranges] if alone else [ranges]:
            for partition, read in self._reader.columns(some):
                checks[partition].add(*read)
        return checks

    def _may_be_compacted(self, topic: str) -> bool:
        """Whether Kafka compacts the topic, and the newest frontier is older than the lag."""
        if topic not in self._is_compacted:
            self._is_compacted[topic] = compaction.is_compacted(self._config, topic)
        old = time.time() * 1_000 - self._published_ms >= topics.lag_ms(self._config)
        return self._is_compacted[topic] and old

    def _move(self, record: FrontierRecord) -> None:
        for topic, number, end, _ in record.partitions:
            self._ends[topic, number] = end
