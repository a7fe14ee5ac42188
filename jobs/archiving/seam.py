"""Whether the topics have every event after an archived frontier.

A partition that begins after the frontier's end may have lost nothing: transaction markers have
offsets too, and retention that empties a topic deletes the last one. The frontier records count the
events between two of them; what a partition still has is read where it begins within such a range.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from cdc.log import names
from cdc.log.partitions import OffsetRange, Partition
from cdc.log.ranges import RangeReader
from cdc.log.records import FrontierRecord, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config import Config
    from lockstep.sinks.contract import Applied


class _Shortened(NamedTuple):
    """A range between two frontiers that has lost its beginning."""

    partition: Partition
    left: OffsetRange
    events: int  # before anything was deleted


def lost_after(
    config: Config, applied: Applied, firsts: Mapping[Partition, int]
) -> Partition | None:
    """Return a partition that has lost events after a frontier; None if none has.

    `firsts` has the first offset of each partition that begins after the frontier's end. Where
    frontier records are missing, any of them is returned; dead letters are taken for lost where
    their topic was written to since.
    """
    if not firsts:
        return None
    with closing(RangeReader(config)) as reader:
        shortened = list(_shortened(config, reader, applied, firsts))
        for partition, left, events in shortened:
            held = 0
            if left.end > left.start:
                found = reader.read({partition: left})
                assert found is not None, "without a limit"
                held = len(found[partition].values)
            if held < events:
                return partition
    return None


def _shortened(
    config: Config, reader: RangeReader, applied: Applied, firsts: Mapping[Partition, int]
) -> Iterator[_Shortened]:
    """Yield the ranges with events that begin before the first offset that is left of them."""
    place, ends, seq = (names.frontier_topic(config.prefix), 0), applied.end_of, applied.seq
    dead = names.dead_topic(config.prefix)
    there = reader.look_up([place])[place]
    wanted = OffsetRange(max(applied.place, there.start), there.end)
    for _, messages in reader.pieces({place: wanted}):
        for message in messages:
            record = decode(FrontierRecord, message.value() or b"", place[0])
            if record.pipeline != config.pipeline:
                continue
            counted = sum(events for *_, events in record.partitions)
            if record.seq - record.holes - counted > seq:  # frontiers before it are deleted
                yield _Shortened(next(iter(firsts)), OffsetRange(0, 0), 1)
                return
            seq = record.seq
            for topic, number, end, events in record.partitions:
                at, begins = (topic, number), ends.get((topic, number), 0)
                if topic == dead and begins < firsts.get(at, 0):  # its records are not counted
                    yield _Shortened(at, OffsetRange(0, 0), 1)
                elif events and begins < firsts.get(at, 0):
                    yield _Shortened(at, OffsetRange(firsts[at], max(end, firsts[at])), events)
                ends[at] = end
