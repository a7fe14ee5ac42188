"""The dead letters of a cut, read when the first of them is asked for.

They stand in the order of their pointers' seqs, so a letter that is asked for is read up to, and
those before it are kept for who asks later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.log.letters import Letters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.log.letters import Pointer
    from cdc.log.ranges import Place, Range, RangeReader


class CutLetters:
    """`place` is the topic of dead letters, `wanted` what the cut has of it."""

    def __init__(self, reader: RangeReader, place: Place, wanted: Range | None) -> None:
        self._letters = Letters()
        self._records = self._read(reader, place, wanted) if wanted else iter(())

    def whole(self, pointer: Pointer) -> bytes:
        """Return the event that an event points to; raise GapError where it is not whole."""
        while pointer.id not in self._letters:
            record = next(self._records, None)
            if record is None:
                break
            self._letters.add(*record)
        return self._letters.whole(pointer)

    @staticmethod
    def _read(
        reader: RangeReader, place: Place, wanted: Range
    ) -> Iterator[tuple[bytes | None, bytes | None]]:
        for _, messages in reader.pieces({place: wanted}):
            for message in messages:
                yield message.key(), message.value()
