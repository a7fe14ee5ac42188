"""A partition of a topic, and a range of its offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Partition: TypeAlias = "tuple[str, int]"  # the topic's name, and the partition's number


class OffsetRange(NamedTuple):
    """Offsets of one partition: from `start` to before `end`."""

    start: int
    end: int

    def tails(self, offsets: int) -> Iterator[OffsetRange]:
        """Yield its end, each time from ten times as far back, and at last all of it.

        For its last records: at its end there may be transaction markers only, however many.
        """
        while self.end - offsets > self.start:
            yield OffsetRange(self.end - offsets, self.end)
            offsets *= 10
        yield self
