"""The changes of one table in the order of seq, cut by cut, from a frontier on.

A cut ends at a frontier, so it holds complete transactions. Before the first change of a cut is
returned, the events in it were counted and are as many as the frontier says: what retention or
somebody has deleted raises GapError, and is never skipped. The rows of an initial snapshot, whose
seqs do not ascend in a partition, are left out.

A cut of any size needs bounded memory: above `MOST_CHANGES` or `MOST_BYTES` its partitions are read
again side by side and merged.
"""

from __future__ import annotations

import heapq
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from cdc.errors import CDCError, GapError, unquoted
from cdc.events import row_key
from cdc.log import compaction, reader
from cdc.log.consumer import LogConsumer
from cdc.log.frontier_search import FrontierSearch
from cdc.log.frontier_tail import FrontierTail
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.records import FrontierRecord

# Frontiers are read together up to so many changes of the table.
MOST_CHANGES: Final = 20_000
# Of values, as a row may have any size; a part of what is larger has fewer, so that a reader that
# keeps so many bytes of the newest has several.
MOST_BYTES: Final = 32 << 20
PART_BYTES: Final = 8 << 20
# Where the first change of a partition is unknown, so many offsets before its end are searched,
# then more: in addition to events there are tombstones, markers and aborted records.
_LOOK_BACK: Final = 200
_FARTHER: Final = 8
_POLL_SECONDS: Final = 0.5


class LoggedChange(NamedTuple):
    """One event of the table, as the log has it."""

    seq: int
    key: bytes | None
    value: bytes


class TableCut(NamedTuple):
    """Every change of the table above seq `low`, up to `high`.

    Without a frontier it is a part of a large cut, and more of the same follows.
    """

    low: int
    high: int
    changes: list[LoggedChange]
    frontier: FrontierRecord | None


class ReadStart(NamedTuple):
    """Where reading starts: after an offset of the frontier topic, and the seq there."""

    place: int
    seq: int
    record: FrontierRecord | None  # at `seq`


class _Source(msgspec.Struct):
    seq: int


class _Numbered(msgspec.Struct):
    source: _Source


_decoder: Final = msgspec.json.Decoder(_Numbered)


def start_at(search: FrontierSearch, seq: int | None, *, back: int = 0) -> ReadStart | None:
    """Return where to read what is above a seq; None if the log has no frontier yet.

    Without a seq, at the newest frontier; then `back` is how many offsets earlier.
    """
    if seq is not None:
        placed = search.newest_that(lambda record: record.seq <= seq)
    else:
        placed = search.last()
    if placed is not None and back:
        placed = search.at_or_after(max(search.first, placed.offset - back)) or placed
    if placed is not None:
        return ReadStart(placed.offset + 1, placed.record.seq, placed.record)
    first = search.at_or_after(search.first)
    return None if first is None else ReadStart(first.offset, first.record.above, None)


def oldest_seq(config: Config, search: FrontierSearch, partitions: Iterable[Partition]) -> int:
    """Return the lowest seq after which the log holds every change of a table."""
    first, last = search.at_or_after(search.first), search.last()
    if first is None or last is None:
        return 0
    is_snapshot = _is_snapshot(config, first.record)
    found = first.record.seq if is_snapshot else first.record.above
    with closing(RangeReader(config)) as ranges:
        there = ranges.confirmed(partitions)
        cut = {each: held for each, held in there.items() if held.start > 0}
        firsts = ranges.first_events(cut)
    for each in cut:
        # A partition without events has lost all that it had.
        held = _seq(firsts[each], each[0]) - 1 if each in firsts else last.record.seq
        found = max(found, held)
    return found


def _is_snapshot(config: Config, record: FrontierRecord) -> bool:
    """Return whether a frontier covers the rows of an initial snapshot."""
    if record.blocks:
        return True
    if record.above or not record.partitions or record.digests is not None:
        return False
    resume = reader.read_resume(config)
    return record.holes > 0 or (resume is not None and resume[0].snapshot in {"due", "done"})


class TableCuts:
    """Reads one table's cuts from a start on. Not for several threads at once."""

    def __init__(
        self,
        config: Config,
        topic: str,
        start: ReadStart,
        partitions: Collection[Partition] | None = None,
    ) -> None:
        """Read all partitions, or only these."""
        self._config, self._topic, self._partitions = config, topic, partitions
        self._tail = FrontierTail(config, start.place, start.seq)
        self._ranges = RangeReader(config)
        self._ends: dict[Partition, int] = {}  # of what was returned, where they are known

    def close(self) -> None:
        self._tail.close()
        self._ranges.close()

    @property
    def has_caught_up(self) -> bool:
        """Whether it has read every frontier that was there when it started."""
        return self._tail.has_caught_up

    def read(self, seconds: float) -> Iterator[TableCut]:
        """Yield the cuts that have arrived, several as one; wait `seconds` at most for the first.

        Every one must be taken: those that are not are lost for this reader.
        """
        group: list[FrontierRecord] = []
        changes = 0
        for record, _ in self._tail.arrivals(seconds):
            own = 0 if _is_snapshot(self._config, record) else self._events(record)
            if group and changes + own > MOST_CHANGES:
                yield from self._cut(group)
                group, changes = [], 0
            group.append(record)
            changes += own
        if group:
            yield from self._cut(group)

    def _events(self, record: FrontierRecord) -> int:
        return sum(n for topic, number, _, n in record.partitions if self._reads(topic, number))

    def _reads(self, topic: str, number: int) -> bool:
        others = self._partitions is not None and (topic, number) not in self._partitions
        return topic == self._topic and not others

    def expect_snapshot(self, record: FrontierRecord) -> None:
        """Raise GapError unless the rows of the initial snapshot are there that a frontier counts.

        Any other frontier is not compared.
        """
        if not _is_snapshot(self._config, record):
            return
        for topic, number, end, events in record.partitions:
            if self._reads(topic, number):
                pieces = self._ranges.pieces({(topic, number): OffsetRange(0, end)})
                found = sum(m.value() is not None for _, messages in pieces for m in messages)
                if found != events:
                    raise self._incomplete((topic, number), end, events, 0)

    def _cut(self, group: list[FrontierRecord]) -> Iterator[TableCut]:
        """Yield one group's changes."""
        ends: dict[Partition, int] = {}
        counts: dict[Partition, int] = {}
        for record in group:
            is_snapshot = _is_snapshot(self._config, record)
            for topic, number, end, events in record.partitions:
                if not self._reads(topic, number):
                    continue
                ends[topic, number] = end
                if is_snapshot:
                    self._ends[topic, number] = end
                else:
                    counts[topic, number] = counts.get((topic, number), 0) + events
        # Where the reader starts, the seq before may not be known.
        last, low = group[-1], group[0].above
        counts = {each: events for each, events in counts.items() if events}
        changes = self._small(ends, counts, low)
        if changes is None:
            low = yield from self._large(ends, counts, last, low)
        self._ends.update(ends)
        yield TableCut(low, last.seq, changes or [], last)

    def _small(
        self, ends: dict[Partition, int], counts: dict[Partition, int], low: int
    ) -> list[LoggedChange] | None:
        """Return a cut's changes; None if they are too many, or too large."""
        if sum(counts.values()) > MOST_CHANGES:
            return None
        changes: list[LoggedChange] = []
        left = MOST_BYTES
        for each, events in counts.items():
            found = self._located(each, ends[each], events, low, left)
            if found is None:
                return None
            changes += found
            left -= sum(len(change.value) for change in found)
        return sorted(changes)

    def _located(
        self, partition: Partition, end: int, events: int, low: int, most_bytes: int
    ) -> list[LoggedChange] | None:
        """Return a partition's changes above `low`, which must be `events`.

        None if they, or what has to be read to find them, are more than `most_bytes`.
        """
        for start in self._starts(partition, end, events):
            read = self._ranges.read({partition: OffsetRange(start, end)}, most_bytes)
            if read is None:
                return None
            found = read[partition]
            changes = [
                LoggedChange(seq, key, value)
                for key, value in zip(found.keys, found.values, strict=True)
                if (seq := _seq(value, self._topic)) > low
            ]
            if len(changes) == events:
                return changes
        raise self._incomplete(partition, end, events, low)

    def _starts(self, partition: Partition, end: int, events: int) -> Iterator[int]:
        """Yield from where a partition may be read: earlier each time."""
        if partition in self._ends:
            yield self._ends[partition]
            return
        back = _LOOK_BACK + 3 * events
        while back < end:
            yield end - back
            back *= _FARTHER
        yield 0

    # --- cuts of any size ---

    def _large(
        self,
        ends: dict[Partition, int],
        counts: dict[Partition, int],
        last: FrontierRecord,
        low: int,
    ) -> Generator[TableCut, None, int]:
        """Yield a large cut's changes in parts; return the seq of the last."""
        with ExitStack() as stack:
            streams = []
            for each, events in counts.items():
                wanted = OffsetRange(self._first(each, ends[each], events, low), ends[each])
                self._ranges.expect_complete(each, wanted)
                # One that does not skip what is deleted meanwhile; each fetches ahead.
                consumer = LogConsumer(self._config, fetches_little=True)
                stack.enter_context(closing(consumer))
                streams.append(_changes(consumer, each, wanted, low))
            for part in _parts(heapq.merge(*streams)):
                assert part[-1].seq <= last.seq
                yield TableCut(low, part[-1].seq, part, None)
                low = part[-1].seq
        return low

    def _first(self, partition: Partition, end: int, events: int, low: int) -> int:
        """Return the offset of a partition's first change above `low`, once all were counted."""
        for start in self._starts(partition, end, events):
            first, count = end, 0
            for _, messages in self._ranges.pieces({partition: OffsetRange(start, end)}):
                for message in messages:
                    value = message.value()
                    if value is not None and _seq(value, self._topic) > low:
                        count += 1
                        first = min(first, message.offset() or 0)
            if count == events:
                return first
        raise self._incomplete(partition, end, events, low)

    def _incomplete(self, partition: Partition, end: int, events: int, low: int) -> GapError:
        what = f"does not have the {events} events above seq {low} that it had below offset {end}"
        if error := compaction.explained(self._config, partition, what):
            return error
        return GapError(
            f"{partition[0]} [{partition[1]}] {what}",
            hint="the topic's retention, or somebody, has deleted them",
        )


def expect_counted(
    config: Config, topic: str, seq: int, partitions: Collection[Partition] | None = None
) -> None:
    """Raise GapError unless the topic has all events above a seq that its frontiers count.

    Of these partitions, or of all. Reads them.
    """
    with closing(FrontierSearch(config)) as search:
        start = start_at(search, seq)
        first = None if start is None else search.at_or_after(start.place)
    if start is None:
        return
    with closing(TableCuts(config, topic, start, partitions)) as cuts:
        if first is not None:
            cuts.expect_snapshot(first.record)
        while not cuts.has_caught_up:
            for _ in cuts.read(_POLL_SECONDS):
                pass


def _changes(
    consumer: LogConsumer, partition: Partition, wanted: OffsetRange, low: int
) -> Iterator[LoggedChange]:
    for _, messages in consumer.pieces({partition: wanted}):
        for message in messages:
            value = message.value()
            if value is not None and (seq := _seq(value, partition[0])) > low:
                yield LoggedChange(seq, row_key(message.key()), value)


def _parts(changes: Iterable[LoggedChange]) -> Iterator[list[LoggedChange]]:
    """Yield changes in parts of bounded number and bytes; a larger change is one by itself."""
    part: list[LoggedChange] = []
    size = 0
    for each in changes:
        if part and (len(part) >= MOST_CHANGES or size + len(each.value) > PART_BYTES):
            yield part
            part, size = [], 0
        part.append(each)
        size += len(each.value)
    if part:
        yield part


def _seq(value: bytes, topic: str) -> int:
    try:
        return _decoder.decode(value).source.seq
    except msgspec.MsgspecError as error:
        raise CDCError(
            f"topic {topic} holds an event that can't be read: {unquoted(error)}",
            hint="something else writes to this topic; give the pipeline a log.prefix of its own",
        ) from error
