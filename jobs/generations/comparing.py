"""The differences between two holdings of a table: by key, seq and a digest of the stored row.

Pure. A holding takes 32 bytes per key, regardless of the rows' size, so that tables of millions of
rows are compared in the memory of one process, even if all of them differ. `Newest`, which reduces
events to the newest of each key, takes the same. Keys are reported by digest: a report holds no
values.
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
AT_ONCE: Final = 50_000
_COLUMNS: Final = ("key", "seq", "value")
# How many events are gathered before they are folded; more once there are more keys than this.
FOLDED_AT: Final = 1_000_000


class KeyDifference(NamedTuple):
    """A key that differs; a side without the key has no seq."""

    key: str  # a digest, in hexadecimal
    left: int | None
    right: int | None


class Holding:
    """The keys of one side, with their seqs and, where needed, digests of their values."""

    def __init__(self, rows: Iterable[tuple[bytes, int, bytes | None]]) -> None:
        """`rows` yields key, seq, and the stored row."""
        keys, seqs, values = bytearray(), [], bytearray()
        batches: list[pa.Table] = []
        for key, seq, value in rows:
            keys += blake2b(key, digest_size=_KEY_BYTES).digest()
            seqs.append(seq)
            values += blake2b(value or b"", digest_size=_VALUE_BYTES).digest()
            if len(seqs) == AT_ONCE:
                batches.append(_table(keys, seqs, values))
                keys, seqs, values = bytearray(), [], bytearray()
        batches.append(_table(keys, seqs, values))
        self._rows = pa.concat_tables(batches).combine_chunks()

    @classmethod
    def of(cls, keys: pa.Array, seqs: pa.Array) -> Holding:
        """Return the holding of keys that are already digests; its values are unknown."""
        holding = cls([])
        values = pa.nulls(len(keys), pa.binary(_VALUE_BYTES))
        holding._rows = pa.table({"key": keys, "seq": seqs, "value": values})
        return holding

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def differences(self, other: Holding, *, values: bool = True) -> Differences:
        """Return the keys that differ between both; without `values`, compare key and seq only."""
        columns = list(_COLUMNS if values else _COLUMNS[:2])
        mine = _left_alone(self._rows, other._rows, columns, "left")
        theirs = _left_alone(other._rows, self._rows, columns, "right")
        return Differences(mine.join(theirs, keys="key", join_type="full outer"))


class Differences:
    """The keys that differ between two holdings."""

    def __init__(self, rows: pa.Table) -> None:
        """`rows` have `key`, and the seqs `left` and `right`, null on a side without the key."""
        self._rows = rows

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    @property
    def missing(self) -> tuple[int, int]:
        """How many keys the left side lacks, and how many the right side."""
        return self._rows["left"].null_count, self._rows["right"].null_count

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        return int(self._rows.nbytes)

    def first(self, count: int) -> tuple[KeyDifference, ...]:
        """Return the first keys in order, at most so many."""
        places = pc.select_k_unstable(self._rows, count, [("key", "ascending")])
        found = self._rows.take(places).to_pylist()
        return tuple(
            KeyDifference(each["key"].hex(), each["left"], each["right"]) for each in found
        )

    def up_to(self, seq: int) -> Differences:
        """Return those of which neither side has a later seq."""
        newest = pc.max_element_wise(self._rows["left"], self._rows["right"])
        return Differences(self._rows.filter(pc.less_equal(newest, seq)))

    def found_again(self, before: Differences) -> Differences:
        """Return those whose keys differed `before`."""
        keys = before._rows.select(["key"])
        return Differences(self._rows.join(keys, keys="key", join_type="left semi"))

    def only_left(self) -> Differences:
        """Return those that the left side has."""
        return Differences(self._rows.filter(pc.is_valid(self._rows["left"])))

    def not_altered(self, seq: int) -> Differences:
        """Return those that are not the left side's rewriting, at this seq, of an older row."""
        altered = pc.and_(pc.equal(self._rows["left"], seq), pc.less(self._rows["right"], seq))
        return Differences(self._rows.filter(pc.invert(pc.fill_null(altered, fill_value=False))))


class Newest:
    """The newest event of each key, from events in any order."""

    def __init__(self) -> None:
        self._keys, self._codes = bytearray(), array("q")
        self._waiting: list[pa.Table] = []
        self._folded = _coded(b"", array("q"))

    def add(self, key: bytes, seq: int, *, there: bool) -> None:
        """Add an event; `there`: the key's row exists after it."""
        self._keys += blake2b(key, digest_size=_KEY_BYTES).digest()
        self._codes.append(2 * seq + there)
        if len(self._codes) == AT_ONCE:
            self._pack()
            if sum(map(len, self._waiting)) >= max(FOLDED_AT, len(self._folded)):
                self._fold()

    def rows(self, above: int) -> Holding:
        """Return the rows that exist and whose seq is above `above`."""
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


def _left_alone(one: pa.Table, other: pa.Table, columns: list[str], seq: str) -> pa.Table:
    """Return the key, and as `seq` the seq, of the rows of `one` that `other` does not have."""
    left = one.select(columns).join(other.select(columns), keys=columns, join_type="left anti")
    return left.select(["key", "seq"]).rename_columns(["key", seq])


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
