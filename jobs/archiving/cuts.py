"""Write single cuts of the log to files of the archive, and commit them in their order.

A cut is started, then archived. `start` reads its frontiers, and lets executors begin with a large
one; `archive` reads the rest, waits for them, and commits. So executors have work while this
process plans, commits and reports, and while the last task of the cut before runs: the next cut
may be started before that one is archived. No commit names what a started cut has written until
its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc import failpoints
from cdc.errors import CompactedError, GapError
from cdc.log import compaction, names, records
from cdc.log.partitions import OffsetRange
from cdc.operate.followers import NEW_ARCHIVE
from cdc.verify.digests import CutCheck, DigestDifference, FrontierChain
from lockstep.jobs.archiving import layout
from lockstep.jobs.archiving.layout import ArchivePosition, CutRecord, CutSpan
from lockstep.jobs.archiving.rows import CutRows, of_cut_record
from lockstep.jobs.archiving.writing import ArchiveWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.log.follower_reports import TableCommit
    from cdc.log.partitions import Partition
    from cdc.log.ranges import RangeReader, RecordColumns
    from cdc.log.records import FrontierRecord
    from cdc.verify.digests import SpanCheck
    from lockstep.jobs.archiving.table import ArchiveTable
    from lockstep.jobs.archiving.tasks import CutTasks
    from lockstep.jobs.cuts.cutting import Cut
    from lockstep.sinks.contract import Applied
    from lockstep.sinks.delta.actions import Action

# A cut with more events is read and written by executors.
LARGE_EVENTS: Final = 50_000


class CutEnd(NamedTuple):
    """Where a cut ends and the next one starts."""

    number: int  # of the cut, from 1; 0 at the log's beginning
    applied: Applied
    chain: str  # of its frontier; empty if that has none


class StartedCut(NamedTuple):
    """A cut of which executors may be writing a part."""

    cut: Cut
    end: CutEnd
    frontiers: list[RecordColumns]  # the records of its frontiers
    here: dict[Partition, OffsetRange]  # what this process reads and writes
    in_tasks: dict[Partition, OffsetRange]  # what executors do
    checks: Mapping[Partition, SpanCheck]
    tasks: CutTasks | None


class Cuts:
    """Archives cuts, each once; `close` ends what executors still do."""

    def __init__(
        self,
        config: Config,
        archive: ArchiveTable,
        reader: RangeReader,
        spark: Callable[[], SparkSession] | None,
    ) -> None:
        """`spark` returns the session for large cuts; without it this process takes them."""
        self._config, self._archive, self._reader, self._spark = config, archive, reader, spark
        self._own = (names.frontier_topic(config.prefix), 0), (names.schema_topic(config.prefix), 0)
        self._tasks: list[CutTasks] = []

    def close(self) -> None:
        for each in self._tasks:
            each.stop()

    def start(self, cut: Cut, before: CutEnd) -> StartedCut:
        """Read a cut's frontiers, and let executors begin if it is large.

        Raises GapError if the frontiers do not continue those before.
        """
        ranges = self._ranges(cut, before.applied)
        frontier = self._own[0]
        read = [each for _, each in self._reader.columns({frontier: ranges[frontier]})]
        frontiers = self._frontiers(cut, read)
        chain = self._expect_chain(cut, frontiers, before.chain)
        end = CutEnd(before.number + 1, _moved(before.applied, cut, ranges), chain)
        events = {part[:2]: part.events for part in cut.parts} if self._is_large(cut) else {}
        here = {place: each for place, each in ranges.items() if place not in events}
        in_tasks = {place: ranges[place] for place in events}
        check = CutCheck(frontiers)
        checks = {place: check.partition(place) for place in ranges}
        tasks = self._start_tasks(end.number, in_tasks, events, checks) if events else None
        return StartedCut(cut, end, read, here, in_tasks, checks, tasks)

    def archive(
        self, started: StartedCut, position: ArchivePosition
    ) -> tuple[ArchivePosition, set[str]]:
        """Write and commit a cut; return the position after it, and the tables it has events of.

        Raises GapError if its records are not those that the frontiers state.
        """
        assert started.cut.above == position.applied.seq, "a cut starts where the last one ended"
        writer = ArchiveWriter(self._archive.files)
        spans = self._write_here(started, writer)
        more, actions = self._written_in_tasks(started)
        spans = sorted(spans + more)
        record = self._record(started, position, tuple(spans))
        value = layout.encode(record)
        after = ArchivePosition(started.end.applied, record, layout.digest(value), position.audits)
        writer.add(of_cut_record(self._config.prefix, record))
        actions += writer.finish()
        failpoints.reach("archive_written")
        self._archive.commit(actions, after, "WRITE")
        own = f"{self._config.prefix}.cdc."
        tables = {s.topic for s in spans if s.events and not s.topic.startswith(own)}
        return after, {names.table_name(self._config.prefix, topic) for topic in tables}

    def newest_commit(self) -> TableCommit:
        """Return the newest commit of the archive."""
        return self._archive.newest_commit()

    def _is_large(self, cut: Cut) -> bool:
        return self._spark is not None and cut.events > LARGE_EVENTS

    def _ranges(self, cut: Cut, applied: Applied) -> dict[Partition, OffsetRange]:
        """Return what to read: the cut's parts, its frontier records, new table versions."""
        ends = applied.end_of
        ranges = {
            (part.topic, part.partition): OffsetRange(part.start, part.end) for part in cut.parts
        }
        frontier, schema = self._own
        ranges[frontier] = OffsetRange(applied.place, cut.place)
        end = self._reader.look_up([schema])[schema].end
        start = ends.get(schema, 0)
        if end > start:
            ranges[schema] = OffsetRange(start, end)
        return ranges

    def _frontiers(self, cut: Cut, read: Sequence[RecordColumns]) -> list[FrontierRecord]:
        topic = self._own[0][0]
        found = [
            records.decode(records.FrontierRecord, value or b"", topic)
            for each in read
            for value in each.values
        ]
        mine = [each for each in found if each.pipeline == self._config.pipeline]
        if not mine or mine[-1].seq != cut.seq:
            raise GapError(
                f"{topic} lacks the frontier of seq {cut.seq} up to offset {cut.place - 1}",
                hint="the topic was emptied or created again",
            )
        return mine

    @staticmethod
    def _expect_chain(cut: Cut, frontiers: list[FrontierRecord], before: str) -> str:
        """Return the chain at the cut's end; `before` is that of the frontier at its start."""
        chain = FrontierChain(before, cut.above)
        for record in frontiers:
            for found in chain.add(record):
                raise GapError(
                    f"the frontier {record.lsn} (seq {record.seq}) {found.what}",
                    hint="the log was altered, or is another one than was archived; nothing of it"
                    " was written",
                )
        return chain.chain

    def _start_tasks(
        self,
        number: int,
        ranges: Mapping[Partition, OffsetRange],
        events: Mapping[Partition, int],
        checks: Mapping[Partition, SpanCheck],
    ) -> CutTasks:
        from lockstep.jobs.archiving.tasks import CutTasks  # noqa: PLC0415 - of the extra `spark`

        assert self._spark is not None
        left = {
            place: (self._reader.remaining(place, wanted), events[place])
            for place, wanted in ranges.items()
        }
        self._tasks = [each for each in self._tasks if not each.has_ended]
        before = self._tasks[-1] if self._tasks else None
        started = CutTasks(self._spark(), self._config, number, left, checks, before)
        self._tasks.append(started)
        return started

    def _write_here(self, started: StartedCut, writer: ArchiveWriter) -> list[CutSpan]:
        """Read what executors do not, and write all of it to files in this process."""
        here, number = started.here, started.end.number
        rows = {place: CutRows(self._config.prefix, number, *place) for place in here}

        def add(place: Partition, read: RecordColumns) -> None:
            started.checks[place].add(*read)
            writer.add(rows[place].add(*read))

        frontier = self._own[0]
        for read in started.frontiers:
            add(frontier, read)
        others = {place: each for place, each in here.items() if place != frontier}
        for place, read in self._reader.columns(others):
            add(place, read)
        spans = []
        for place, wanted in here.items():
            self._expect_same(started.cut, place, wanted, started.checks[place].finish())
            its = rows[place]
            root = its.tree.root().hex()
            spans.append(CutSpan(*place, *wanted, its.events, its.tree.count, root))
        return spans

    def _written_in_tasks(self, started: StartedCut) -> tuple[list[CutSpan], list[Action]]:
        """Return what executors have written, once they have."""
        spans: list[CutSpan] = []
        actions: list[Action] = []
        for result in started.tasks.results() if started.tasks is not None else []:
            actions += result.actions
            for part in result.parts:
                wanted = started.in_tasks[part.place]
                self._expect_same(started.cut, part.place, wanted, part.differences)
                spans.append(CutSpan(*part.place, *wanted, part.events, part.records, part.root))
        return spans, actions

    def _expect_same(
        self, cut: Cut, place: Partition, wanted: OffsetRange, found: list[DigestDifference]
    ) -> None:
        """Raise GapError if a partition is not what the frontiers state."""
        for difference in found:
            self._reader.expect_complete(place, wanted)
            what = (
                f"{difference.what}, between offsets {wanted.start} and {wanted.end - 1}, seq"
                f" {cut.above + 1} to {cut.seq}"
            )
            compacted = compaction.explained(self._config, place, what)
            if compacted is not None and difference.is_short:
                hint = f"the archive needs every event: to have one again, {NEW_ARCHIVE}"
                raise CompactedError(compacted.what, hint=hint)
            raise GapError(
                f"{place[0]} [{place[1]}] {what}",
                hint="records of the topic were lost or altered; nothing of the cut was written",
            )

    def _record(
        self, started: StartedCut, position: ArchivePosition, spans: tuple[CutSpan, ...]
    ) -> CutRecord:
        cut, end = started.cut, started.end
        return CutRecord(
            pipeline=self._config.pipeline,
            number=end.number,
            above=cut.above,
            epoch=cut.epoch,
            lsn=str(cut.lsn),
            seq=cut.seq,
            committed_at_us=cut.committed_at_us,
            place=cut.place,
            chain=end.chain,
            spans=spans,
            root=layout.root(spans),
            previous=position.digest,
            archived_at_us=time.time_ns() // 1_000,
            audits=position.audits.number,
            audit=position.audits.digest,
        )


def end_of(position: ArchivePosition) -> CutEnd:
    """Return where the archive's newest cut ends."""
    newest = position.newest
    if newest is None:
        return CutEnd(0, position.applied, "")
    return CutEnd(newest.number, position.applied, newest.chain)


def _moved(applied: Applied, cut: Cut, ranges: Mapping[Partition, OffsetRange]) -> Applied:
    """Return the frontier at the cut's end."""
    ends = {topic: list(each) for topic, each in applied.ends.items()}
    for (topic, number), wanted in ranges.items():
        known = ends.setdefault(topic, [])
        known.extend([0] * (number + 1 - len(known)))
        known[number] = wanted.end
    return applied._replace(
        epoch=cut.epoch,
        lsn=cut.lsn,
        seq=cut.seq,
        committed_at_us=cut.committed_at_us,
        place=cut.place,
        ends={topic: tuple(each) for topic, each in ends.items()},
    )
