"""Decode deletion vectors: sets of a file's row numbers in Delta's Roaring format.

Every writer's vectors are read, so all three kinds of containers are.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md#deletion-vector-format
https://github.com/RoaringBitmap/RoaringFormatSpec
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta.actions import z85_decoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyarrow.fs import PyFileSystem

_MAGIC: Final = 1_681_511_377
_NO_RUNS, _RUNS = 12_346, 12_347
# With fewer containers than this, a bitmap with runs has no offsets.
_OFFSETS_FROM: Final = 4
_ARRAY_MOST: Final = 4_096
_BITMAP_BYTES: Final = 8_192


def deleted_rows(files: PyFileSystem, vector: Mapping[str, Any]) -> pa.Array:
    """Return the row numbers in a deletion vector, as an add action names it, ascending."""
    if not vector:
        return pa.array([], pa.int64())
    where, kind = str(vector["pathOrInlineDv"]), vector["storageType"]
    if kind == "i":
        return decoded(z85_decoded(where))
    if kind != "u":
        raise FileNotFoundError(where)  # an absolute path, which only clones have
    name = z85_decoded(where[-20:]).hex()
    parts = (name[:8], name[8:12], name[12:16], name[16:20], name[20:])
    folder = f"{where[:-20]}/" if where[:-20] else ""
    with files.open_input_file(f"{folder}deletion_vector_{'-'.join(parts)}.bin") as file:
        file.seek(vector["offset"] + 4)
        return decoded(file.read(vector["sizeInBytes"]))


def decoded(data: bytes) -> pa.Array:
    """Return the numbers in a serialized set, ascending."""
    magic, bitmaps = struct.unpack_from("<IQ", data)
    if magic != _MAGIC:
        raise ValueError("a deletion vector has an unknown format")
    found, at = [pa.array([], pa.int64())], 12
    for _ in range(bitmaps):
        (high,) = struct.unpack_from("<I", data, at)
        for low, numbers, end in _containers(data, at + 4):
            at = end
            found.append(pc.add(numbers.cast(pa.int64()), (high << 32) + (low << 16)))
    return pa.concat_arrays(found)


def _containers(data: bytes, at: int) -> Iterator[tuple[int, pa.Array, int]]:
    """Yield a bitmap's containers: the high bits, the low ones, and where the next one begins."""
    (cookie,) = struct.unpack_from("<I", data, at)
    has_runs = cookie & 0xFFFF == _RUNS
    runs = b""
    if has_runs:
        count = (cookie >> 16) + 1
        runs = data[at + 4 : at + 4 + (count + 7) // 8]
        at += 4 + len(runs)
    elif cookie == _NO_RUNS:
        (count,) = struct.unpack_from("<I", data, at + 4)
        at += 8
    else:
        raise ValueError("a deletion vector has an unknown format")
    described = [struct.unpack_from("<HH", data, at + 4 * number) for number in range(count)]
    at += 4 * count
    if not has_runs or count >= _OFFSETS_FROM:
        at += 4 * count
    for number, (low, less_one) in enumerate(described):
        if runs and runs[number // 8] >> number % 8 & 1:
            (pairs,) = struct.unpack_from("<H", data, at)
            each = struct.iter_unpack("<HH", data[at + 2 : at + 2 + 4 * pairs])
            numbers = pa.array([n for first, more in each for n in range(first, first + more + 1)])
            at += 2 + 4 * pairs
        elif less_one < _ARRAY_MOST:
            buffer = pa.py_buffer(data[at : at + 2 * (less_one + 1)])
            numbers = pa.Array.from_buffers(pa.uint16(), less_one + 1, [None, buffer])
            at += 2 * (less_one + 1)
        else:
            buffer = pa.py_buffer(data[at : at + _BITMAP_BYTES])
            bits = pa.Array.from_buffers(pa.bool_(), 8 * _BITMAP_BYTES, [None, buffer])
            numbers = pc.indices_nonzero(bits)
            at += _BITMAP_BYTES
        yield low, numbers, at
