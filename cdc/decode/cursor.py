"""A position in one payload that moves only past bytes that were checked to exist.

Every method reads one field of pgoutput's grammar, moves past it and returns it, or raises
`ProtocolError` with the message's name, the field's offset and what was expected. Nothing else is
raised, whatever the bytes, and nothing is allocated for a length or count before it is checked.
Numbers are big-endian.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from cdc.decode.messages import UNCHANGED, Binary, TupleData, Value
from cdc.errors import ProtocolError
from cdc.events import LSN

# Postgres counts microseconds from 2000-01-01, Unix from 1970-01-01.
POSTGRES_EPOCH_US: Final = 946_684_800_000_000

UINT8: Final = Struct(">B")
UINT16: Final = Struct(">H")
INT32: Final = Struct(">i")
UINT32: Final = Struct(">I")
_INT64: Final = Struct(">q")
_UINT64: Final = Struct(">Q")

_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_WITH_LENGTH: Final = (_TEXT, _BINARY)


class Cursor:
    """Reads the payload of the message called `name` from the byte after its tag on."""

    __slots__ = ("at", "end", "in_stream", "name", "parallel", "payload")

    def __init__(self, payload: bytes, name: str, *, in_stream: bool, parallel: bool) -> None:
        self.payload = payload
        self.name = name
        self.in_stream = in_stream
        self.parallel = parallel
        self.at = 1
        self.end = len(payload)

    def error(self, expected: str, found: str, at: int) -> ProtocolError:
        return ProtocolError(f"pgoutput {self.name}, byte {at}: expected {expected}, found {found}")

    def number(self, layout: Struct, expected: str) -> int:
        at = self.at
        stop = at + layout.size
        if stop > self.end:
            raise self.error(expected, f"{self.end - at} of its {layout.size} bytes", at)
        self.at = stop
        number: int = layout.unpack_from(self.payload, at)[0]
        return number

    def tag(self, allowed: bytes, expected: str) -> int:
        """Return a byte that must be one of `allowed`."""
        tag = self.number(UINT8, expected)
        if tag not in allowed:
            raise self.error(expected, f"0x{tag:02x}", self.at - 1)
        return tag

    def flags(self, allowed: int, expected: str) -> int:
        """Return a byte of flags with no bit but `allowed`: what others would mean is unknown."""
        flags = self.number(UINT8, expected)
        if flags & ~allowed:
            raise self.error(f"{expected} (0 to {allowed})", f"0x{flags:02x}", self.at - 1)
        return flags

    def lsn(self, expected: str) -> LSN:
        """Return an LSN that must be set."""
        lsn = self.number(_UINT64, expected)
        if not lsn:
            raise self.error(expected, "0/0", self.at - 8)
        return LSN(lsn)

    def lsn_or_zero(self, expected: str) -> LSN:
        return LSN(self.number(_UINT64, expected))

    def time_us(self, expected: str) -> int:
        """Return a time in Unix microseconds."""
        return self.number(_INT64, expected) + POSTGRES_EPOCH_US

    def change_xid(self) -> int | None:
        """Return the xid that a change carries inside a stream block, and only there."""
        return self.number(UINT32, "a change's xid") if self.in_stream else None

    def string(self, expected: str) -> str:
        """Return the text before the next zero byte, and move past that."""
        at = self.at
        try:
            return self._to_zero(expected).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{expected} in UTF-8", error.reason, at + error.start) from error

    def text_of_any_encoding(self, expected: str) -> str:
        r"""Return the text before the next zero byte; bytes that are not UTF-8 as `\xff`."""
        return self._to_zero(expected).decode(errors="backslashreplace")

    def _to_zero(self, expected: str) -> bytes:
        at = self.at
        stop = self.payload.find(0, at)
        if stop < 0:
            raise self.error(f"{expected} and a zero byte", f"{self.end - at} bytes, none zero", at)
        self.at = stop + 1
        return self.payload[at:stop]

    def octets(self, expected: str) -> bytes:
        """Return the bytes after a signed 32-bit length, which is how many they are."""
        at = self.at
        length = self.number(INT32, f"the length of {expected}")
        start = self.at
        if not 0 <= length <= self.end - start:
            left = f"{length} with {self.end - start} bytes left"
            raise self.error(f"the length of {expected}", left, at)
        self.at = start + length
        return self.payload[start : self.at]

    def oids(self, count: int, at: int, expected: str) -> tuple[int, ...]:
        """Return `count` OIDs; the count itself was at `at`."""
        if not 0 <= count <= (self.end - self.at) // 4:
            left = f"{count} with {self.end - self.at} bytes left"
            raise self.error(f"the number of {expected}", left, at)
        return tuple([self.number(UINT32, expected) for _ in range(count)])

    def tuple_data(self) -> TupleData:
        """Return one value per column.

        Written out rather than by `tag` and `octets`: a row message spends its time here.
        """
        count = self.number(UINT16, "the number of columns")
        payload, at, end = self.payload, self.at, self.end
        length_at = INT32.unpack_from
        values: list[Value] = []
        for _ in range(count):
            kind = payload[at] if at < end else None
            if kind in _WITH_LENGTH:
                start = at + 5
                if start > end:
                    found = f"{end - at - 1} of its 4 bytes"
                    raise self.error("the length of a value", found, at + 1)
                length = length_at(payload, at + 1)[0]
                if not 0 <= length <= end - start:
                    found = f"{length} with {end - start} bytes left"
                    raise self.error("the length of a value", found, at + 1)
                at = start + length
                data = payload[start:at]
                values.append(data if kind == _TEXT else Binary(data))
            elif kind == _NULL:
                values.append(None)
                at += 1
            elif kind == _UNCHANGED:
                values.append(UNCHANGED)
                at += 1
            else:
                found = "nothing" if kind is None else f"0x{kind:02x}"
                raise self.error("a value of kind 'n', 'u', 't' or 'b'", found, at)
        self.at = at
        return tuple(values)

    def finish(self) -> None:
        """Refuse bytes after the message."""
        if self.at != self.end:
            raise self.error("the end", f"{self.end - self.at} more bytes", self.at)
