"""What two holdings of a table differ in: by key, seq and a digest of what is stored.

Pure. A holding takes 32 bytes a key, whatever the rows' size, so that tables of millions of rows
are compared in the memory of one process; so does what events leave of each key while they are gone
through (`Newest`). Keys are told by digest: a report holds no values.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEY_BYTES: Final = 16
_VALUE_BYTES: Final = 8
_AT_ONCE: Final = 50_000
_COLUMNS: Final = ("key", "seq", "value")
# Events that wait to be folded are at least so many, and at most as many as there are keys.
_FOLDED_AT: Final = 1_000_000


class Difference(NamedTuple):
    """What of one key is not the same; a side without the key has no seq."""

    key: str  # a digest, in hexadecimal
    left: int | None
    right: int | None


class Holding:
    """The keys of one side, with their seqs and, where they matter, digests of their values."""

    def __init__(self, rows: Iterable[tuple[bytes, int, bytes | None]]) -> None:
        """Take in `rows`: key, seq, and what is stored of it."""
        keys, seqs, values = bytearray(), [], bytearray()
        batches: list[pa.Table] = []
        for key, seq, value in rows:
            keys += blake2b(key, digest_size=_KEY_BYTES).digest()
            seqs.append(seq)
            values += blake2b(value or b"", digest_size=_VALUE_BYTES).digest()
            if len(seqs) == _AT_ONCE:
                batches.append(_table(keys, seqs, values))
                keys, seqs, values = bytearray(), [], bytearray()
        batches.append(_table(keys, seqs, values))
        self._rows = pa.concat_tables(batches).combine_chunks()

    @classmethod
    def of(cls, keys: pa.Array, seqs: pa.Array) -> Holding:
        """Return the holding of keys that are digests already; of its values nothing is known."""
        holding = cls([])
        values = pa.nulls(len(keys), pa.binary(_VALUE_BYTES))
        holding._rows = pa.table({"key": keys, "seq": seqs, "value": values})
        return holding

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def differences(self, other: Holding, *, values: bool = True) -> list[Difference]:
        """Return the keys of which not both have the same; without `values` by key and seq."""
        columns = list(_COLUMNS if values else _COLUMNS[:2])
        mine = _left_alone(self._rows, other._rows, columns)
        theirs = _left_alone(other._rows, self._rows, columns)
        return [
            Difference(key.hex(), mine.get(key), theirs.get(key))
            for key in sorted(mine.keys() | theirs.keys())
        ]


class Newest:
    """Of events in any order the newest of each key."""

    def __init__(self) -> None:
        self._keys, self._codes = bytearray(), array("q")
        self._waiting: list[pa.Table] = []
        self._folded = _coded(b"", array("q"))

    def add(self, key: bytes, seq: int, *, there: bool) -> None:
        """Take in an event, behind which the key's row is there, or not."""
        self._keys += blake2b(key, digest_size=_KEY_BYTES).digest()
        self._codes.append(2 * seq + there)
        if len(self._codes) == _AT_ONCE:
            self._pack()
            if sum(map(len, self._waiting)) >= max(_FOLDED_AT, len(self._folded)):
                self._fold()

    def rows(self, above: int) -> Holding:
        """Return the rows that are there, and were written above a seq."""
        self._pack()
        self._fold()
        codes = self._folded["code"]
        there = pc.equal(pc.bit_wise_and(codes, 1), 1)
        found = self._folded.filter(pc.and_(there, pc.greater(codes, 2 * above + 1)))
        return Holding.of(found["key"], pc.shift_right(found["code"], 1))

    def _pack(self) -> None:
        self._waiting.append(_coded(bytes(self._keys), self._codes))
        self._keys, self._codes = bytearray(), array("q")

    def _fold(self) -> None:
        every = pa.concat_tables([self._folded, *self._waiting])
        newest = every.group_by("key").aggregate([("code", "max")])
        self._folded, self._waiting = newest.rename_columns(["key", "code"]), []


def _coded(keys: bytes, codes: array[int]) -> pa.Table:
    rows = len(codes)
    code = pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(codes.tobytes())])
    return pa.table({"key": _fixed(keys, _KEY_BYTES, rows), "code": code})


def _left_alone(one: pa.Table, other: pa.Table, columns: list[str]) -> dict[bytes, int]:
    """Return key and seq of the rows of one that the other has not."""
    left = one.select(columns).join(other.select(columns), keys=columns, join_type="left anti")
    return dict(zip(left["key"].to_pylist(), left["seq"].to_pylist(), strict=True))


def _table(keys: bytearray, seqs: list[int], values: bytearray) -> pa.Table:
    rows = len(seqs)
    return pa.table(
        {
            "key": _fixed(bytes(keys), _KEY_BYTES, rows),
            "seq": pa.array(seqs, pa.int64()),
            "value": _fixed(bytes(values), _VALUE_BYTES, rows),
        }
    )


def _fixed(data: bytes, width: int, rows: int) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(width), rows, [None, pa.py_buffer(data)])
