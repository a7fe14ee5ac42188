"""Apply a large cut: executors read, count, reduce and write it.

First they count the events (`jobs.apply.divided`); nothing is written before every partition's
count equals the frontiers'. Events of Delta mirrors are divided by key as they are read. Of other
stores the log is read again, and each Kafka partition is a task: within one epoch it has all events
of its keys, so a task reduces and writes a few thousand at a time. So its memory does not depend on
the size of the cut: an initial snapshot is one cut.

Events that need more than their own partition (a table with events of several epochs, without a key
or with a truncate, changed keys whose columns were not sent, dead letters, histories) are sorted by
seq and go through the driver, in pieces.

Delta mirrors are written by tasks that have some of the keys each (`jobs.apply.buckets`), or some
of the rows if there is no key (`jobs.apply.keyless`). The log is read again, and its events are
sorted by key, if they need another form (`jobs.apply.cut_events`), and if a bucket of keys does not
fit into memory. Events that these can't reduce go through the
driver: there the sink gathers them, and holds the cut's change of each key, or of a history every
change.
"""

from __future__ import annotations

import uuid
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.functions import expr

from cdc import failpoints
from cdc.events import TRUNCATE_KEY, row_key
from cdc.log import names
from cdc.log.partitions import OffsetRange
from lockstep.jobs.apply.divided import divided
from lockstep.jobs.copying.driving import translated
from lockstep.jobs.cuts.by_key import every
from lockstep.jobs.cuts.pieces import pieces
from lockstep.jobs.cuts.reduce import Bounds, completed, newest, parsed
from lockstep.jobs.spark.kafka_options import carried, reading
from lockstep.sinks.contract import Changes, WrittenByTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.ranges import RangeReader
    from lockstep.jobs.apply.applying import Applying
    from lockstep.jobs.apply.cut_events import TableShare
    from lockstep.jobs.apply.divided import Divided, PartCount
    from lockstep.jobs.cuts.cutting import Cut, CutPart
    from lockstep.jobs.cuts.dead_letters import CutLetters
    from lockstep.jobs.cuts.pieces import Piece
    from lockstep.jobs.cuts.schemas import Schemas
    from lockstep.sinks.contract import Altered, Change, Sink, Version
    from lockstep.sinks.delta.actions import Action

# The size of one of the partitions that events are sorted into: the driver's JVM holds several
# copies of it.
SORTED_BYTES: Final = 16 << 20
# The size of a batch from the JVM to Python.
_ARROW_BYTES: Final = 8 << 20
_ARROW_ROWS: Final = 10_000

# As `cdc.events.row_key`.
_ROW_KEY: Final = f"IF(key = X'{TRUNCATE_KEY.hex()}', NULL, key)"
_IS_TRUNCATE: Final = """key IS NULL AND value IS NOT NULL
    AND get_json_object(IF(key IS NULL, CAST(value AS STRING), NULL), '$.op') = 't'"""


class Counted(NamedTuple):
    """The first reading's result for a table."""

    in_order: bool
    by_key: bool  # sorted by key and seq, each key can be reduced on its own
    dead: bool  # an event points to a dead letter
    old: bool  # rows without a key are updated or deleted
    truncated: int | None  # the seq of the last truncate
    versions: tuple[Version, ...]
    bytes: int


class Large:
    """Applies large cuts with one sink."""

    def __init__(
        self,
        config: Config,
        sink: Sink,
        schemas: Schemas,
        applying: Applying,
        reader: RangeReader,
    ) -> None:
        self._config, self._sink, self._schemas = config, sink, schemas
        self._applying, self._reader = applying, reader
        self._histories = sink.histories()

    def apply(
        self,
        spark: SparkSession,
        cut: Cut,
        letters: CutLetters,
        miscounted: Callable[[Cut, CutPart, int], Exception],
        altered: Mapping[str, Sequence[Altered]],
        *,
        torn: bool,
    ) -> tuple[set[str], int]:
        """Apply the cut to the store, except for `commit`; return the tables and the bytes.

        `spark` must be the active session: Spark finds data sources only there.
        """
        self._spark = spark
        own = f"{self._config.prefix}.cdc."
        parts = [part for part in cut.parts if not part.topic.startswith(own)]
        try:
            events, tables = self._count(cut, parts, altered, miscounted)
            failpoints.reach("follow_read")
            for topic in altered:
                plain_count = tables.get(topic) or self._counted(cut, topic, [])
                tables[topic] = plain_count._replace(in_order=True)
            versions = [each for counted in tables.values() for each in counted.versions]
            self._applying.begin(cut.seq, versions, altered.values())
            by_key = self._write_by_key(cut, parts, events, tables, altered)
            left = [part for part in parts if part.topic not in by_key]
            plain = [part for part in left if not tables[part.topic].in_order]
            if self._sink.parallel:
                self._write_in_tasks(cut, plain, tables)
            else:
                self._write_here(cut, plain)
            for topic, counted in tables.items():
                if counted.in_order and topic not in by_key:
                    mine = [part for part in parts if part.topic == topic]
                    self._write_in_order(
                        cut, topic, mine, counted.bytes, letters, altered.get(topic, ()), torn=torn
                    )
                failpoints.reach("follow_written")
        except (PySparkException, Py4JJavaError) as error:
            raise translated(error) from error
        size = sum(counted.bytes for counted in tables.values())
        named = {version.name for version in versions}
        return named | {its[-1].version.name for its in altered.values()}, size

    # -- the first reading -------------------------------------------------------------------------

    def _read(self, parts: Iterable[CutPart]) -> DataFrame:
        options = reading(self._config, self._remaining(parts))
        frame = self._spark.read.format("kafka").options(**options).load()
        return frame.withColumn("key", expr(_ROW_KEY))

    def _remaining(self, parts: Iterable[CutPart]) -> dict[Partition, OffsetRange]:
        """Return what retention has left of each partition's range."""
        ranges = {(part.topic, part.partition): OffsetRange(part.start, part.end) for part in parts}
        return {place: self._reader.remaining(place, each) for place, each in ranges.items()}

    def _count(
        self,
        cut: Cut,
        parts: list[CutPart],
        altered: Collection[str],
        miscounted: Callable[[Cut, CutPart, int], Exception],
    ) -> tuple[Divided, dict[str, Counted]]:
        """Return the cut's events, and what they are by topic; raise unless all are there."""
        left = self._remaining(parts)
        many = {(part.topic, part.partition): part.events for part in parts}
        events = divided(
            self._spark.sparkContext,
            carried(self._config),
            {place: (wanted, many[place]) for place, wanted in left.items()},
            self._in_buckets(cut, parts, altered),
        )
        found = events.parts
        self._schemas.refresh()
        for part in parts:
            place = (part.topic, part.partition)
            if part.events != found[place].events:
                self._reader.expect_complete(place, OffsetRange(part.start, part.end))
                raise miscounted(cut, part, found[place].events)
        by_topic: dict[str, list[PartCount]] = {part.topic: [] for part in parts}
        for (topic, _), count in found.items():
            if count.events:
                by_topic[topic].append(count)
        tables = {topic: self._counted(cut, topic, counts) for topic, counts in by_topic.items()}
        return events, tables

    def _in_buckets(
        self, cut: Cut, parts: Iterable[CutPart], altered: Collection[str]
    ) -> list[str]:
        """Return the topics whose events tasks can take as the log has them, by key."""
        dead = names.dead_topic(self._config.prefix)
        if not isinstance(self._sink, WrittenByTasks) or any(p.topic == dead for p in cut.parts):
            return []
        return sorted({part.topic for part in parts} - {*altered})

    def _counted(self, cut: Cut, topic: str, rows: list[PartCount]) -> Counted:
        ids, epochs = set(), set()
        for row in rows:
            # Epochs and versions ascend in a partition, so its first and last event have the lowest
            # and highest.
            for value in (row.first, row.last):
                source = parsed(value).source
                Bounds(cut.above, cut.seq).check(source.seq)
                ids.add(source.schema_id)
                epochs.add(source.epoch)
        name = names.table_name(self._config.prefix, topic)
        in_order = (
            any(row.loose or row.dead or row.moved for row in rows)
            or name in self._histories
            # With several epochs a key's events are in several partitions, and no task has all of
            # them. The frontiers do not show this: the first may count events of two epochs.
            or len(epochs) > 1
        )
        by_key = not any(row.moved for row in rows)
        dead, old = any(row.dead for row in rows), any(row.old for row in rows)
        truncated = max((row.truncated or 0 for row in rows), default=0) or None
        versions = self._schemas.between(topic, min(ids), max(ids)) if ids else ()
        size = sum(row.size for row in rows)
        return Counted(in_order, by_key, dead, old, truncated, versions, size)

    # -- the second --------------------------------------------------------------------------------

    def _write_by_key(
        self,
        cut: Cut,
        parts: list[CutPart],
        events: Divided,
        tables: Mapping[str, Counted],
        altered: Mapping[str, Sequence[Altered]],
    ) -> set[str]:
        """Write the tables whose files tasks can write; return their topics."""
        sink = self._sink
        if not isinstance(sink, WrittenByTasks):
            return set()
        from lockstep.jobs.apply import buckets  # noqa: PLC0415 - of the extra `spark`

        shares = self._shares(sink, cut, parts, tables, altered)
        ready: dict[str, TableShare] = {}
        left: dict[str, TableShare] = {}
        for topic, share in shares.items():
            is_plain = not (tables[topic].dead or share.changes_form)
            in_buckets = is_plain and share.target.key and events.is_in_memory(topic)
            (ready if in_buckets else left)[topic] = share
        bounds = Bounds(cut.above, cut.seq)
        found = buckets.write_divided(self._spark.sparkContext, events, ready, bounds)
        if left:
            found |= self._write_sorted(cut, parts, tables, left)
        for topic, actions in found.items():
            sink.stage(shares[topic].target, actions)
        return set(shares)

    def _write_sorted(
        self,
        cut: Cut,
        parts: list[CutPart],
        tables: Mapping[str, Counted],
        shares: Mapping[str, TableShare],
    ) -> dict[str, list[Action]]:
        """Read the events of these topics again, and have Spark sort and tasks write them."""
        from lockstep.jobs.apply import buckets, keyless  # noqa: PLC0415 - of the extra `spark`

        self._limit_batches(cut, tables)
        letters = None
        if any(tables[topic].dead for topic in shares):
            dead = names.dead_topic(self._config.prefix)
            letters = self._read([part for part in cut.parts if part.topic == dead])
        found: dict[str, list[Action]] = {}
        for has_key, write in ((True, buckets.write), (False, keyless.write)):
            some = {t: share for t, share in shares.items() if bool(share.target.key) == has_key}
            if some:
                mine = self._read([part for part in parts if part.topic in some])
                events = mine.where("value IS NOT NULL").select("topic", "key", "value")
                found |= write(events, some, Bounds(cut.above, cut.seq), letters)
        return found

    def _shares(
        self,
        sink: WrittenByTasks,
        cut: Cut,
        parts: list[CutPart],
        tables: Mapping[str, Counted],
        altered: Mapping[str, Sequence[Altered]],
    ) -> dict[str, TableShare]:
        """Return the parts of the cut that tasks can write, by topic."""
        from lockstep.jobs.apply.cut_events import TableShare  # noqa: PLC0415 - of the extra `spark`

        shares = {}
        for topic, counted in tables.items():
            if counted.by_key and counted.versions:
                its, truncates = altered.get(topic, ()), self._truncates(cut, parts, topic, counted)
                target = sink.target(counted.versions, cut.seq, counted.truncated, truncates, its)
                if target is not None:
                    every = (*counted.versions, *(each.version for each in its))
                    newest = max(each.schema_id for each in every)
                    known = self._schemas.known(topic)
                    shares[topic] = TableShare(
                        target,
                        {id_: each for id_, each in known.items() if id_ <= newest},
                        counted.truncated,
                        counted.bytes,
                        counted.old,
                        its,
                    )
        return shares

    def _truncates(
        self, cut: Cut, parts: list[CutPart], topic: str, counted: Counted
    ) -> list[Change]:
        """Return the truncates of a table with a history, which end rows of every key."""
        is_history = names.table_name(self._config.prefix, topic) in self._histories
        if counted.truncated is None or not is_history:
            return []
        mine = self._read([part for part in parts if part.topic == topic])
        values = mine.where(_IS_TRUNCATE).select("value").collect()
        events = [None] * len(values), [bytes(row.value) for row in values]
        return list(chain.from_iterable(every([events], Bounds(cut.above, cut.seq))))

    def _limit_batches(self, cut: Cut, tables: Mapping[str, Counted]) -> None:
        """Limit the size of the batches that the JVM passes to Python."""
        size = sum(counted.bytes for counted in tables.values())
        rows = max(16, min(_ARROW_ROWS, int(_ARROW_BYTES * cut.events / max(1, size))))
        self._spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(rows))
        # Single events may be much larger than the average.
        self._spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(_ARROW_BYTES))

    def _write_in_tasks(
        self, cut: Cut, parts: list[CutPart], tables: Mapping[str, Counted]
    ) -> None:
        if not parts:
            return
        self._limit_batches(cut, tables)
        known = {topic: self._schemas.known(topic) for topic in tables}
        task = WriteTask(self._sink, Bounds(cut.above, cut.seq), known)
        events = self._read(parts).where("value IS NOT NULL").select("topic", "key", "value")
        # A separate class for each cut: its content goes to executors pickled, and is in no option,
        # plan or log of Spark's. A name can be registered only once.
        name = f"lockstep_cut_{uuid.uuid4().hex}"
        target = {"task": task, "name": classmethod(lambda _: name)}
        self._spark.dataSource.register(type("Cut", (TaskTarget,), target))
        events.write.format(name).mode("append").save()

    def _write_here(self, cut: Cut, parts: list[CutPart]) -> None:
        bounds, known = Bounds(cut.above, cut.seq), self._schemas.known
        for part in parts:
            ranges = {(part.topic, part.partition): OffsetRange(part.start, part.end)}
            messages = (
                (row_key(message.key()), message.value())
                for _, found in self._reader.pieces(ranges)
                for message in found
            )
            for keys, values in pieces(messages):
                write(self._sink, (keys, values), bounds, known(part.topic))

    def _write_in_order(
        self,
        cut: Cut,
        topic: str,
        parts: list[CutPart],
        size: int,
        letters: CutLetters,
        altered: Sequence[Altered],
        *,
        torn: bool,
    ) -> None:
        bounds = Bounds(cut.above, cut.seq)
        if altered:
            self._applying.alter(
                topic,
                partial(self._in_order, parts, size),
                bounds,
                altered,
                letter=letters.event,
                quick=False,
                torn=torn,
            )
            return
        for piece in self._in_order(parts, size, bounds):
            table = self._applying.reduce(
                topic,
                piece,
                bounds,
                name=names.table_name(self._config.prefix, topic),
                letter=letters.event,
                quick=False,
                torn=torn,
            )
            self._applying.write_table(table)

    def _in_order(self, parts: list[CutPart], size: int, bounds: Bounds) -> Iterator[list[Piece]]:
        """Yield the events of a part of the cut in pieces, sorted by seq."""
        if not parts:
            return
        count = 1 + size // SORTED_BYTES
        events = (
            self._read(parts)
            .where("value IS NOT NULL")
            .selectExpr(
                "key",
                "value",
                "CAST(get_json_object(CAST(value AS STRING), '$.source.seq') AS LONG) seq",
            )
            .where(f"seq > {bounds.above} AND seq <= {bounds.upto}")
            .repartitionByRange(count, "seq")
            .sortWithinPartitions("seq")
        )
        rows = ((row.key, row.value) for row in events.toLocalIterator())
        records = ((key and bytes(key), bytes(value)) for key, value in rows)
        for piece in pieces(records, complete=True):
            yield [piece]


def write(sink: Sink, piece: Piece, bounds: Bounds, known: Mapping[int, Version]) -> int:
    """Reduce and write a piece of one partition; return how many changes were new to the store."""
    reduced = newest([piece], bounds)
    versions = tuple(known[each] for each in sorted(reduced.schema_ids))
    if sink.complete_rows:
        reduced = completed(reduced, lambda keys, _: sink.rows(versions[-1], keys))
    return sink.write(Changes(versions, reduced.changes))


class WriteTask(DataSourceArrowWriter):
    """An executor's work on a partition's events. Pickled, with the sink."""

    def __init__(
        self, sink: Sink, bounds: Bounds, known: Mapping[str, Mapping[int, Version]]
    ) -> None:
        self._sink, self._bounds, self._known = sink, bounds, known

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        topic = ""

        def records() -> Iterator[tuple[bytes | None, bytes | None]]:
            nonlocal topic
            for batch in iterator:
                if batch.num_rows:
                    topic = batch.column("topic")[0].as_py()
                yield from zip(
                    batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True
                )

        with closing(self._sink) as sink:
            for piece in pieces(records()):
                write(sink, piece, self._bounds, self._known[topic])
        return WriterCommitMessage()


class TaskTarget(DataSource):
    """The Spark data source to which a cut's events are "written": the sink, in tasks."""

    task: WriteTask

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: ARG002, FBT001 - Spark's
        return self.task
