"""Read the events in exact ranges of the log: what lies between two frontiers.

One consumer stays open, so that a few hundred records cost milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.events import row_key
from cdc.log.consumer import LogConsumer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config import Config
    from cdc.log.partitions import OffsetRange, Partition


class Records(NamedTuple):
    """One partition's events in the order of the log: keys, values and bytes; no tombstones."""

    keys: list[bytes | None]
    values: list[bytes]
    size: int


class RecordColumns(NamedTuple):
    """Some of a partition's records in the order of the log, tombstones among them."""

    offsets: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]


class RangeReader(LogConsumer):
    """Reads ranges, one set after another; what retention has deleted of their start is skipped."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, skip_deleted=True, wait_ms=10)

    def read(
        self, ranges: Mapping[Partition, OffsetRange], max_bytes: int | None = None
    ) -> dict[Partition, Records] | None:
        """Return the events in the ranges; None if they are more than `max_bytes`."""
        keys: dict[Partition, list[bytes | None]] = {each: [] for each in ranges}
        values: dict[Partition, list[bytes]] = {each: [] for each in ranges}
        total = 0
        sizes = dict.fromkeys(ranges, 0)
        for partition, messages in self.pieces(ranges):
            to_keys, to_values, size = keys[partition], values[partition], 0
            for message in messages:
                value = message.value()
                if value is not None:
                    to_keys.append(row_key(message.key()))
                    to_values.append(value)
                    size += len(value)
            sizes[partition] += size
            total += size
            if max_bytes is not None and total > max_bytes:
                return None
        return {each: Records(keys[each], values[each], sizes[each]) for each in ranges}

    def columns(
        self, ranges: Mapping[Partition, OffsetRange]
    ) -> Iterator[tuple[Partition, RecordColumns]]:
        """Yield all records in the ranges as they arrive, each partition's in its order."""
        for partition, messages in self.pieces(ranges):
            yield (
                partition,
                RecordColumns(
                    [message.offset() or 0 for message in messages],
                    [message.key() for message in messages],
                    [message.value() for message in messages],
                ),
            )

    def first_events(self, ranges: Mapping[Partition, OffsetRange]) -> dict[Partition, bytes]:
        """Return the first event of each range that has one."""
        found: dict[Partition, bytes] = {}
        for partition, messages in self.pieces(ranges):
            values = (message.value() for message in messages)
            event = next((value for value in values if value is not None), None)
            if event is not None:
                found[partition] = event
                self.skip(partition)
        return found
