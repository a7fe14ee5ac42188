"""Follow the log with one sink: a Structured Streaming query whose batches are cuts.

The flow of a batch, all of it in `Batches.apply`: read exactly the cut's offsets, compare every
partition's count with the frontiers', reduce each table, `begin`, `write` table by table, `commit`
the frontier. Nothing is written before all counts agree. The position is in the store only: each
session reads it from there, and gives Spark a new checkpoint directory.

While Spark still starts, this process takes the cuts itself, as far as they are small, and hands
over to the query at a frontier.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql.functions import expr

from cdc import failpoints
from cdc.errors import CDCError, Exit, GapError
from cdc.events import LSN
from cdc.log import names
from cdc.log.partitions import Range
from cdc.log.ranges import RangeReader
from lockstep.jobs.apply import canaries, positions
from lockstep.jobs.apply.applying import Applying
from lockstep.jobs.apply.large import Large
from lockstep.jobs.apply.running import Run, with_remedy
from lockstep.jobs.copying.driving import translated
from lockstep.jobs.cuts.altered import alterations, parts
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.dead_letters import CutLetters
from lockstep.jobs.cuts.reduce import Bounds
from lockstep.jobs.cuts.schemas import Schemas
from lockstep.jobs.cuts.tail import CutTail
from lockstep.jobs.spark import cut_source
from lockstep.jobs.spark.session import delete_with_jvm
from lockstep.jobs.spark.starting import SparkStart
from lockstep.sinks.contract import Applied, StoreState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.ranges import Records
    from lockstep.jobs.apply.applying import TableChanges
    from lockstep.jobs.cuts.cutting import Cut, CutPart
    from lockstep.jobs.cuts.reduce import Events
    from lockstep.sinks.contract import Altered, Sink

# Cuts of up to this many events are read, reduced and written in the driver, for the lowest
# latency.
_SMALL_EVENTS: Final = 20_000
_SMALL_BYTES: Final = 64 << 20
_POLL_SECONDS: Final = 0.1
# A stop interrupts a batch that takes longer, because supervisors kill after ten seconds.
_STOP_SECONDS: Final = 5.0
# How long a signal to several processes may take to reach this one's followers.
_SIGNAL_SECONDS: Final = 1.0
_STARTING: Final = threading.Lock()

_T = TypeVar("_T")


class SparkEndedError(CDCError):
    """The session's JVM has ended: this process can do nothing further."""

    exit_code = Exit.TEMPORARY

    def __init__(self) -> None:
        super().__init__(
            "Spark's JVM has ended",
            hint="start the job again: it continues from its stores. If memory is short, see"
            " spark.driver.memory",
        )


class Following:
    """One follower: what `Run` calls as its session."""

    def __init__(
        self,
        spark: SparkSession | SparkStart,
        config: Config,
        config_file: Path,
        name: str,
        sink: Sink,
        *,
        until: LSN | None = None,
        exactly: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`until`: end once that LSN is applied, `exactly` there. `folder` holds scratch data."""
        self._spark, self._config, self._file, self._name = spark, config, config_file, name
        self._sink, self._until, self._folder = sink, until, folder
        self._through = until if exactly else None

    def __call__(self, run: Run) -> None:
        """Follow until asked to stop, or until an error."""
        with closing(self._sink):
            state = positions.open_in_log(run, self._sink)
            if self._reached(state.applied):
                return
            failpoints.reach("follow_opened")
            scratch = Path(tempfile.mkdtemp(prefix="lockstep-", dir=self._folder))
            batches = Batches(self._config, self._name, self._sink, run, state, scratch)
            try:
                with closing(batches):
                    self._follow(run, batches, scratch)
            except (PySparkException, Py4JJavaError) as error:
                # The killed worker may be the one in which Spark loads the source.
                raise translated(error) from error
            except (Py4JError, ConnectionError) as error:
                if not has_ended(error):
                    raise
                # A signal to all processes may end the JVM before this one has read its own.
                if not run.stopping.wait(_SIGNAL_SECONDS):
                    raise SparkEndedError from error
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def _follow(self, run: Run, batches: Batches, scratch: Path) -> None:
        hand_over = scratch / "state"
        if isinstance(self._spark, SparkStart):
            query = self._while_starting(run, batches, hand_over, self._spark)
            if query is None:
                return
            cut_source.hand_over(batches.state, hand_over)
        else:
            cut_source.hand_over(batches.state, hand_over)
            query = self._started(run.stopping, self._spark, batches, hand_over)
        self._await(run, query, batches)

    def _while_starting(
        self, run: Run, batches: Batches, hand_over: Path, spark: SparkStart
    ) -> StreamingQuery | None:
        """Take small cuts until the query has started; None if nothing is left to do."""
        ending = threading.Event()
        query: Future[StreamingQuery] = Future()

        def start() -> None:
            try:
                session = _result(spark.session, ending)
                query.set_result(self._started(ending, session, batches, hand_over))
            except BaseException as error:  # noqa: BLE001 - raised where the query is used
                query.set_exception(error)

        starting = threading.Thread(target=start, name=f"query-{self._name}", daemon=True)
        starting.start()
        taken = None
        try:
            if self._take_small(run, batches, spark, query):
                taken = _result(query, run.stopping)
        except CancelledError:  # asked to stop
            pass
        finally:
            ending.set()
            starting.join()
            if taken is None and query.exception() is None:
                stop(query.result())
        return taken

    def _take_small(
        self, run: Run, batches: Batches, spark: SparkStart, query: Future[StreamingQuery]
    ) -> bool:
        """Take cuts until the query can; return False if nothing is left to do."""
        with closing(
            CutTail(self._config, self._name, batches.state, self._through, batches.pace)
        ) as cuts:
            while not query.done():
                if run.stopping.is_set() or self._reached(batches.applied):
                    return False
                cut = cuts.next(_POLL_SECONDS)
                if cut is None:
                    run.polled()
                    spark.want(self._name)
                elif not batches.take_small(cut):
                    spark.want(self._name)
                    break
        return True

    def _started(
        self, ending: threading.Event, spark: SparkSession, batches: Batches, hand_over: Path
    ) -> StreamingQuery:
        """Start the query, one at a time in this process.

        Spark waits ten seconds for a source's process to answer, and several that start at once on
        a busy machine take longer.
        """
        follower, scratch = self._config.followers[self._name], hand_over.parent
        delete_with_jvm(spark, scratch)
        start = cut_source.Start(self._file, self._name, hand_over, batches.pace, self._through)
        spark.dataSource.register(cut_source.CutSource)
        writer = (
            spark.readStream.format(cut_source.NAME)
            .options(**start.options())
            .load()
            .observe("lockstep", expr("sum(events) events"), expr("max(seq) seq"))
            .writeStream.queryName(_query_name(self._config, self._name, batches.applied))
            .option("checkpointLocation", str(scratch / "checkpoint"))
            .foreachBatch(batches.take)
        )
        if follower.every_seconds:
            writer = writer.trigger(processingTime=f"{follower.every_seconds} seconds")
        with _STARTING:
            query = writer.start()
            while query.isActive and query.status["message"].startswith("Initializing"):
                if ending.wait(_POLL_SECONDS):
                    break
            return query

    def _await(self, run: Run, query: StreamingQuery, batches: Batches) -> None:
        reads = False
        try:
            while query.isActive and not self._reached(batches.applied):
                if run.stopping.wait(_POLL_SECONDS):
                    break
                # Only after the source has polled the log: before that nothing is known to work.
                if not reads and query.status["message"].startswith("Waiting for"):
                    reads = True
                    run.polled()
            failed = query.exception()
        finally:
            batches.end()
            stop(query)
        if batches.error is not None:
            raise batches.error
        if failed is not None:
            raise failed

    def _reached(self, applied: Applied) -> bool:
        return self._until is not None and applied.lsn >= self._until


def stop(query: StreamingQuery) -> None:
    """Stop a query, whether or not its JVM still answers."""
    with suppress(PySparkException, Py4JError, OSError):
        query.stop()


def _result(future: Future[_T], ending: threading.Event) -> _T:
    """Return the result once there is one; raise CancelledError if that is no longer needed."""
    while not ending.is_set():
        with suppress(TimeoutError):
            return future.result(_POLL_SECONDS)
    raise CancelledError


def has_ended(error: Py4JError | ConnectionError) -> bool:
    """Return whether the JVM has ended: it threw no exception, and no longer answers."""
    # If it ends during a call there is no answer, which py4j reports as a plain Py4JError.
    silent = type(error) is Py4JError and "Trace:" not in str(error)
    return silent or isinstance(error, Py4JNetworkError | ConnectionError)


def _query_name(config: Config, name: str, applied: Applied) -> str:
    """Return the query's name, with the generation: a shadow build may run alongside another."""
    return f"lockstep_{config.pipeline}_{name}_{applied.generation}"


class Batches:
    """Takes a query's batches, one after another."""

    def __init__(
        self,
        config: Config,
        name: str,
        sink: Sink,
        run: Run,
        state: StoreState,
        scratch: Path,
    ) -> None:
        self.applied, self._torn = state
        self.error: Exception | None = None
        self.pace = scratch / "pace"
        self._config, self._name, self._sink = config, name, sink
        self._run = run
        self._reader = RangeReader(config)
        self._schemas = Schemas(config)
        self._chosen = Chosen(config, config.followers[name])
        self._applying = Applying(sink, self._schemas.of)
        self._large = Large(config, sink, self._schemas, self._applying, self._reader)
        follower = config.followers[name]
        # Executors write large cuts; if the sink does not allow it, the driver takes a cut of any
        # allowed size.
        self._most_events = _SMALL_EVENTS if sink.parallel else follower.max_events
        self._most_bytes = _SMALL_BYTES if sink.parallel else follower.max_bytes
        self._event_bytes = 0.0
        self._batch_lock = threading.Lock()
        self._ended = False

    @property
    def state(self) -> StoreState:
        """The store's frontier, and how far an interrupted cut may have been written."""
        return StoreState(self.applied, self._torn)

    def close(self) -> None:
        self._reader.close()

    def end(self) -> None:
        """Let the current batch finish, and start no other."""
        held = self._batch_lock.acquire(timeout=_STOP_SECONDS)
        self._ended = True
        if held:
            self._batch_lock.release()

    def take(self, frame: DataFrame, _: int) -> None:
        """Apply the batch; Spark ends the query if this raises."""
        try:
            with self._batch_lock:
                self._take(frame)
        except CDCError as error:
            above = self.applied.seq
            self.error = with_remedy(error, self._name, f"after seq {above}")
            raise self.error from error
        except Exception as error:
            self.error = error
            raise

    def take_small(self, cut: Cut) -> bool:
        """Apply a cut without Spark; return False, with nothing written, if it is too large."""
        try:
            return self.apply(None, cut)
        except CDCError as error:
            above = self.applied.seq
            raise with_remedy(error, self._name, f"after seq {above}") from error

    def _take(self, frame: DataFrame) -> None:
        if self._ended or self._run.stopping.is_set():
            return
        rows = frame.collect()
        if not rows:
            return
        cut = cut_source.cut_of(rows)
        if isinstance(cut, CDCError):
            raise cut
        assert cut.above == self.applied.seq, "the source continues where the last cut ended"
        failpoints.reach("follow_cut")
        self.apply(frame.sparkSession, cut)

    def apply(self, spark: SparkSession | None, cut: Cut) -> bool:
        """Apply the cut to the store; return False, with nothing written, if it needs Spark."""
        began = time.monotonic()
        applied = self._frontier(cut)
        ranges = {(part.topic, part.partition): Range(part.start, part.end) for part in cut.parts}
        dead = (names.dead_topic(self._config.prefix), 0)
        letters = CutLetters(self._reader, dead, ranges.pop(dead, None))
        records = None
        if cut.events <= self._most_events:
            records = self._reader.read(ranges, self._most_bytes)
        if records is None:
            if spark is None:
                return False
            messages = (names.messages_topic(self._config.prefix), 0)
            records = self._reader.read({at: r for at, r in ranges.items() if at == messages}) or {}
            self._check(cut, records)
            torn = cut.above < self._torn
            altered = self._altered(records)
            named, size = self._large.apply(spark, cut, letters, miscounted, altered, torn=torn)
        else:
            named, size = self._apply_small(cut, records, letters)
        self._sink.commit(applied)
        failpoints.reach("follow_committed")
        self.applied = applied
        self._note_bytes(cut.events, size)
        canary = canaries.newest(self._config, records)
        self._run.has_applied(applied, cut.events, named, time.monotonic() - began, canary)
        failpoints.reach("follow_reported")
        return True

    def _apply_small(
        self, cut: Cut, records: Mapping[Partition, Records], letters: CutLetters
    ) -> tuple[set[str], int]:
        self._check(cut, records)
        failpoints.reach("follow_read")
        altered = self._altered(records)
        by_topic = self._by_topic(records)
        plain = {topic: each for topic, each in by_topic.items() if topic not in altered}
        tables = self._reduced(cut, plain, letters)
        failpoints.reach("follow_reduced")
        versions = [each for table in tables for each in table.changes.versions]
        self._applying.begin(cut.seq, versions, altered.values())
        for table in tables:
            self._applying.write_table(table)
            failpoints.reach("follow_written")
        for topic, its in altered.items():
            self._applying.alter(
                topic,
                partial(parts, by_topic.get(topic, [])),
                Bounds(cut.above, cut.seq),
                its,
                letter=letters.event,
                torn=cut.above < self._torn,
            )
            failpoints.reach("follow_written")
        named = {table.changes.version.name for table in tables}
        named |= {its[-1].version.name for its in altered.values()}
        return named, sum(each.size for each in records.values())

    def _altered(self, records: Mapping[Partition, Records]) -> dict[str, list[Altered]]:
        """Return what the cut's messages alter, by topic."""
        found = records.get((names.messages_topic(self._config.prefix), 0))
        if found is None:
            return {}
        events = (found.keys, found.values)
        return alterations(events, self._chosen.follows, self._schemas.of)

    def _check(self, cut: Cut, records: Mapping[Partition, Records]) -> None:
        """Compare each partition's number of events with the frontiers' count."""
        for part in cut.parts:
            place = (part.topic, part.partition)
            read = records.get(place)
            if read is not None and part.events != len(read.values):
                self._reader.expect_complete(place, Range(part.start, part.end))
                raise miscounted(cut, part, len(read.values))

    def _by_topic(self, records: Mapping[Partition, Records]) -> dict[str, list[Events]]:
        """Return the tables' events by topic, in their partitions."""
        by_topic: dict[str, list[Events]] = {}
        own = f"{self._config.prefix}.cdc."
        for (topic, _), each in sorted(records.items()):
            if not topic.startswith(own) and each.values:
                by_topic.setdefault(topic, []).append((each.keys, each.values))
        return by_topic

    def _reduced(
        self, cut: Cut, by_topic: Mapping[str, list[Events]], letters: CutLetters
    ) -> list[TableChanges]:
        return [
            self._applying.reduce(
                topic,
                partitions,
                Bounds(cut.above, cut.seq),
                name=names.table_name(self._config.prefix, topic),
                letter=letters.event,
                torn=cut.above < self._torn,
            )
            for topic, partitions in by_topic.items()
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
        """Give the source the recent size of events: its cuts are also limited in bytes."""
        if not events:
            return
        known = self._event_bytes
        seen = size / events
        if known == 0 or events > _SMALL_EVENTS // 20:
            self._event_bytes = seen if known == 0 else 0.5 * (known + seen)
        if abs(self._event_bytes - known) > known / 8:
            part = self.pace.with_suffix(".part")
            part.write_text(f"{self._event_bytes:.0f}", "ascii")
            part.replace(self.pace)


def miscounted(cut: Cut, part: CutPart, found: int) -> GapError:
    """Return the error for a partition whose count differs."""
    return GapError(
        f"{part.topic} [{part.partition}] holds {found} events from offset {part.start} to"
        f" {part.end - 1}, where the frontiers of seq {cut.above + 1} to {cut.seq} count"
        f" {part.events}",
        hint="records are lost or duplicated: the topic was emptied or recreated, truncated by an"
        " unclean election, or was not followed before"
        + (" (this follower reads it from its beginning)" if part.start == 0 else ""),
    )
