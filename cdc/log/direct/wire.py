"""Kafka's primitive types in flexible versions: bytes in, values out, and back. No I/O.

Lengths are base-128 varints, stored plus one so that 0 is null; every structure ends in tagged
fields. Bytes that do not match raise `MalformedError`.

https://kafka.apache.org/protocol#protocol_types
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# An answer to our requests holds a few thousand entries at most: more is not a valid length.
ENTRIES_MAX: Final = 1_000_000
NO_TAGS: Final = b"\x00"

_MORE: Final = 0x80  # set in each byte of a varint but the last
_INT16: Final = struct.Struct("!h")
_INT32: Final = struct.Struct("!i")
_INT64: Final = struct.Struct("!q")


class MalformedError(Exception):
    """An answer's bytes do not match the protocol."""


def uvarint(value: int) -> bytes:
    """Return an unsigned varint, seven bits a byte, the lowest first."""
    if value < _MORE:
        return _ONE_BYTE[value]
    if value < _MORE << 7:
        return bytes((value & 0x7F | _MORE, value >> 7))
    out = bytearray()
    while value >= _MORE:
        out.append(value & 0x7F | _MORE)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE: Final = [bytes([n]) for n in range(_MORE)]


def string(value: str | None) -> bytes:
    """Return a compact, nullable string."""
    return compact(None if value is None else value.encode())


def compact(value: bytes | None) -> bytes:
    """Return compact, nullable bytes."""
    return b"\x00" if value is None else uvarint(len(value) + 1) + value


def array(items: list[bytes]) -> bytes:
    """Return a compact array of encoded items."""
    return uvarint(len(items) + 1) + b"".join(items)


class AnswerReader:
    """Reads one answer from its beginning to its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise MalformedError(f"{size} bytes wanted at {self._at} of {len(self._data)}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        """Return fields of fixed size."""
        return fields.unpack(self.take(fields.size))

    def skip(self, expected: bytes) -> bool:
        """Skip these bytes if they are next; return whether they are."""
        is_next = self._data.startswith(expected, self._at)
        self._at += len(expected) if is_next else 0
        return is_next

    def int16(self) -> int:
        return int(_INT16.unpack(self.take(2))[0])

    def int32(self) -> int:
        return int(_INT32.unpack(self.take(4))[0])

    def int64(self) -> int:
        return int(_INT64.unpack(self.take(8))[0])

    def uvarint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < _MORE:
                return value
            shift += 7
            if shift > 63:  # noqa: PLR2004 - the bits that a varint may hold
                raise MalformedError("a varint of more than 64 bits")

    def compact(self) -> bytes | None:
        size = self.uvarint() - 1
        return None if size < 0 else self.take(size)

    def string(self) -> str | None:
        data = self.compact()
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise MalformedError("a string that is no UTF-8") from error

    def array(self, item: Callable[[], T]) -> list[T]:
        """Return a compact array; a null one is empty."""
        count = self.uvarint() - 1
        if count > ENTRIES_MAX:
            raise MalformedError(f"an array of {count} entries")
        return [item() for _ in range(count)]

    def tags(self) -> dict[int, bytes]:
        """Return the tagged fields by tag."""
        count = self.uvarint()
        if count > ENTRIES_MAX:
            raise MalformedError(f"{count} tagged fields")
        return {self.uvarint(): self.take(self.uvarint()) for _ in range(count)}

    def end(self) -> None:
        """Raise MalformedError if bytes are left."""
        if self._at != len(self._data):
            raise MalformedError(f"{len(self._data) - self._at} bytes more than the answer has")
