"""The dead letters of a cut, read when the first of them is requested.

They are in the order of their pointers' seqs: reading stops at the requested letter, and those
before it are kept for later requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.log.dead_letters import DeadLetterAssembler

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from cdc.log.dead_letters import Pointer
    from cdc.log.partitions import OffsetRange, Partition
    from cdc.log.ranges import RangeReader


class CutLetters:
    """`place` is the topic of dead letters, `wanted` the cut's range of it."""

    def __init__(self, reader: RangeReader, place: Partition, wanted: OffsetRange | None) -> None:
        self._letters = DeadLetterAssembler()
        self._records = self._read(reader, {place: wanted} if wanted else {})

    def event(self, pointer: Pointer) -> bytes:
        """Return the event that the pointer refers to; raise GapError if it is incomplete."""
        while pointer.id not in self._letters:
            record = next(self._records, None)
            if record is None:
                break
            self._letters.add(*record)
        return self._letters.event(pointer)

    def close(self) -> None:
        """End the reading: the reader is free for other ranges then."""
        self._records.close()

    @staticmethod
    def _read(
        reader: RangeReader, wanted: Mapping[Partition, OffsetRange]
    ) -> Generator[tuple[bytes | None, bytes | None]]:
        for _, messages in reader.pieces(wanted) if wanted else ():
            for message in messages:
                yield message.key(), message.value()
