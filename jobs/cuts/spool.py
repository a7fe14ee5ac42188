"""Events on disk: held back until their number is known to be right.

Records are divided among buckets by a hash of their keys, so that one bucket at a time can be
folded in memory however many there are.
"""

from __future__ import annotations

import tempfile
import zlib
from typing import IO, TYPE_CHECKING, Final, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SIZE_BYTES: Final = 4
# So many bytes stay in memory before a file is made.
_MEMORY_BYTES: Final = 8 << 20

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[list[bytes | None], list[bytes]]).decode


class PieceSpool:
    """Takes pieces of events and returns each bucket's, in the order in which they came.

    The files are deleted when it is closed, or when the process ends.
    """

    def __init__(self, buckets: int = 1) -> None:
        self._files: list[IO[bytes]] = [
            tempfile.SpooledTemporaryFile(_MEMORY_BYTES, prefix="lockstep-")  # noqa: SIM115 - closed in __exit__
            for _ in range(buckets)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._files:
            each.close()

    def add(self, keys: Sequence[bytes | None], values: Sequence[bytes]) -> None:
        """Keep a piece; events without a key are in the first bucket."""
        if len(self._files) == 1:
            self._write(0, keys, values)
            return
        parts: dict[int, tuple[list[bytes | None], list[bytes]]] = {}
        for key, value in zip(keys, values, strict=True):
            part = parts.setdefault(zlib.crc32(key or b"") % len(self._files), ([], []))
            part[0].append(key)
            part[1].append(value)
        for bucket, part in parts.items():
            self._write(bucket, *part)

    def _write(self, bucket: int, keys: Sequence[bytes | None], values: Sequence[bytes]) -> None:
        piece = _encode((keys, values))
        file = self._files[bucket]
        file.write(len(piece).to_bytes(_SIZE_BYTES))
        file.write(piece)

    def buckets(self) -> Iterator[Iterator[tuple[list[bytes | None], list[bytes]]]]:
        """Yield each bucket as its pieces; take a bucket's pieces before the next bucket."""
        for file in self._files:
            yield self._pieces(file)

    @staticmethod
    def _pieces(file: IO[bytes]) -> Iterator[tuple[list[bytes | None], list[bytes]]]:
        file.seek(0)
        while size := file.read(_SIZE_BYTES):
            yield _decode(file.read(int.from_bytes(size)))
