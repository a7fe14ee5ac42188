"""Search the frontier topic by halves, so that it costs a few reads however much the log holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.log import names, records
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.config import Config
    from cdc.log.records import FrontierRecord

# Below so many offsets the records are read instead of halving on.
_FEW: Final = 64


class Placed(NamedTuple):
    """A frontier record, its offset, and when it was published, in milliseconds since 1970."""

    record: FrontierRecord
    offset: int
    published_ms: int


class FrontierSearch:
    """Searches the frontier topic of a pipeline, up to its end at the time of creation."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._topic = names.frontier_topic(config.prefix)
        self._reader = RangeReader(config)
        place = (self._topic, 0)
        self.first, self.end = self._reader.confirmed([place])[place]

    def close(self) -> None:
        self._reader.close()

    def at_or_after(self, offset: int) -> Placed | None:
        """Return the first record from an offset on; offsets of markers have none."""
        start = max(offset, self.first)
        while start < self.end:
            found = next(self.read(start, min(self.end, start + _FEW)), None)
            if found is not None:
                return found
            start += _FEW
        return None

    def newest_that(self, fits: Callable[[FrontierRecord], bool]) -> Placed | None:
        """Return the newest record that fits; those that fit must come before all others."""
        return self._newest(lambda placed: fits(placed.record))

    def published_before(self, ms: int) -> Placed | None:
        """Return the newest record that was published before a time, milliseconds since 1970."""
        return self._newest(lambda placed: placed.published_ms < ms)

    def _newest(self, fits: Callable[[Placed], bool]) -> Placed | None:
        low, high = self.first, self.end
        while high - low > _FEW:
            middle = (low + high) // 2
            placed = self.at_or_after(middle)
            if placed is not None and fits(placed):
                low = placed.offset
            else:
                high = middle
        found = None
        for placed in self.read(low, min(self.end, high + _FEW)):
            if fits(placed):
                found = placed
        return found

    def last(self) -> Placed | None:
        """Return the newest record."""
        high = self.end
        while high > self.first:
            low = max(self.first, high - _FEW)
            if found := list(self.read(low, high)):
                return found[-1]
            high = low
        return None

    def read(self, start: int, end: int) -> Iterator[Placed]:
        """Yield the records between two offsets."""
        for _, messages in self._reader.pieces({(self._topic, 0): OffsetRange(start, end)}):
            for message in messages:
                value = message.value() or b""
                record = records.decode(records.FrontierRecord, value, self._topic)
                if record.pipeline == self._config.pipeline:
                    yield Placed(record, message.offset() or 0, message.timestamp()[1])
