"""The rows of a file that have one of some values in a column: sorted values, with the row of each.

A few values are found in so many steps as the file's size has digits, however many rows it has.
Values of different types compare by what they are: integers, dates and decimals (as integers of
their last digit) as one integer, texts as themselves. Other types have no index.

Pure.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

_EPOCH: Final = date(1970, 1, 1).toordinal()
INTEGERS: Final = range(-(1 << 63), 1 << 63)
# Of so many digits a decimal is one 64-bit integer, the lower half of what Arrow has.
_DIGITS: Final = 18
# A column that this many times the rows pass as another is not asked.
_MORE_ROWS: Final = 8


def _is_indexable(kind: pa.DataType) -> bool:
    """Return whether a column of this type can have an index."""
    if types.is_decimal128(kind):
        return int(kind.precision) <= _DIGITS
    return bool(types.is_signed_integer(kind) or types.is_date32(kind) or types.is_string(kind))


def sought(kind: pa.DataType, values: Collection[Hashable]) -> pa.Array | None:
    """Return what an index of a column has for these values; None if it may not find some.

    Without those that a column of this type can't have.
    """
    if not _is_indexable(kind):
        return None
    found = list[object]()
    for value in values:
        match value:
            case bool():
                return None
            case int() if types.is_integer(kind):
                found.append(value)
            case str() if types.is_string(kind):
                found.append(value)
            case date() if types.is_date(kind):
                found.append(value.toordinal() - _EPOCH)
            case Decimal() | int() if types.is_decimal(kind):
                numerator, denominator = value.as_integer_ratio()
                digits, rest = divmod(numerator * 10**kind.scale, denominator)
                found += [] if rest else [digits]
            case _:
                return None
    if types.is_string(kind):
        return pa.array(found, pa.string())
    return pa.array([each for each in found if each in INTEGERS], pa.int64())


def index(values: pa.Array, rows: pa.Array) -> pa.RecordBatch:
    """Return the index of a column's values in some rows: `value`, ascending, and `row`."""
    there = values.is_valid()
    values, rows = _comparable(values.filter(there)), rows.filter(there)
    order = pc.sort_indices(values)
    return pa.record_batch({"value": values.take(order), "row": rows.take(order).cast(pa.int32())})


def _comparable(values: pa.Array) -> pa.Array:
    kind = values.type
    if types.is_string(kind):
        return values
    if types.is_date32(kind):
        return values.cast(pa.int32()).cast(pa.int64())
    if not types.is_decimal(kind):
        return values.cast(pa.int64())
    first, many = 2 * values.offset, 2 * len(values)
    words = pa.Array.from_buffers(pa.int64(), first + many, [None, values.buffers()[1]])
    return words.take(pa.array(range(first, first + many, 2), pa.int64()))


def find(tests: Iterable[tuple[pa.RecordBatch, pa.Array]]) -> pa.Array:
    """Return the rows that have a value of each test, in no order, and maybe others.

    A test has an index of the rows, and values. One that far more rows pass than another is left
    out: a column may have the same value in every row.
    """
    spans = [
        (_spans(index.column("value"), wanted), index.column("row")) for index, wanted in tests
    ]
    counted = sorted(
        (sum(high - low for low, high in each), at) for at, (each, _) in enumerate(spans)
    )
    found: pa.Array | None = None
    for count, at in counted:
        if count > _MORE_ROWS * counted[0][0]:
            break
        places, rows = spans[at]
        here = pa.concat_arrays(
            [rows.slice(0, 0), *(rows.slice(low, high - low) for low, high in places)]
        )
        found = here if found is None else found.filter(pc.is_in(found, value_set=here))
    assert found is not None, "there is a test"
    return found


def _spans(values: pa.Array, wanted: pa.Array) -> list[tuple[int, int]]:
    """Return from where to where the sorted values are the wanted ones."""
    first = pc.search_sorted(values, wanted, side="left")
    end = pc.search_sorted(values, wanted, side="right")
    hit = pc.less(first, end)
    if not hit.true_count:
        return []
    return list(zip(first.filter(hit).to_pylist(), end.filter(hit).to_pylist(), strict=True))


def contains(ascending: pa.Array, wanted: pa.Array) -> pa.BooleanArray:
    """Return which of the values are among those in ascending order."""
    first = pc.search_sorted(ascending, wanted, side="left")
    return pc.less(first, pc.search_sorted(ascending, wanted, side="right"))
