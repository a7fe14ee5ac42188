"""Publish the events of a range of the past to a topic of its own, in seq order, each once.

From the archive what it holds, from the topics what comes after. Records keep their keys, bytes and
tombstones; headers have their seq, their topic, and which replay it is. Events are published a
window of seqs at a time, each window in one Kafka transaction. Where a killed replay continues is
in the topic itself: after the seq of its last committed record. A second replay into the same topic
fences the first.
"""

from __future__ import annotations

from contextlib import closing, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from cdc import failpoints
from cdc.errors import CDCError, ConfigError, GapError
from cdc.events import LSN
from cdc.log import compaction, names, topics
from cdc.log.client import MAX_MESSAGE_BYTES
from cdc.log.frontier_tail import FrontierTail
from cdc.log.partitions import OffsetRange
from cdc.log.publisher import BoundedPublisher
from cdc.log.ranges import RangeReader
from cdc.log.row_keys import one_table
from lockstep.jobs.archiving.rows import archive_topic
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import frontiers as archived
from lockstep.jobs.compacting.bases import with_base
from lockstep.jobs.compacting.frontiers import quoted
from lockstep.jobs.cuts.cutting import Cutter, Limits
from lockstep.jobs.cuts.frontiers import BEGINNING, EARLIEST, LATEST, FrontierFinder
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltalake import DeltaTable

    from cdc.config import Config
    from lockstep.jobs.cuts.cutting import Cut
    from lockstep.jobs.cuts.frontiers import Position
    from lockstep.sinks.contract import Applied

# Seqs in one Kafka transaction, and events held in memory; more if one frontier counts more.
WINDOW_EVENTS: Final = 50_000
_WINDOW_BYTES: Final = 256 << 20
_ID: Final = "lockstep.replay"
_SEQ: Final = "lockstep.seq"
_TOPIC: Final = "lockstep.topic"
_POLL_SECONDS: Final = 0.25
# How far back from its end a topic is first searched for its last record; markers have none.
_BACK: Final = 16


class RangeEnd(NamedTuple):
    """A place where a range begins or ends."""

    seq: int
    lsn: LSN
    chain: str  # of the frontier; of the log's first one if it is the beginning


class ReplayedRecord(NamedTuple):
    """A record of the past, in the order in which it is published."""

    seq: int
    offset: int  # a tombstone directly follows its delete
    topic: str
    key: bytes | None
    value: bytes | None


class Replayed(NamedTuple):
    """What a replay has done."""

    topic: str
    first: int  # the seq after which it began
    last: int
    last_lsn: LSN
    continued: int  # the seq after which this call continued; `first` if it was the first call
    events: int  # published by this call
    records: int  # tombstones included
    erased: int  # events that were erased, and are not published


class _Source(msgspec.Struct):
    seq: int


class _Event(msgspec.Struct):
    source: _Source


_event: Final = msgspec.json.Decoder(_Event).decode


class RangeReplay:
    """One range, and where it goes."""

    def __init__(
        self,
        config: Config,
        into: str,
        first: Position,
        last: Position,
        tables: tuple[str, ...] = (),
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Find the range. `progress` gets the seq of each committed window.

        Raises ConfigError for a topic that is not for replays, GapError if the past does not reach.
        """
        self._config, self._into, self._progress = config, into, progress
        _expect_target(config, into)
        chosen = (names.data_topic(config.prefix, *one_table(each)) for each in tables)
        self._topics = frozenset(chosen)
        archive = opened(config) if config.archive.path else None
        self._archive = archive if archive is not None and archive.find() else None
        self._from, self._wanted = self._frontier(first), first
        self._to = self._frontier(last)
        if self._from.seq > self._to.seq:
            raise ConfigError(f"{first} is after {last}", hint="give the earlier one to --from")
        # The chain identifies the log: one that has started again has the same seqs.
        stated = [config.pipeline, self._from.seq, self._from.chain, sorted(self._topics)]
        self._id = sha256(msgspec.json.encode(stated)).hexdigest()[:16].encode()
        self._events = self._records = self._erased = 0

    def run(self) -> Replayed:
        """Publish what is not in the topic yet."""
        publisher = BoundedPublisher(self._config, f"replay.{self._into}")
        publisher.open()
        with closing(RangeReader(self._config)) as reader:
            done = continued = self._continued(reader)
            for upto, found in self._windows(reader, done):
                self._publish(publisher, found)
                self._progress(upto)
        return Replayed(
            self._into, self._from.seq, self._to.seq, self._to.lsn, continued,
            self._events, self._records, self._erased,
        )  # fmt: skip

    # -- the range ---------------------------------------------------------------------------------

    def _frontier(self, wanted: Position) -> RangeEnd:
        """Return the last frontier not above a position, of the topics or else of the archive."""
        if wanted == BEGINNING:
            return RangeEnd(0, LSN(0), self._first_chain())
        if wanted == EARLIEST:
            raise ConfigError(f"{EARLIEST} names no place of the past", hint=f"give {BEGINNING}")
        place = None if wanted == LATEST else wanted
        with closing(FrontierFinder(self._config)) as log:
            placed = log.newest(place)
        if placed is not None:
            return RangeEnd(placed.record.seq, placed.record.lsn, placed.record.chain)
        table = self._archive and self._archive.table
        found = archived.newest(self._config, table, None, place) if table else None
        if found is None:
            raise GapError(
                f"neither topics nor archive have a frontier not above {wanted}",
                hint="`cdc archive status` shows up to where the log is archived",
            )
        return RangeEnd(found.applied.seq, found.applied.lsn, found.chain)

    def _first_chain(self) -> str:
        """Return the chain of the log's first frontier; raise GapError if that was deleted."""
        if self._archive is not None:
            found = archived.first(self._config, self._archive.table)
            if found is not None:
                return found.chain
        with closing(FrontierFinder(self._config)) as log:
            log.find(BEGINNING)
            placed = log.at_or_after(log.first)
        return placed.record.chain if placed is not None else ""

    def _windows(
        self, reader: RangeReader, done: int
    ) -> Iterator[tuple[int, list[ReplayedRecord]]]:
        """Yield the records after a seq, a window at a time, with the seq up to which it is."""
        at, last = done, self._to.seq
        held = self._archive.position().applied if self._archive else None
        if self._archive is not None and held is not None:
            table = self._archive.table
            while at < min(last, held.seq):
                upto = min(at + WINDOW_EVENTS, last, held.seq)
                yield upto, self._archived(table, at, upto)
                at = upto
        if at < last:
            start = held if held is not None and held.seq >= self._from.seq else self._start()
            yield from self._live(reader, start, at)

    def _start(self) -> Applied:
        """Return the range's start with the ends of all partitions; raise GapError if deleted."""
        with closing(FrontierFinder(self._config)) as log:
            return log.find(self._from.seq)

    def _archived(self, table: DeltaTable, above: int, upto: int) -> list[ReplayedRecord]:
        own = [name(self._config.prefix) for name in _NOT_EVENTS]
        listed = ", ".join(map(quoted, sorted(self._topics) or own))
        where = (
            f"seq > {above} AND seq <= {upto} AND topic {'IN' if self._topics else 'NOT IN'}"
            f" ({listed})"
        )
        rows = lake.read(table, [*ReplayedRecord._fields, "op", "leaf"], where)
        found = []
        for *fields, op, leaf in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            if leaf is None:
                found.append(ReplayedRecord(*fields))
            else:
                self._erased += op is not None
        return sorted(found, key=lambda each: each[:2])

    def _live(
        self, reader: RangeReader, start: Applied, done: int
    ) -> Iterator[tuple[int, list[ReplayedRecord]]]:
        limits = Limits(WINDOW_EVENTS, _WINDOW_BYTES)
        cutter = Cutter(start, self._follows, limits, through=self._to.lsn)
        at = start.seq
        with closing(FrontierTail(self._config, start.place, start.seq)) as tail:
            while at < self._to.seq:
                for record, offset in tail.arrivals(_POLL_SECONDS):
                    cutter.add(record, offset)
                while at < self._to.seq and (cut := cutter.take(0.0)) is not None:
                    at = cut.seq
                    if at > done:
                        found = self._of_cut(reader, cut)
                        yield at, [each for each in found if each.seq > done]

    def _follows(self, topic: str) -> bool:
        if self._topics:
            return topic in self._topics
        return topic not in {name(self._config.prefix) for name in _NOT_EVENTS}

    def _of_cut(self, reader: RangeReader, cut: Cut) -> list[ReplayedRecord]:
        """Return a cut's records; raise GapError if retention or compaction has deleted some."""
        ranges = {
            (each.topic, each.partition): OffsetRange(each.start, each.end) for each in cut.parts
        }
        counts = dict.fromkeys(ranges, 0)
        found: list[ReplayedRecord] = []
        last: dict[tuple[str, int], int] = {}
        for place, messages in reader.pieces(ranges):
            for message in messages:
                value = message.value()
                if value is not None:
                    last[place] = _event(value).source.seq
                    counts[place] += 1
                record = ReplayedRecord(
                    last.get(place, 0), message.offset() or 0, place[0], message.key(), value
                )
                found.append(record)
        for each in cut.parts:
            place = each.topic, each.partition
            if counts[place] != each.events:
                reader.expect_complete(place, ranges[place])
                what = (
                    f"has {counts[place]} events from offset {each.start} to {each.end - 1} where"
                    f" the frontier counts {each.events}, seq {cut.above + 1} to {cut.seq}"
                )
                compacted = compaction.explained(self._config, place, what)
                if compacted is not None and counts[place] < each.events:
                    raise with_base(self._config, compacted)
                raise GapError(
                    f"{each.topic} [{each.partition}] {what}",
                    hint="`cdc prove` names what the topics have lost",
                )
        return sorted(found, key=lambda each: each[:2])

    # -- the topic ---------------------------------------------------------------------------------

    def _continued(self, reader: RangeReader) -> int:
        """Return the seq after which to continue; create a missing topic."""
        place = (self._into, 0)
        there = reader.confirmed_if_exists(place)
        if there is None:
            kept = {"retention.ms": "-1", "max.message.bytes": str(MAX_MESSAGE_BYTES)}
            topics.ensure(
                topics.admin(self._config), self._config, [topics.Topic(self._into, 1, kept)]
            )
            return self._from.seq
        headers = self._last_headers(reader, there)
        if headers is None:
            return self._from.seq
        if headers.get(_ID) != self._id:
            raise ConfigError(
                f"{self._into} holds other records than this replay's",
                hint="name a topic that does not exist yet; it is created",
            )
        return int(headers[_SEQ])

    def _last_headers(self, reader: RangeReader, there: OffsetRange) -> dict[str, bytes] | None:
        back = _BACK
        while True:
            low = max(there.start, there.end - back)
            wanted = {(self._into, 0): OffsetRange(low, there.end)}
            last = None
            for _, messages in reader.pieces(wanted):
                last = messages[-1]
            if last is not None:
                found: Any = last.headers() or []
                return dict(found)
            if low == there.start:
                return None
            back *= 8

    def _publish(self, publisher: BoundedPublisher, found: list[ReplayedRecord]) -> None:
        """Publish a window as one Kafka transaction."""
        if not found:
            return
        try:
            for each in found:
                headers = {_ID: self._id, _SEQ: b"%d" % each.seq, _TOPIC: each.topic.encode()}
                publisher.send(self._into, each.key, each.value, headers)
            publisher.flush()
            failpoints.reach("replay_sent")
            publisher.commit()
        except CDCError:
            with suppress(Exception):  # the first error is the one that is reported
                publisher.abort()
            raise
        failpoints.reach("replay_committed")
        self._events += sum(each.value is not None for each in found)
        self._records += len(found)


# Topics whose records are no events, by the function that names them.
_NOT_EVENTS: Final = (
    names.frontier_topic,
    names.schema_topic,
    names.dead_topic,
    archive_topic,
)


def _expect_target(config: Config, into: str) -> None:
    """Raise ConfigError if a topic can't be the target of a replay."""
    if into in config.followers:
        raise ConfigError(
            f"{into} is a follower: events that its store is past can't be applied to it again",
            hint=f"`cdc rebuild {into} --as-of PLACE` builds the state at a place of the past; to"
            " publish events, name a topic",
        )
    if into.startswith(f"{config.prefix}."):
        raise ConfigError(
            f"{into} is below {config.prefix}, where the pipeline's own topics are",
            hint="name a topic outside of it, such as replay-of-november",
        )
    found = topics.describe(topics.admin(config), [into]).get(into)
    if found is not None and found.partitions != 1:
        raise ConfigError(
            f"{into} has {found.partitions} partitions: records of several have no common order",
            hint="name a topic that does not exist yet; it is created with one partition",
        )
