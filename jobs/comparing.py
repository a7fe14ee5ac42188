"""What two holdings of a table differ in: by key, seq and a digest of what is stored.

Pure. A holding takes 32 bytes a key, whatever the rows' size, so that tables of millions of rows
are compared in the memory of one process. Keys are told by digest: a report holds no values.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEY_BYTES: Final = 16
_VALUE_BYTES: Final = 8
_AT_ONCE: Final = 50_000
_COLUMNS: Final = ("key", "seq", "value")


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
