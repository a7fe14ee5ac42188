"""Fill an empty store from the newest base and the archive after it: a follower's bootstrap.

The store gets the rows of all its tables as one cut that ends at an archived frontier, and is at
that frontier then. The topics continue it from there; before anything is written, the seam is
checked: the log must have that frontier, with the same seq and chain, or the one that follows it.

Killed before its end, the store is at no frontier, and is filled again from scratch. Large tables
are read and written by executors, where the sink allows it.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc import failpoints
from cdc.errors import CDCError, ConfigError, GapError
from cdc.log import names
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from cdc.log.records import FrontierRecord, decode
from cdc.verify.digests import FrontierChain
from lockstep.jobs.compacting import past
from lockstep.jobs.compacting.changes import PastChanges
from lockstep.jobs.compacting.older import OlderEvents
from lockstep.jobs.compacting.slices import PastTables
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.direct_tables import direct, recorded_if_reachable
from lockstep.jobs.cuts.schemas import key_forms
from lockstep.sinks.contract import Changes, WrittenByTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.compacting.frontiers import ArchivedFrontier
    from lockstep.jobs.compacting.past import PastState
    from lockstep.jobs.compacting.slices import Slice
    from lockstep.jobs.cuts.frontiers import Position
    from lockstep.sinks.contract import Applied, Sink, Version

# With more rows than this, executors write.
LARGE_ROWS: Final = 500_000
# How many offsets of the frontier topic are searched at once for the first record.
_SEARCHED: Final = 1_000


class FillStart(NamedTuple):
    """From where a follower can be filled, and the tables that it takes from there."""

    state: PastState
    topics: frozenset[str]

    @property
    def name(self) -> str:
        """What it starts from, for people."""
        base = self.state.base
        at = self.state.frontier.applied
        source = f"base {base.number} at {base.lsn}" if base else "the archive's beginning"
        return f"{source}, and the archive up to {at.lsn} (seq {at.seq})"


def start_of(config: Config, name: str, wanted: Position | None = None) -> FillStart:
    """Return from where the follower can be filled, up to the frontier `wanted` or the newest.

    Raises ConfigError if it can't, and GapError if the archive has no such frontier.
    """
    state = past.find(config, wanted)
    if state is None:
        raise past.missing_frontier(wanted)
    chosen = Chosen(config, config.followers[name])
    older = OlderEvents(PastTables(state.past))
    # A table without rows, too: stores that have followed the log have it.
    topics = frozenset(topic for topic in older.topics() if chosen.follows(topic))
    found = unreadable(config, older, topics & state.rows.keys(), recorded_if_reachable(config))
    if found:
        raise ConfigError(
            f"{name} can't be filled from the archive: {'; '.join(found)}",
            hint="`cdc rebuild` reads these rows again, with a daemon that streams",
        )
    return FillStart(state, topics)


def unreadable(
    config: Config, older: OlderEvents, topics: frozenset[str], known: Collection[str]
) -> list[str]:
    """Return why these tables are not in the archive completely, or can't be read from it.

    `known` has the topics of those that were copied directly, by the log's record.
    """
    found = []
    keys = key_forms(older.every_version().values())
    for topic in sorted(topics):
        table = names.table_name(config.prefix, topic)
        if len(keys.get(topic, ())) > 1:
            found.append(f"{table} had another key before")
        if direct(config, [topic], known):
            found.append(f"{table} was copied directly, not through the log")
    return found


def possible(
    config: Config, name: str, sink: Sink, wanted: Position | None = None
) -> FillStart | None:
    """Return from where the follower can be filled; None if there is no archive, or not from it."""
    if config.archive.path is None or config.followers[name].documents or sink.histories():
        return None
    try:
        return start_of(config, name, wanted)
    except (ConfigError, GapError):
        return None


def with_start(config: Config, name: str, sink: Sink, error: CDCError) -> CDCError:
    """Return a gap with the base and archive that the follower can start from; others unchanged."""
    if not isinstance(error, GapError):
        return error
    try:
        start = possible(config, name, sink)
    except CDCError:
        return error  # the storage can't be reached: the gap is what the person must know
    if start is None:
        return error
    hint = f"`cdc rebuild {name}` fills the store from {start.name}, then from the topics"
    return type(error)(error.what, hint=f"{error.hint}. {hint}")


class Restoring:
    """Fills one store."""

    def __init__(
        self,
        config: Config,
        name: str,
        start: FillStart,
        spark: Callable[[], SparkSession] | None,
        progress: Callable[[str], None],
    ) -> None:
        """`spark` starts a session for large tables; without it this process takes them."""
        self._config, self._start, self._spark = config, start, spark
        self._chosen = Chosen(config, config.followers[name])
        self._progress = progress
        self._reader = PastChanges(start.state.past)

    def fill(
        self,
        sink: Sink,
        generation: int,
        tables: frozenset[str] | None = None,
        *,
        joins: bool = True,
    ) -> Applied:
        """Fill an open, empty store, `tables` only if given; return its frontier.

        `joins`: the topics continue it, which is checked before anything is written.
        """
        frontier = self._start.state.frontier
        if joins:
            expect_seam(self._config, frontier)
        self._progress(f"filled from {self._start.name}")
        applied = frontier.applied._replace(
            generation=generation,
            ends={t: e for t, e in frontier.applied.ends.items() if self._follows(t)},
        )
        every = map(self._reader.older.newest_version, sorted(self._start.topics))
        versions = [each for each in every if tables is None or each.name in tables]
        sink.begin(applied.seq, versions)
        failpoints.reach("restore_started")
        for version in versions:
            self._write(sink, version, list(self._start.state.slices(frozenset({version.topic}))))
            failpoints.reach("restore_written")
        sink.commit(applied)
        failpoints.reach("restore_committed")
        return applied

    def _follows(self, topic: str) -> bool:
        own = f"{self._config.prefix}.cdc."
        kept = names.messages_topic(self._config.prefix), names.dead_topic(self._config.prefix)
        return topic in kept if topic.startswith(own) else self._chosen.follows(topic)

    def _write(self, sink: Sink, version: Version, parts: list[Slice]) -> None:
        if not parts:
            sink.write(Changes((version,), []))
            return
        rows = self._start.state.rows[version.topic]
        is_large = self._spark is not None and rows > LARGE_ROWS and bool(version.key)
        target = None
        if isinstance(sink, WrittenByTasks):
            versions = self._versions(version)
            target = sink.target(versions, self._start.state.past.seq, None)
        if target is not None or (is_large and sink.parallel):
            from lockstep.jobs.compacting import tasks  # noqa: PLC0415 - of the extra `spark`

            task = tasks.Restore(self._reader.past, sink.complete_rows, target, sink)
            if is_large:
                assert self._spark is not None
                actions = tasks.restore(self._spark(), task, parts)
            else:
                actions = [each for part in parts for each in task.written(self._reader, part)]
            if target is not None:
                assert isinstance(sink, WrittenByTasks)
                sink.stage(target, actions)
            return
        for part in parts:
            for changes in self._reader.changes(part, complete_rows=sink.complete_rows):
                sink.write(changes)

    def _versions(self, newest: Version) -> tuple[Version, ...]:
        every = self._reader.older.every_version().values()
        mine = {each.schema_id for each in every if each.topic == newest.topic}
        ids = {each for each in mine if each <= newest.schema_id}
        return self._reader.older.versions(newest.topic, ids)


def expect_seam(config: Config, frontier: ArchivedFrontier) -> None:
    """Raise GapError unless the log's records continue an archived frontier, or hold it."""
    applied, topic = frontier.applied, names.frontier_topic(config.prefix)
    found = _first(config, applied.place - 1)
    if found is None:
        return  # nothing was written since, and the topic is empty: the next record is compared
    record, offset = found
    if offset == applied.place - 1:
        same = (record.seq, record.lsn) == (applied.seq, applied.lsn)
        if same and record.chain == frontier.chain:
            return
        what = f"has {record.lsn}, seq {record.seq}" + " with another chain" * same
    else:
        differences = FrontierChain(frontier.chain, applied.seq).add(record)
        if not differences:
            return
        what = f"continues with {record.lsn}, seq {record.seq}, which {differences[0].what}"
    raise GapError(
        f"{topic} {what} at offset {offset}, where the archive has {applied.lsn}, seq"
        f" {applied.seq}",
        hint="the log lost records before they were archived, or is another one: `cdc prove`"
        " compares both",
    )


def _first(config: Config, start: int) -> tuple[FrontierRecord, int] | None:
    """Return the first remaining frontier record from an offset on, and its offset."""
    topic = names.frontier_topic(config.prefix)
    with closing(RangeReader(config)) as consumer:
        first, end = consumer.confirmed([(topic, 0)])[topic, 0]
        for low in range(max(first, start), end, _SEARCHED):
            wanted = OffsetRange(low, min(end, low + _SEARCHED))
            read = [each for _, some in consumer.pieces({(topic, 0): wanted}) for each in some]
            for message in read:
                record = decode(FrontierRecord, message.value() or b"", topic)
                if record.pipeline == config.pipeline:
                    return record, message.offset() or 0
    return None
