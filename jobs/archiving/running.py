"""The archive's session: cut after cut of the log into its table. Read this first.

A cut is what lies between two frontiers, of all topics. Its records are read, compared with the
frontiers' counts and digests, and written to files, in this process or, of a large cut, in
executors. One commit names the files of the cut, with the position up to which the archive then
holds the log. The position is nowhere else: so a cut is in the archive completely and once,
wherever the job is killed and however often it runs.

A conflict with another copy's commit ends the session, as any error does; the next one starts from
the table.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from cdc import failpoints
from cdc.errors import CDCError, CompactedError, ConfigError, GapError
from cdc.log import compaction, names, records
from cdc.log.frontier_tail import FrontierTail
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from cdc.operate.followers import NEW_ARCHIVE
from cdc.verify.digests import CutCheck, DigestDifference, FrontierChain
from lockstep.jobs.archiving import layout
from lockstep.jobs.archiving.layout import ArchivePosition, CutRecord, CutSpan
from lockstep.jobs.archiving.rows import CutRows, of_cut_record
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.jobs.archiving.upkeep import ArchiveUpkeep
from lockstep.jobs.archiving.writing import ArchiveWriter
from lockstep.jobs.cuts.cutting import Cutter, Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.follower_reports import TableCommit
    from cdc.log.partitions import Partition
    from cdc.log.records import FrontierRecord
    from lockstep.jobs.apply.running import FollowerRun
    from lockstep.jobs.cuts.cutting import Cut
    from lockstep.sinks.contract import Applied
    from lockstep.sinks.delta.actions import Action

# A cut with more events is read and written by executors.
LARGE_EVENTS: Final = 50_000
_POLL_SECONDS: Final = 0.25
# How often an idle log's frontier is committed without records.
_IDLE_SECONDS: Final = 60.0


class Archiving:
    """Archives the log until asked to stop; called once a session by its `FollowerRun`."""

    def __init__(
        self, config: Config, spark: Callable[[], SparkSession] | None, until: LSN | None = None
    ) -> None:
        """`spark` returns the session for large cuts; without it this process takes them."""
        self._config, self._spark, self._until = config, spark, until

    def __call__(self, run: FollowerRun) -> None:
        config = self._config
        archive = opened(config)
        position = archive.open()
        run.opened_at(position.applied)
        run.commit = archive.newest_commit()
        failpoints.reach("archive_opened")
        upkeep = ArchiveUpkeep(archive, config.archive)
        with closing(RangeReader(config)) as reader:
            cuts = Cuts(config, archive, reader, self._spark)
            with closing(_Tail(config, position.applied, self._until)) as tail:
                self._follow(run, cuts, tail, position, upkeep)

    def _follow(
        self,
        run: FollowerRun,
        cuts: Cuts,
        tail: _Tail,
        position: ArchivePosition,
        upkeep: ArchiveUpkeep,
    ) -> None:
        while not run.stopping.is_set() and not self._reached(position.applied):
            cut = tail.next(_POLL_SECONDS)
            if cut is None:
                run.polled()
                continue
            began = time.monotonic()
            failpoints.reach("archive_cut")
            position, topics = cuts.archive(cut, position)
            failpoints.reach("archive_committed")
            tail.committed()
            assert position.newest is not None
            seconds = time.monotonic() - began
            run.commit = cuts.newest_commit()
            run.has_applied(position.applied, position.newest.events, topics, seconds, None)
            if upkeep.tick(position):
                run.commit = cuts.newest_commit()

    def _reached(self, applied: Applied) -> bool:
        return self._until is not None and applied.lsn >= self._until


def with_remedy(error: CDCError) -> CDCError:
    """Return a gap with how there is an archive again; return any other error unchanged."""
    if not isinstance(error, GapError) or NEW_ARCHIVE in error.hint:
        return error
    hint = f"{error.hint}. If the log can't be restored: {NEW_ARCHIVE}"
    return type(error)(error.what, hint=hint)


def opened(config: Config) -> ArchiveTable:
    """Return the configured archive; raise ConfigError if there is none."""
    if config.archive.path is None:
        raise ConfigError(
            "no archive is configured", hint="set archive.path to where its table shall be"
        )
    return ArchiveTable(config.archive.path, config.archive.storage, config.pipeline)


class _Tail:
    """The cuts after a position, as frontiers arrive, at most one in `archive.every_seconds`."""

    def __init__(self, config: Config, applied: Applied, until: LSN | None) -> None:
        ours = config.archive
        limits = Limits(ours.max_events, ours.max_bytes)
        self._cutter = Cutter(applied, lambda _: True, limits, through=until)
        self._tail = FrontierTail(config, applied.place, applied.seq)
        self._seconds, self._until = ours.every_seconds, until
        self._committed_at = 0.0
        self._newest, self._newest_seq = applied.lsn, applied.seq
        self._seq = applied.seq

    def close(self) -> None:
        self._tail.close()

    def committed(self) -> None:
        """Note that a cut was committed."""
        self._committed_at = time.monotonic()

    def next(self, seconds: float) -> Cut | None:
        """Return the next cut; None if none is due within these seconds. Raises GapError."""
        cutter = self._cutter
        if not cutter.has_enough:
            for record, offset in self._tail.arrivals(seconds):
                cutter.add(record, offset)
                self._newest, self._newest_seq = record.lsn, record.seq
        elapsed = time.monotonic() - self._committed_at
        idle = self._newest_seq == self._seq
        is_last = self._until is not None and self._newest >= self._until
        due = cutter.has_enough or is_last or elapsed >= (_IDLE_SECONDS if idle else self._seconds)
        cut = cutter.take(time.monotonic()) if due else None
        if cut is not None:
            self._seq = cut.seq
        return cut


class Cuts:
    """Archives single cuts."""

    def __init__(
        self,
        config: Config,
        archive: ArchiveTable,
        reader: RangeReader,
        spark: Callable[[], SparkSession] | None,
    ) -> None:
        self._config, self._archive, self._reader, self._spark = config, archive, reader, spark
        self._own = (names.frontier_topic(config.prefix), 0), (names.schema_topic(config.prefix), 0)

    def archive(self, cut: Cut, position: ArchivePosition) -> tuple[ArchivePosition, set[str]]:
        """Write and commit a cut; return the position after it, and the tables it has events of."""
        number = position.newest.number + 1 if position.newest else 1
        ranges = self._ranges(cut, position.applied)
        frontiers = self._frontiers(cut, ranges[self._own[0]])
        chain = self._expect_chain(cut, frontiers, position)
        check = CutCheck(frontiers)
        large = {part[:2] for part in cut.parts} if cut.events > LARGE_EVENTS else set()
        if self._spark is None:
            large = set()
        small = {place: each for place, each in ranges.items() if place not in large}
        writer = ArchiveWriter(self._archive.files)
        spans = self._write_here(cut, number, small, check, writer)
        actions: list[Action] = []
        if large:
            theirs = {place: ranges[place] for place in large}
            more, actions = self._write_in_tasks(cut, number, theirs, check)
            spans += more
        spans.sort()
        record = self._record(cut, number, position, tuple(spans), chain)
        value = layout.encode(record)
        applied = _moved(position.applied, cut, ranges)
        after = ArchivePosition(applied, record, layout.digest(value), position.audits)
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

    def _frontiers(self, cut: Cut, wanted: OffsetRange) -> list[FrontierRecord]:
        topic = self._own[0][0]
        found = [
            records.decode(records.FrontierRecord, message.value() or b"", topic)
            for _, messages in self._reader.pieces({self._own[0]: wanted})
            for message in messages
        ]
        mine = [each for each in found if each.pipeline == self._config.pipeline]
        if not mine or mine[-1].seq != cut.seq:
            raise GapError(
                f"{topic} lacks the frontier of seq {cut.seq} up to offset {cut.place - 1}",
                hint="the topic was emptied or created again",
            )
        return mine

    def _expect_chain(
        self, cut: Cut, frontiers: list[FrontierRecord], position: ArchivePosition
    ) -> str:
        newest = position.newest
        chain = FrontierChain(newest.chain if newest else "", cut.above)
        for record in frontiers:
            for found in chain.add(record):
                raise GapError(
                    f"the frontier {record.lsn} (seq {record.seq}) {found.what}",
                    hint="the log was altered, or is another one than was archived; nothing of it"
                    " was written",
                )
        return chain.chain

    def _write_here(
        self,
        cut: Cut,
        number: int,
        ranges: dict[Partition, OffsetRange],
        check: CutCheck,
        writer: ArchiveWriter,
    ) -> list[CutSpan]:
        """Read the ranges and write them to files in this process."""
        rows = {place: CutRows(self._config.prefix, number, *place) for place in ranges}
        checks = {place: check.partition(place) for place in ranges}
        for place, messages in self._reader.pieces(ranges):
            read = (
                [message.offset() or 0 for message in messages],
                [message.key() for message in messages],
                [message.value() for message in messages],
            )
            checks[place].add(*read)
            writer.add(rows[place].add(*read))
        spans = []
        for place, wanted in ranges.items():
            self._expect_same(cut, place, wanted, checks[place].finish())
            its = rows[place]
            root = its.tree.root().hex()
            spans.append(CutSpan(*place, *wanted, its.events, its.tree.count, root))
        return spans

    def _write_in_tasks(
        self, cut: Cut, number: int, ranges: dict[Partition, OffsetRange], check: CutCheck
    ) -> tuple[list[CutSpan], list[Action]]:
        from lockstep.jobs.archiving import tasks  # noqa: PLC0415 - of the extra `spark`
        from lockstep.jobs.copying.driving import translated  # noqa: PLC0415 - as above

        assert self._spark is not None
        left = {place: self._reader.remaining(place, each) for place, each in ranges.items()}
        checks = {place: check.partition(place) for place in ranges}
        try:
            found = tasks.archive(self._spark(), self._config, number, left, checks)
        except Exception as error:
            raise translated(error) from error
        spans, actions = [], []
        by_place = {(each["topic"], each["partition"]): each for each in found}
        for place, wanted in ranges.items():
            each = by_place.get(place)
            if each is None:
                self._expect_same(cut, place, wanted, checks[place].finish())
                continue
            differences = [DigestDifference(*place, *found) for found in each["differences"]]
            self._expect_same(cut, place, wanted, differences)
            spans.append(CutSpan(*place, *wanted, each["events"], each["records"], each["root"]))
            actions += each["actions"]
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
        self,
        cut: Cut,
        number: int,
        position: ArchivePosition,
        spans: tuple[CutSpan, ...],
        chain: str,
    ) -> CutRecord:
        return CutRecord(
            pipeline=self._config.pipeline,
            number=number,
            above=cut.above,
            epoch=cut.epoch,
            lsn=str(cut.lsn),
            seq=cut.seq,
            committed_at_us=cut.committed_at_us,
            place=cut.place,
            chain=chain,
            spans=spans,
            root=layout.root(spans),
            previous=position.digest,
            archived_at_us=time.time_ns() // 1_000,
            audits=position.audits.number,
            audit=position.audits.digest,
        )


def _moved(applied: Applied, cut: Cut, ranges: dict[Partition, OffsetRange]) -> Applied:
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
