"""Sources of a generation: the log, or for documents a mirror's frontiers.

A log that still has its beginning has everything. If retention deleted the beginning, or for tables
that bypassed the log or had another key, the rows are read again: the generation starts at a
current frontier, and incremental snapshots (`cdc snapshot TABLE`) write every row to the log after
it. Deletes of older rows have nothing to delete. So it needs a daemon that streams, and nothing
from the old state.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.errors import ConfigError, UnavailableError
from cdc.events import table_name
from cdc.log import names, reader
from cdc.log.follower_reports import FollowerRecord, Reports
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from cdc.operate.commands import snapshots
from cdc.operate.readable import listed
from lockstep.jobs.apply.following import Following
from lockstep.jobs.apply.following_documents import DocumentsFollowing
from lockstep.jobs.apply.positions import is_of_this_log, with_ends
from lockstep.jobs.apply.refilling import rekeyed, shortened
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.apply.stores import kind
from lockstep.jobs.cuts.altered import altered_last
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.direct_tables import direct, recorded
from lockstep.jobs.cuts.frontiers import FrontierFinder
from lockstep.jobs.cuts.schemas import version
from lockstep.jobs.documents.kinds import SCHEMA
from lockstep.jobs.documents.mirror_cuts import MirrorCuts
from lockstep.jobs.generations.comparing import Holding, Newest
from lockstep.jobs.generations.counting import first_miscount
from lockstep.jobs.generations.from_archive import FromArchive
from lockstep.jobs.spark.starting import SparkStart
from lockstep.sinks.contract import Applied, Generations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.records import FrontierRecord
    from lockstep.jobs.compacting.restoring import FillStart
    from lockstep.sinks.contract import Sink, Version

_PROGRESS_SECONDS: Final = 5.0
_FRONTIER_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5


class _Source(msgspec.Struct):
    seq: int


class _Event(msgspec.Struct):
    op: str
    source: _Source


_decode: Final = msgspec.json.Decoder(_Event).decode


class LogBuilder:
    """Builds from the log."""

    keeps_seqs = True

    def __init__(
        self,
        config: Config,
        name: str,
        spark: Callable[[], SparkSession],
        progress: Callable[[str], None],
    ) -> None:
        """`spark` starts a session, or returns the one that was started before."""
        self._config, self._name = config, name
        self._spark, self._progress = spark, progress
        # The tables whose rows are read again, and the seq above which all of those rows are.
        self._again: frozenset[str] | None = None
        self._floor = 0
        self._is_miscounted = False  # the log lacks events in its middle, or has some twice
        self._archive = FromArchive(config, name, spark, progress)

    def tables(self) -> list[str]:
        return [names.table_name(self._config.prefix, topic) for topic in self._topics()]

    def knows(self, applied: Applied) -> bool:
        return is_of_this_log(self._config, applied)

    def _topics(self) -> dict[str, int]:
        """Return the topics of the tables that are followed, with their partitions."""
        resume = reader.read_resume(self._config)
        if resume is None:
            raise ConfigError(
                f'there is no log of pipeline "{self._config.pipeline}"', hint="`cdc setup`"
            )
        follower = self._config.followers[self._name]
        return Chosen(self._config, follower).among(resume[0].partitions)

    def prepare(self, sink: Generations, generation: int, tables: frozenset[str] | None) -> int:
        start = self._archive.start(sink, None, is_shortened=self._is_shortened())
        if start is not None:
            return self._archive.fill(sink, generation, start, tables).seq
        return self._prepared(sink, generation, tables)

    def read_again(self, sink: Generations, generation: int, tables: frozenset[str] | None) -> int:
        self._is_miscounted = True
        return self._prepared(sink, generation, tables)

    def _prepared(self, sink: Generations, generation: int, tables: frozenset[str] | None) -> int:
        wanted, lost = self._wanted(tables)
        if not wanted:
            return 0
        if lost:
            self._floor = self._target(None).seq
            self._begin_here(sink, generation)
        asked = self._snapshot(wanted)
        if lost:
            self._again = frozenset(asked)
        return self._target(None).seq

    def _is_shortened(self) -> bool:
        """Return whether a topic has lost its beginning."""
        return bool(shortened(self._config, self._topics()))

    def beginning(self, generation: int) -> Applied:
        return Applied.beginning(self._config.pipeline, generation)

    def refill(self, sink: Sink, generation: int, empty: Callable[[], None]) -> Applied:
        """Call `empty` for a store of one generation and fill it again.

        Rows that must be read again are in the log before anything is deleted, and the log's events
        are counted. Then the store is at no frontier until it has all of them.
        """
        past = self._archive.start(sink, None, is_shortened=self._is_shortened())
        self._count(past)
        if past is not None and not self._is_miscounted:
            empty()
            self._archive.fill(sink, generation, past)
            return self.forward(sink, generation, None)
        wanted, lost = self._wanted(None)
        start = frontier_of_now(self._config, generation) if lost else None
        if wanted:
            self._snapshot(wanted)
        target = self._target(None).seq
        empty()
        with closing(sink):
            sink.open()
            if start is not None:
                # Before it is at that frontier, of which it has no rows: never without the cut.
                sink.begin(max(start.seq, target), [])
                sink.commit(start)
        return self.forward(sink, generation, None)

    def _count(self, past: FillStart | None) -> None:
        """Note whether the log lacks events that will be read from it."""
        applied = past.state.frontier.applied if past else self.beginning(1)
        if past is None and self._is_shortened():
            return  # nothing is read from before now
        error = first_miscount(self._config, self._name, applied)
        if error is not None:
            self._is_miscounted = True
            self._progress(f"{error.what}: the rows are read again")

    def _wanted(self, tables: frozenset[str] | None) -> tuple[list[str], bool]:
        """Return the tables to be read again, and whether the log lost the beginning of any.

        Raises UnavailableError if nothing can read them at the moment.
        """
        follower, topics = self._config.followers[self._name], self._topics()
        chosen = [
            topic
            for topic in topics
            if tables is None or names.table_name(self._config.prefix, topic) in tables
        ]
        # Of a table that had another key the log has rows that only the old key identifies.
        lost = sorted(topics) if self._is_miscounted else []
        lost = lost or [topic for topic, _ in shortened(self._config, topics)]
        lost = lost or rekeyed(self._config, chosen)
        wanted = (
            sorted(tables or follower.tables)
            if lost
            else direct(self._config, topics, recorded(self._config))
        )
        if tables is not None and not lost:
            wanted = sorted(tables & set(wanted))
        if wanted and not snapshots.daemon_streams(self._config):
            raise UnavailableError(
                f"the log does not have all rows of {self._name}: " + self._why(lost, wanted),
                hint="start `cdc run`: the rows are read again through the stream",
            )
        return wanted, bool(lost)

    def _why(self, lost: Sequence[str], wanted: Sequence[str]) -> str:
        if self._is_miscounted:
            return "events are missing in it"
        return f"{lost[0]} begins in it too late" if lost else f"{wanted[0]} went past it"

    def expect_past(self) -> None:
        if missing := direct(self._config, self._topics(), recorded(self._config)):
            raise ConfigError(
                f"{self._name} has no past states of {listed(sorted(missing))}: the first rows were"
                " copied directly into Delta, and are neither in the log nor in the archive",
                hint="read a mirror's own past: the rows of `_frontiers` and `read_as_of`"
                " (docs/DELTA.md), or give the other tables a follower of their own",
            )

    def forward(self, sink: Sink, generation: int, until: LSN | None) -> Applied:
        there = sink.generations().get(generation) if isinstance(sink, Generations) else None
        if until is not None and (there is None or not there.place):
            past = self._archive.start(sink, until, is_shortened=self._is_shortened())
            if past is not None:
                there = self._archive.fill(sink, generation, past, joins=False)
                if not self._has_later(there, until):
                    return there
        target = self._target(until)
        at = (target.epoch, target.lsn, target.seq)
        if there and (there.epoch, there.lsn, there.seq) == at:
            return there
        following = Following(
            SparkStart(self._spark, {self._name}),
            self._config,
            self._name,
            sink,
            until=target.lsn,
            exactly=until is not None,
        )
        return _run(self._config, self._name, generation, following, target.seq, self._progress)

    def versions(self, applied: Applied) -> Sequence[Version]:
        follows = Chosen(self._config, self._config.followers[self._name]).follows
        newest = {
            record.topic: version(record)
            for record in reader.read_schemas(self._config)
            if record.from_lsn <= applied.lsn and follows(record.topic)
        }
        return list(newest.values())

    def truth(self, version: Version, applied: Applied) -> Holding | None:
        if self._again is not None and f"{version.schema}.{version.table}" not in self._again:
            return None  # dropped: its events in the log are older than the generation's start
        newest, truncated = Newest(), 0
        known = self._archive.add(version, applied, newest) if self._lacks_rows() else {}
        # A key's events are in one partition, except for those from before partitions were added.
        ends = enumerate(applied.ends.get(version.topic, ()))
        places = (((version.topic, number), end) for number, end in ends)
        wanted = {place: OffsetRange(known.get(place, 0), end) for place, end in places}
        held = reader.offsets(self._config, list(wanted))
        ranges = {
            place: each._replace(start=max(each.start, held[place][0]))
            for place, each in wanted.items()
        }
        with closing(RangeReader(self._config)) as log:
            for _, messages in log.pieces(ranges):
                for message in messages:
                    key, value = message.key(), message.value()
                    if value is None:
                        continue
                    event = _decode(value)
                    if event.op == "t":
                        truncated = max(truncated, event.source.seq)
                    elif key is not None:
                        newest.add(key, event.source.seq, there=event.op != "d")
        return newest.rows(max(truncated, self._floor))

    def with_ends(self, applied: Applied, tables: frozenset[str]) -> Applied:
        topics = {
            topic: count
            for topic, count in self._topics().items()
            if names.table_name(self._config.prefix, topic) in tables
        }
        return with_ends(self._config, topics, applied)

    def _has_later(self, applied: Applied, until: LSN) -> bool:
        """Return whether the log has a frontier above one that is not above an LSN."""
        with closing(FrontierFinder(self._config)) as log:
            placed = log.newest(until)
        return placed is not None and placed.record.seq > applied.seq

    def _lacks_rows(self) -> bool:
        """Return whether the topics lack rows that were not read again."""
        return self._again is None and self._is_shortened()

    def altered_at(self, version: Version, applied: Applied) -> int:
        messages = names.messages_topic(self._config.prefix), 0
        end = applied.ends.get(messages[0], (0,))[0]
        start = reader.offsets(self._config, [messages])[messages][0]
        newest = 0
        with closing(RangeReader(self._config)) as log:
            for _, read in log.pieces({messages: OffsetRange(min(start, end), end)}):
                events = [each.key() for each in read], [each.value() or b"" for each in read]
                newest = max(newest, altered_last(events, version.topic))
        return newest

    def _target(self, until: LSN | None) -> FrontierRecord:
        """Return the newest frontier, or the newest that is not above `until`."""
        if until is None:
            tail = reader.read_frontier_tail(self._config, 1)
            found = tail[-1][0] if tail else None
        else:
            with closing(FrontierFinder(self._config)) as log:
                placed = log.newest(until)
            found = placed and placed.record
        if found is None:
            raise ConfigError(
                "the log has no frontier" + (f" not above {until}" if until else ""),
                hint="name a later LSN" if until else "`cdc run` writes the first",
            )
        return found

    def _begin_here(self, sink: Generations, generation: int) -> None:
        """Start a new generation at a current frontier instead of at the log's beginning."""
        with closing(sink):
            state = sink.open()
            if state is None or not state.applied.place:
                applied = frontier_of_now(self._config, generation)
                sink.begin(applied.seq, [])
                sink.commit(applied)
                self._progress(f"the log no longer has its beginning: started at {applied.lsn}")

    def _snapshot(self, tables: Sequence[str]) -> list[str]:
        """Request a snapshot of tables; return which, once all their rows are in the log."""
        requested = snapshots.start(self._config, tables)
        self._progress(f"reading again: {', '.join(requested.values())}")
        failed = [
            record
            for record in snapshots.wait(self._config, list(requested), report=self._progress)
            if record.state != "done"
        ]
        if failed:
            raise UnavailableError(
                f"the snapshot of {failed[0].name} was not finished: {failed[0].why}",
                hint="see `cdc snapshot list`; `cdc rebuild` requests it again",
            )
        return list(requested.values())


class MirrorBuilder:
    """Builds documents from their mirror."""

    keeps_seqs = False

    def __init__(
        self,
        config: Config,
        name: str,
        progress: Callable[[str], None],
        spark: Callable[[], SparkSession] | None = None,
    ) -> None:
        """`spark` starts a session when it is needed."""
        self._config, self._name, self._progress, self._spark = config, name, progress, spark
        self._mirror = MirrorCuts(config, name)

    def tables(self) -> list[str]:
        return [table_name(SCHEMA, name) for name in self._mirror.names]

    def knows(self, applied: Applied) -> bool:
        return is_of_this_log(self._config, applied)

    def prepare(self, sink: Generations, generation: int, tables: frozenset[str] | None) -> int:  # noqa: ARG002 - a Builder's
        return 0

    read_again = prepare

    def expect_past(self) -> None:
        """Do nothing: the mirror's frontiers have all rows."""

    def forward(self, sink: Generations, generation: int, until: LSN | None) -> Applied:
        cut = self._mirror.cut(None, until)
        if cut is None:
            raise ConfigError(
                f"the mirror of {self._name} has no frontier"
                + (f" up to {until}" if until else ""),
                hint="is its follower running? `cdc status` shows it",
            )
        target = cut.after.applied
        following = DocumentsFollowing(
            self._config,
            self._name,
            sink,
            spark=self._spark,
            until=target.lsn,
            exactly=True,
        )
        return _run(self._config, self._name, generation, following, target.seq, self._progress)

    def versions(self, applied: Applied) -> Sequence[Version]:
        return [kind.version for kind in self._mirror.kinds(applied)]

    def truth(self, version: Version, applied: Applied) -> Holding | None:
        keys = self._mirror.keys(version.table, applied)
        return None if keys is None else Holding((key, 0, None) for key in keys)

    def altered_at(self, version: Version, applied: Applied) -> int:  # noqa: ARG002 - a Builder's
        return 0  # seqs only show when a document was built

    def with_ends(self, applied: Applied, tables: frozenset[str]) -> Applied:  # noqa: ARG002 - a Builder's
        return applied  # its cuts come from the mirror's frontiers


def _run(
    config: Config,
    name: str,
    generation: int,
    session: Callable[[FollowerRun], None],
    seq: int,
    progress: Callable[[str], None],
) -> Applied:
    """Follow until the session ends; report progress towards `seq`; raise the session's error."""
    run = FollowerRun(config, name, kind(config.followers[name]), session, quiet=True)
    run.opened_at(Applied.beginning(config.pipeline, generation))
    following = threading.Thread(target=run.run, name=f"rebuild-{name}", daemon=True)
    following.start()
    try:
        while following.is_alive():
            following.join(_PROGRESS_SECONDS)
            at = run.applied
            if following.is_alive() and at is not None:
                share = f"{100 * at.seq / seq:.0f} %" if seq else "0 %"
                waits = f"; {run.state}: {run.error.what}" if run.error else ""
                progress(f"generation {generation}: {share}, at {at.lsn}{waits}")
    finally:
        run.stop()
        following.join()
    if run.state == "halted" and run.error is not None:
        raise run.error
    assert run.applied is not None, "it started at a frontier"
    if run.applied.seq < seq:
        raise UnavailableError(
            f"generation {generation} was followed up to {run.applied.lsn} only",
            hint="run `cdc rebuild` again: it continues from there",
        )
    return run.applied


def switching(config: Config, name: str, applied: Applied, why: str) -> None:
    """Report the generation that readers will see, or see already.

    `why`, if not empty, is the reason that its frontier must not be relied on yet. From then on
    reports of older generations are ignored. Until the new one is visible, no wait treats its
    frontier as reached: it may be just below the last one that the old generation's follower
    reported.
    """
    reports = Reports(config)
    reports.write(
        FollowerRecord(
            pipeline=config.pipeline,
            follower=name,
            store=kind(config.followers[name]),
            generation=applied.generation,
            state="rebuilding" if why else "stopped",
            epoch=applied.epoch,
            lsn=applied.lsn,
            seq=applied.seq,
            committed_at_us=applied.committed_at_us,
            place=applied.place,
            what=why,
            hint=why and f"start `cdc follow`; if it stays so, run `cdc rebuild {name}` again",
            owner=f"{socket.gethostname()}:{os.getpid()}:rebuild",
            at_us=time.time_ns() // 1_000,
        )
    )
    reports.flush()


def frontier_of_now(config: Config, generation: int) -> Applied:
    """Return a current frontier, with the end of every partition at it.

    The ends in frontier records that retention deleted are unknown. But a partition that none of
    the remaining records names has not changed since, so its end is its end offset. That is read
    before waiting for a frontier record that covers everything up to then.
    """
    resume = reader.read_resume(config)
    assert resume is not None, "there is a log"
    topics = {
        **resume[0].partitions,
        names.messages_topic(config.prefix): 1,
        names.dead_topic(config.prefix): 1,
    }
    parts = [(topic, number) for topic, count in topics.items() for number in range(count)]
    ends = reader.end_offsets(config, parts)
    # Only a record that comes after these ends were read covers all events before them.
    frontier_topic = names.frontier_topic(config.prefix)
    before = reader.end_offsets(config, [(frontier_topic, 0)])[frontier_topic, 0]
    deadline = time.monotonic() + _FRONTIER_SECONDS
    while True:
        with closing(FrontierFinder(config)) as log:
            placed = log.newest()
            if placed is not None and placed.offset >= before:
                ends |= log.ends(placed)
                break
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"no frontier came for {_FRONTIER_SECONDS:.0f} s", hint="is the daemon running?"
            )
        time.sleep(_POLL_SECONDS)
    by_topic: dict[str, list[int]] = {topic: [0] * count for topic, count in topics.items()}
    for (topic, number), end in ends.items():
        if topic in by_topic:
            by_topic[topic][number] = end
    record = placed.record
    return Applied(
        config.pipeline,
        generation,
        record.epoch,
        record.lsn,
        record.seq,
        record.committed_at_us,
        placed.offset + 1,
        {topic: tuple(each) for topic, each in by_topic.items()},
    )
