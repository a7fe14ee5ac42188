"""Follow the log with one sink, cut by cut, in this process.

The flow of a batch, all of it in `Batches.apply`: read exactly the cut's offsets, compare every
partition's count with the frontiers', reduce each table, `begin`, `write` table by table, `commit`
the frontier. Nothing is written before all counts agree. The position is in the store only: each
session reads it from there. Of a backlog the next cut is read while one is written.

Spark does the work of large cuts, and nothing else: the loop hands it the cut, waits, and goes on.
So a follower needs no JVM for its first cuts, and pyspark is not imported before a large one.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

from cdc import failpoints
from cdc.errors import GapError
from cdc.log import names
from cdc.log.ranges import RangeReader
from lockstep.jobs.apply import canaries, positions
from lockstep.jobs.apply.applying import Applying
from lockstep.jobs.apply.reading import CutReading, Most, miscounted
from lockstep.jobs.apply.running import FollowerRun, with_remedy
from lockstep.jobs.cuts.altered import alterations, parts
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.cutting import EVENT_BYTES
from lockstep.jobs.cuts.reduce import Bounds
from lockstep.jobs.cuts.schemas import Schemas
from lockstep.jobs.cuts.tail import CutTail
from lockstep.sinks.contract import Applied, StoreState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.partitions import Partition
    from cdc.log.ranges import Records
    from lockstep.jobs.apply.applying import TableChanges
    from lockstep.jobs.apply.reading import CutEvents
    from lockstep.jobs.cuts.cutting import Cut
    from lockstep.jobs.spark.starting import SparkStart
    from lockstep.sinks.contract import Altered, Sink

# Cuts of up to this size are read, reduced and written in the driver. Of a backlog, a Kafka
# transaction has 50,000 events by default, and a cut has a complete one or more.
SMALL_EVENTS: Final = 60_000
_SMALL_BYTES: Final = 64 << 20
# And up to this size while there is no Spark that could.
ALONE_EVENTS: Final = 150_000
_ALONE_BYTES: Final = 128 << 20
# From so many cores on, executors catch up faster than the driver does.
EXECUTOR_CORES: Final = 4
_POLL_SECONDS: Final = 0.1


class Following:
    """One follower: what `FollowerRun` calls as its session."""

    def __init__(
        self,
        spark: SparkStart,
        config: Config,
        name: str,
        sink: Sink,
        *,
        until: LSN | None = None,
        exactly: bool = False,
    ) -> None:
        """`until`: end once that LSN is applied, `exactly` there."""
        self._spark, self._config, self._name = spark, config, name
        self._sink, self._until = sink, until
        self._through = until if exactly else None

    def __call__(self, run: FollowerRun) -> None:
        """Follow until asked to stop, or until an error."""
        with closing(self._sink):
            state = positions.open_in_log(run, self._sink)
            run.progress.reach("opened")
            if self._reached(state.applied):
                return
            failpoints.reach("follow_opened")
            batches = Batches(self._spark, self._config, self._sink, run, state.applied)
            try:
                with (
                    closing(batches),
                    closing(CutTail(self._config, self._name, state, self._through)) as cuts,
                ):
                    self._follow(run, batches, cuts, state)
            except GapError as error:
                raise with_remedy(error, self._name, f"after seq {batches.applied.seq}") from error

    def _follow(self, run: FollowerRun, batches: Batches, cuts: CutTail, state: StoreState) -> None:
        every, due = self._config.followers[self._name].every_seconds, 0.0
        ahead: Cut | None = None

        def following() -> Cut | None:
            """Return the next cut if it is full and due, for the next turn of the loop."""
            nonlocal ahead
            ahead = None if every else cuts.full()
            return ahead

        while not self._reached(batches.applied):
            if run.stopping.wait(max(0.0, due - time.monotonic())):
                return
            cuts.limit(batches.most_events, batches.event_bytes)
            cut, ahead = ahead or cuts.next(_POLL_SECONDS), None
            if cut is not None:
                failpoints.reach("follow_cut")
                due = time.monotonic() + every
                batches.apply(cut, torn=cut.above < state.reached, following=following)
            if cuts.has_caught_up:
                run.progress.reach("caught up")
                self._spark.want(self._name)
                if cut is None:
                    run.polled()

    def _reached(self, applied: Applied) -> bool:
        return self._until is not None and applied.lsn >= self._until


class Batches:
    """Applies a session's cuts, one after another."""

    def __init__(
        self, spark: SparkStart, config: Config, sink: Sink, run: FollowerRun, applied: Applied
    ) -> None:
        self.applied = applied
        self.event_bytes = float(EVENT_BYTES)  # the recent average
        self._spark, self._config, self._sink, self._run = spark, config, sink, run
        self._schemas = Schemas(config)
        self._applying = Applying(sink, self._schemas.of)
        self._reading = CutReading(config, RangeReader(config), sink.histories())
        self._follower = config.followers[run.name]
        self._chosen = Chosen(config, self._follower)
        self._has_measured = False

    def close(self) -> None:
        """Wait for what is read ahead, and close the connections."""
        self._reading.close()

    @property
    def most_events(self) -> int:
        """How many events a cut gathers: what suits executors, or the driver if cores are few."""
        allowed = self._follower.max_events
        if not self._sink.parallel or self._spark.cores >= EXECUTOR_CORES:
            return allowed
        return min(allowed, SMALL_EVENTS)

    @property
    def _most(self) -> Most:
        """The largest cut that the driver applies by itself."""
        if not self._sink.parallel:
            return Most(self._follower.max_events, self._follower.max_bytes)
        if self._spark.cores:
            return Most(SMALL_EVENTS, _SMALL_BYTES)
        return Most(ALONE_EVENTS, _ALONE_BYTES)

    def apply(
        self, cut: Cut, *, torn: bool, following: Callable[[], Cut | None] = lambda: None
    ) -> None:
        """Apply the cut to the store. `torn`: an interrupted attempt may have written some of it.

        `following` returns the next cut, of which `apply` is called next, if it can be read while
        this one is written. Raises GapError, with nothing written, if events are missing or there
        twice.
        """
        assert cut.above == self.applied.seq, "a cut starts where the last one ended"
        began = time.monotonic()
        applied = self._frontier(cut)
        read = self._reading.read(cut, self._most)
        if read.is_large:
            named, size = self._apply_large(cut, read, torn=torn)
        else:
            named, size = self._apply_small(cut, read, following, torn=torn)
        self._sink.commit(applied)
        failpoints.reach("follow_committed")
        self.applied = applied
        self._note_bytes(cut.events, size)
        canary = canaries.newest(self._config, read.records)
        self._run.has_applied(applied, cut.events, named, time.monotonic() - began, canary)
        failpoints.reach("follow_reported")

    def _apply_large(self, cut: Cut, read: CutEvents, *, torn: bool) -> tuple[set[str], int]:
        run = self._run
        started = self._spark.started(run.stopping)
        from lockstep.jobs.apply.large import Large  # noqa: PLC0415 - pyspark takes a second
        from lockstep.jobs.spark.session import work_session  # noqa: PLC0415 - as above

        large = Large(self._config, self._sink, self._schemas, self._applying, self._reading.log)
        count_error = partial(miscounted, self._config)
        title = f"{self._config.pipeline}: {run.name}, {cut.events:,} events up to seq {cut.seq}"
        altered = self._altered(read.records)
        with work_session(started, title, run.stopping) as spark:
            return large.apply(spark, cut, read.letters, count_error, altered, torn=torn)

    def _apply_small(
        self,
        cut: Cut,
        read: CutEvents,
        following: Callable[[], Cut | None],
        *,
        torn: bool,
    ) -> tuple[set[str], int]:
        failpoints.reach("follow_read")
        altered = self._altered(read.records)
        tables = self._reduced(cut, read, altered, torn=torn)
        failpoints.reach("follow_reduced")
        versions = [each for table in tables for each in table.changes.versions]
        self._applying.begin(cut.seq, versions, altered.values())
        if not altered:  # else the letters may be read still
            read.letters.close()
            if (ahead := following()) is not None:
                self._reading.start(ahead, self._most)
        for table in tables:
            self._applying.write_table(table)
            failpoints.reach("follow_written")
        for topic, its in altered.items():
            self._applying.alter(
                topic,
                partial(parts, read.by_topic.get(topic, [])),
                Bounds(cut.above, cut.seq),
                its,
                letter=read.letters.event,
                torn=torn,
            )
            failpoints.reach("follow_written")
        named = {table.changes.version.name for table in tables}
        named |= {its[-1].version.name for its in altered.values()}
        return named, sum(each.size for each in read.records.values())

    def _altered(self, records: Mapping[Partition, Records]) -> dict[str, list[Altered]]:
        """Return what the cut's messages alter, by topic."""
        found = records.get((names.messages_topic(self._config.prefix), 0))
        if found is None:
            return {}
        events = (found.keys, found.values)
        return alterations(events, self._chosen.follows, self._schemas.of)

    def _reduced(
        self,
        cut: Cut,
        read: CutEvents,
        altered: Collection[str],
        *,
        torn: bool,
    ) -> list[TableChanges]:
        return [
            self._applying.reduce(
                topic,
                partitions,
                Bounds(cut.above, cut.seq),
                name=names.table_name(self._config.prefix, topic),
                letter=read.letters.event,
                quick=read.newest.get(topic, False),
                torn=torn,
            )
            for topic, partitions in read.by_topic.items()
            if topic not in altered
        ]

    def _frontier(self, cut: Cut) -> Applied:
        """Return the frontier at the cut's end."""
        ends = {topic: list(each) for topic, each in self.applied.ends.items()}
        for part in cut.parts:
            known = ends.setdefault(part.topic, [])
            known.extend([0] * (part.partition + 1 - len(known)))
            known[part.partition] = part.end
        return self.applied._replace(
            epoch=cut.epoch,
            lsn=cut.lsn,
            seq=cut.seq,
            committed_at_us=cut.committed_at_us,
            place=cut.place,
            ends={topic: tuple(each) for topic, each in ends.items()},
        )

    def _note_bytes(self, events: int, size: int) -> None:
        """Measure the size of events: cuts are also limited in bytes."""
        if not events:
            return
        seen = size / events
        if not self._has_measured:
            self.event_bytes, self._has_measured = seen, True
        elif events > SMALL_EVENTS // 20:
            self.event_bytes = 0.5 * (self.event_bytes + seen)
