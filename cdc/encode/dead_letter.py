"""A dead letter that is written piece by piece: never completely compressed, nor completely queued.

Pure. An event of hundreds of megabytes does not fit the producer's queue, so its letter is read
record by record: each one is compressed when the one before it has found room. The records are the
same each time they are read. `cdc.log.dead_letters` reads letters back.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.log.dead_letters import ChunkKey

if TYPE_CHECKING:
    from cdc.log.dead_letters import DeadLetterHead

Record = tuple[bytes, bytes]  # key and value

# Fast rather than small: the stream's next change waits for it.
_LEVEL: Final = 1
# The sample of a piece that shows whether the rest has repetitions to find.
_SAMPLE_BYTES: Final = 16 << 10
# A sample compressed to more than this share of its length has none (base64 of random bytes: 0.77).
# Then the search for them is left out, which takes two thirds of the time.
_DENSE: Final = 0.7


class DeadLetterRecords(Sequence[Record]):
    """A dead letter's records, created on access: the head, then the event's pieces."""

    def __init__(self, head: DeadLetterHead, event: bytes, piece_bytes: int) -> None:
        self._head, self._event, self._piece_bytes = head, memoryview(event), piece_bytes

    def __len__(self) -> int:
        return 1 + self._head.chunks

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        key = msgspec.json.encode(ChunkKey(self._head.id, number))
        if number == 0:
            return key, msgspec.json.encode(self._head)
        at = (number - 1) * self._piece_bytes
        return key, compressed(self._event[at : at + self._piece_bytes])


def compressed(piece: bytes | memoryview) -> bytes:
    """Return the piece as a zlib stream."""
    sample = piece[:_SAMPLE_BYTES]
    dense = len(zlib.compress(sample, _LEVEL)) > _DENSE * len(sample)
    strategy = zlib.Z_HUFFMAN_ONLY if dense else zlib.Z_DEFAULT_STRATEGY
    writer = zlib.compressobj(_LEVEL, strategy=strategy)
    return writer.compress(piece) + writer.flush()
