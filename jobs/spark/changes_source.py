"""The Spark data source `lockstep`: the changes between two frontiers of the log, as rows.

`spark.read.format("lockstep")` reads from one frontier to another, `spark.readStream` follows. An
offset of a stream is a frontier, so a checkpoint can be read again, and so can the frontier that a
store keeps (column `frontier`, option `from`). The driver only plans: it reads frontier records,
and executors read the events.

A task holds its events back, on disk if they are many, until their number is what the frontier
records count: none of a range that lost records is ever returned. A task's range is at most
`split_events` events of frontiers that lie in sequence, and never less than one frontier's.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from cdc.config import load
from cdc.errors import CDCError, ConfigError, GapError, UnavailableError
from cdc.events import LSN, row_key
from cdc.log import compaction, names
from cdc.log.frontier_tail import FrontierTail, expect_frontier
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from cdc.log.reader import read_schemas
from lockstep.jobs.cuts import frontiers
from lockstep.jobs.cuts.changes import ChangeEvent, event, net
from lockstep.jobs.cuts.cutting import Cut, CutPart, Cutter, Limits
from lockstep.jobs.cuts.dead_letters import CutLetters
from lockstep.jobs.cuts.reduce import Bounds, parsed
from lockstep.jobs.cuts.schemas import Schemas, version
from lockstep.jobs.cuts.spool import PieceSpool
from lockstep.jobs.spark import change_rows
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cdc.config import Config
    from cdc.log.records import FrontierRecord
    from lockstep.sinks.contract import Version

NAME: Final = "lockstep"
OPTIONS: Final = ("config", "tables", "from", "to", "changes", "max_events", "split_events")
_SPLIT_EVENTS: Final = 200_000
_MAX_EVENTS: Final = 2_000_000
_POLL_SECONDS: Final = 0.25
_BATCH_ROWS: Final = 4_000
# A bucket of keys is folded in memory: about 100 MB as Python objects.
_BUCKET_EVENTS: Final = 50_000
_NO_LIMIT: Final = 1 << 60
_SILENCE_SECONDS: Final = 30.0


# Returns the error of a compacted range with where its reader may start.
Remedy: TypeAlias = "Callable[[Config, CDCError], CDCError]"


class SourceOptions(NamedTuple):
    """What the options ask for."""

    config: Config
    tables: tuple[str, ...]  # topics
    start: frontiers.Position
    end: frontiers.Position
    net: bool
    max_events: int
    split_events: int

    def follows(self, topic: str) -> bool:
        return topic in self.tables or topic == names.dead_topic(self.config.prefix)


def wanted(options: Mapping[str, str]) -> tuple[SourceOptions, dict[str, list[Version]]]:
    """Return what the options ask for, and the versions of each of its tables, by topic.

    Raises ConfigError for an option that is wrong.
    """
    unknown = sorted({each.lower() for each in options} - set(OPTIONS) - {"path"})
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}", hint=f"there are {', '.join(OPTIONS)}")
    config = load(Path(options.get("config", "lockstep.yaml")))
    changes = options.get("changes", "all")
    if changes not in {"all", "net"}:
        raise ConfigError(f"option changes is {changes!r}", hint="it is `all` or `net`")
    versions: dict[str, list[Version]] = {}
    for record in read_schemas(config):
        versions.setdefault(record.topic, []).append(version(record))
    there = {names.table_name(config.prefix, topic): topic for topic in versions}
    asked = [each.strip() for each in options.get("tables", "").split(",") if each.strip()]
    missing = [each for each in asked if each not in there]
    if missing or not there:
        raise ConfigError(
            f"the log has no table {missing[0]}" if missing else "the log has no table yet",
            hint=f"it has {', '.join(sorted(there)) or 'none before its first row'}; names are"
            " schema.table, separated by commas",
        )
    tables = tuple(there[each] for each in asked or sorted(there))
    found = SourceOptions(
        config,
        tables,
        frontiers.parse(options.get("from", frontiers.BEGINNING)),
        frontiers.parse(options.get("to", frontiers.LATEST)),
        changes == "net",
        _number(options, "max_events", _MAX_EVENTS),
        _number(options, "split_events", _SPLIT_EVENTS),
    )
    return found, {topic: versions[topic] for topic in tables}


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"option {name} is {text!r}", hint="it is a number of events, from 1 on")
    return int(text)


def _unchanged(_: Config, error: CDCError) -> CDCError:
    return error


class ChangesSource(DataSource):
    """Options: docs/SPARK.md."""

    remedy: Remedy = staticmethod(_unchanged)

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        asked, versions = wanted(self.options)
        prefix = asked.config.prefix
        return change_rows.schema(
            {names.table_name(prefix, topic): each for topic, each in versions.items()}
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(wanted(self.options)[0], schema, self.remedy)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        return StreamReader(wanted(self.options)[0], schema, self.remedy)


# -- planning: from frontier records to tasks ------------------------------------------------------


class SeqSpan(NamedTuple):
    """Parts of a topic's partitions; their events have seqs above the first, up to the second."""

    above: int
    upto: int
    parts: tuple[CutPart, ...]


class ReadTask(InputPartition):
    """What one task reads; pickled."""

    def __init__(
        self,
        topic: str,
        spans: Sequence[SeqSpan],
        versions: Mapping[int, Version],
        letters: OffsetRange | None,
        frontier: int,
        floor: int | None,
    ) -> None:
        """`letters` is the batch's range of dead letters, `frontier` the seq at its end.

        `floor`, of net changes only, is the seq of the newest truncate, or 0.
        """
        self.topic, self.spans, self.versions = topic, spans, versions
        self.letters, self.frontier, self.floor = letters, frontier, floor

    @property
    def events(self) -> int:
        return sum(part.events for span in self.spans for part in span.parts)


class CutBatch(NamedTuple):
    """Cuts in sequence, and the epochs in which their events were written."""

    cuts: list[Cut]
    epochs: frozenset[int]


class Planner:
    """Plans batches of events, from one frontier to later ones."""

    def __init__(self, asked: SourceOptions, at: Applied, through: LSN | None = None) -> None:
        """`at` is where the first batch starts; none ends above `through`."""
        self.at = at
        self._asked = asked
        self._tail: FrontierTail | None = None
        self._epochs = {at.epoch or 1}
        self._cutter = Cutter(
            at, asked.follows, Limits(asked.split_events, _NO_LIMIT), through=through
        )

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()

    def batch(self, most: int, until: int | None = None) -> CutBatch:
        """Return the next cuts: of up to about `most` events, of what the log has now.

        Given `until`, an offset of the frontier topic, it waits for the records before that.
        """
        cuts: list[Cut] = []
        place, events = self.at.place, 0
        while events < most and (until is None or place < until):
            records = self._arrivals(until)
            if not records:
                break
            for record, offset in records:
                self._epochs.add(record.epoch)
                self._cutter.add(record, offset)
                place = offset + 1
                events += sum(n for topic, *_, n in record.partitions if self._asked.follows(topic))
            while self._cutter.has_enough and (cut := self._cutter.take(0.0)):
                cuts.append(cut)
        while cut := self._cutter.take(0.0):
            cuts.append(cut)
        epochs = frozenset(self._epochs)
        if cuts:
            last = cuts[-1]
            self.at = self.at._replace(
                epoch=last.epoch, lsn=last.lsn, seq=last.seq, place=last.place
            )
            self._epochs = {last.epoch}
        return CutBatch(cuts, epochs)

    def _arrivals(self, until: int | None) -> list[tuple[FrontierRecord, int]]:
        """Return the next records, none if there are none now; wait for those before `until`.

        Raises GapError if the last one before `until` is not there, and later ones are.
        """
        if self._tail is None:
            self._tail = FrontierTail(self._asked.config, self.at.place, self.at.seq)
        deadline = time.monotonic() + (_POLL_SECONDS if until is None else _SILENCE_SECONDS)
        while True:
            records = list(self._tail.arrivals(_POLL_SECONDS))
            if records:
                kept = [each for each in records if until is None or each[1] < until]
                if until is not None and len(kept) < len(records):
                    self._expect_end(kept, until)
                return kept
            if time.monotonic() >= deadline:
                break
        if until is None:
            return []
        raise UnavailableError(
            f"the frontier at offset {until - 1} has not come for {_SILENCE_SECONDS:.0f} s",
            hint="see that the brokers run",
        )

    def _expect_end(self, kept: list[tuple[FrontierRecord, int]], until: int) -> None:
        if kept and kept[-1][1] == until - 1:
            return
        topic, above = names.frontier_topic(self._asked.config.prefix), self.at.seq
        raise GapError(
            f"{topic} has no frontier at offset {until - 1}, where one was: nothing shows where the"
            f" events after seq {kept[-1][0].seq if kept else above} end",
            hint="the topic was created again: `cdc status` shows whether the log is complete; then"
            f" start from {frontiers.EARLIEST} or a later frontier, and request the rows that are"
            " missing: `cdc snapshot TABLE`",
        )


def tasks(asked: SourceOptions, batch: CutBatch) -> list[ReadTask]:
    """Return the tasks that read a batch.

    There is one for each topic and cut, or one a partition if the cut is large; of net changes one
    for each partition, which has all events of its keys. If partitions were added in between, the
    net changes of a table are one task.
    """
    dead = names.dead_topic(asked.config.prefix)
    letters: OffsetRange | None = None
    spans: dict[tuple[str, int, int], list[SeqSpan]] = {}
    for number, cut in enumerate(batch.cuts):
        is_large = cut.events > asked.split_events // 2
        for part in cut.parts:
            if part.topic == dead:
                letters = OffsetRange(letters.start if letters else part.start, part.end)
                continue
            apart = len(batch.epochs) == 1 if asked.net else is_large
            own = part.partition if apart else -1
            kept = spans.setdefault((part.topic, 0 if asked.net else number, own), [])
            if kept and kept[-1].upto == cut.seq:
                kept[-1] = kept[-1]._replace(parts=(*kept[-1].parts, part))
            else:
                kept.append(SeqSpan(cut.above, cut.seq, (part,)))
    if not spans:
        return []
    schemas = Schemas(asked.config)
    schemas.refresh()
    floors = _floors(asked, batch.cuts) if asked.net else None
    return [
        ReadTask(
            topic,
            each,
            schemas.known(topic),
            letters,
            batch.cuts[-1].seq,
            None if floors is None else floors.get(topic, 0),
        )
        for (topic, *_), each in spans.items()
    ]


def _floors(asked: SourceOptions, cuts: Iterable[Cut]) -> dict[str, int]:
    """Return the seq of each topic's newest truncate: an event without a key, in partition 0."""
    found: dict[str, int] = {}
    with closing(RangeReader(asked.config)) as log:
        for cut in cuts:
            first = {
                (part.topic, 0): OffsetRange(part.start, part.end)
                for part in cut.parts
                if part.partition == 0 and part.topic in asked.tables
            }
            for (topic, _), messages in log.pieces(first):
                for message in messages:
                    value = message.value()
                    if row_key(message.key()) is None and value is not None:
                        each = parsed(value)
                        if each.op != "t":
                            raise ConfigError(
                                f"{topic} has events without a key, so none replaces another",
                                hint="read such a table with changes=all",
                            )
                        if each.source.seq > cut.above:
                            found[topic] = each.source.seq
    return found


# -- reading, in tasks -----------------------------------------------------------------------------


class _Reader:
    """Reads tasks; pickled to executors, with the configuration that connects to the brokers."""

    def __init__(self, asked: SourceOptions, schema: StructType, remedy: Remedy) -> None:
        self._asked, self._schema, self._remedy = asked, schema, remedy

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Of an empty range, Spark asks for a partition of its own.
        return self._rows(partition) if isinstance(partition, ReadTask) else iter(())

    def _rows(self, task: ReadTask) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows, once all its events are known to be there."""
        prefix = self._asked.config.prefix
        table = names.table_name(prefix, task.topic)
        buckets = 1 if task.floor is None else max(1, math.ceil(task.events / _BUCKET_EVENTS))
        writer = change_rows.BatchWriter(self._schema, task.versions, task.frontier)
        with (
            closing(RangeReader(self._asked.config)) as log,
            closing(RangeReader(self._asked.config)) as other,
            PieceSpool(buckets) as spool,
        ):
            letters = CutLetters(other, (names.dead_topic(prefix), 0), task.letters)
            for span in task.spans:
                self._keep(log, span, spool)
            bounds = Bounds(task.spans[0].above, task.spans[-1].upto)
            for bucket in spool.buckets():
                events = self._events(bucket, bounds, task, letters)
                chosen = events if task.floor is None else net(events, task.floor)
                for rows in _batched(chosen):
                    yield writer.batch(table, rows)

    def _keep(self, log: RangeReader, span: SeqSpan, spool: PieceSpool) -> None:
        """Put a span's events into the spool; raise GapError if they are not as many as counted."""
        ranges = {
            (part.topic, part.partition): OffsetRange(part.start, part.end) for part in span.parts
        }
        found = dict.fromkeys(ranges, 0)
        for place, messages in log.pieces(ranges):
            # If no remaining frontier names an earlier end, reading starts at the partition's
            # beginning, and what is before the span is left out.
            complete = span.above == 0 or ranges[place].start > 0
            kept = [
                (row_key(message.key()), value)
                for message in messages
                if (value := message.value()) is not None
                and (complete or parsed(value).source.seq > span.above)
            ]
            found[place] += len(kept)
            if kept:
                spool.add([key for key, _ in kept], [value for _, value in kept])
        for part in span.parts:
            place = (part.topic, part.partition)
            if found[place] != part.events:
                raise self._incomplete(log, span, part, found[place])

    def _incomplete(self, log: RangeReader, span: SeqSpan, part: CutPart, found: int) -> CDCError:
        """Return the error for a part whose events are not as many as counted."""
        place = (part.topic, part.partition)
        deleted = _deleted(log, place, OffsetRange(part.start, part.end))
        what = (
            f"holds {found} events from offset {part.start} to {part.end - 1}, where the frontiers"
            f" of seq {span.above + 1} to {span.upto} count {part.events}{deleted}"
        )
        if found < part.events and not deleted:
            compacted = compaction.explained(self._asked.config, place, what)
            if compacted is not None:
                return self._remedy(self._asked.config, compacted)
        return GapError(
            f"{part.topic} [{part.partition}] {what}",
            hint=f"start from {frontiers.EARLIEST} or a later frontier, and request the rows that"
            " are missing: `cdc snapshot TABLE`",
        )

    @staticmethod
    def _events(
        pieces: Iterable[tuple[list[bytes | None], list[bytes]]],
        bounds: Bounds,
        task: ReadTask,
        letters: CutLetters,
    ) -> Iterator[ChangeEvent]:
        for keys, values in pieces:
            for key, value in zip(keys, values, strict=True):
                found = event(key, value, letters.event)
                bounds.check(found.source.seq)
                if found.source.schema_id not in task.versions:
                    raise GapError(
                        f"events of {task.topic} are of table version {found.source.schema_id},"
                        " which the log does not have",
                        hint="the topic of table versions lost records: it must be compacted, never"
                        " emptied",
                    )
                yield found


def _deleted(log: RangeReader, place: tuple[str, int], there: OffsetRange) -> str:
    """Return which offsets of a range the topic no longer has, if any."""
    try:
        log.expect_complete(place, there)
    except GapError as error:
        return f": {error.what}"
    return ""


def _batched(events: Iterable[ChangeEvent]) -> Iterator[list[ChangeEvent]]:
    rows: list[ChangeEvent] = []
    for each in events:
        rows.append(each)
        if len(rows) == _BATCH_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


class BatchReader(_Reader, DataSourceReader):
    """From one frontier to another."""

    def partitions(self) -> Sequence[InputPartition]:
        with closing(frontiers.FrontierFinder(self._asked.config)) as log:
            start, end = log.find(self._asked.start), log.find(self._asked.end)
        if start.seq > end.seq:
            raise ConfigError(
                f"`from` is {start.lsn}, seq {start.seq}, after `to`, {end.lsn}, seq {end.seq}",
                hint="exchange them",
            )
        with closing(Planner(self._asked, start)) as planner:
            return tasks(self._asked, planner.batch(_NO_LIMIT, end.place))


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows the log; all but `read` runs in one process alongside the driver."""

    def __init__(self, asked: SourceOptions, schema: StructType, remedy: Remedy) -> None:
        super().__init__(asked, schema, remedy)
        self._planner: Planner | None = None
        # The last planned batch, by its start and end.
        self._planned: tuple[dict[str, Any], dict[str, Any], CutBatch] | None = None
        self._end: Applied | None = None  # of Trigger.AvailableNow

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        return _offset(frontiers.find(self._asked.config, self._asked.start))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        return ReadMaxRows(self._asked.max_events)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        self._end = frontiers.find(self._asked.config, self._asked.end)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's
        """Return a later frontier, about as many events away as the limit; `start` if none came."""
        planner = self._planner_at(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else _NO_LIMIT
        if self._end is not None:
            most = self._asked.max_events
        batch = planner.batch(most, None if self._end is None else self._end.place)
        if not batch.cuts:
            return start
        self._planned = (start, _offset(planner.at), batch)
        return self._planned[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        if self._planned is not None and self._planned[:2] == (start, end):
            return tasks(self._asked, self._planned[2])
        # A batch of the checkpoint, planned before this process was started.
        with closing(Planner(self._asked, self._frontier(start))) as planner:
            return tasks(self._asked, planner.batch(_NO_LIMIT, int(end["place"])))

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def _planner_at(self, start: dict[str, Any]) -> Planner:
        if self._planner is None or _offset(self._planner.at) != start:
            self.stop()
            end = self._end
            if end is None and self._asked.end != frontiers.LATEST:
                end = frontiers.find(self._asked.config, self._asked.end)
            self._planner = Planner(
                self._asked, self._frontier(start), None if end is None else end.lsn
            )
        return self._planner

    def _frontier(self, start: dict[str, Any]) -> Applied:
        """Return the frontier of an offset; raise GapError if the log has not, or another there."""
        config, seq = self._asked.config, int(start["seq"])
        if not seq:
            return frontiers.find(config, frontiers.BEGINNING)
        expect_frontier(
            config,
            int(start["place"]),
            (start["epoch"], LSN.parse(start["lsn"]), seq),
            "the stream's checkpoint",
            "it read another log: one that was set up before, or of a database that was restored"
            " since. Start with a new checkpoint, and with an empty store",
        )
        return frontiers.find(config, seq)


def _offset(at: Applied) -> dict[str, Any]:
    return {"place": at.place, "epoch": at.epoch, "lsn": str(at.lsn), "seq": at.seq}
