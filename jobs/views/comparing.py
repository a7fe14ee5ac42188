"""How the rows of a view differ from what they were, by Arrow.

Two rows are the same if their values have the same form in a store: not a number equals itself, and
the two zeros of a float differ.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta.columns import one_chunk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Differences(NamedTuple):
    """Rows that are missing, and rows that are new or have other values."""

    missing: pa.Table
    now: pa.Table


def differences(was: pa.Table, now: pa.Table, key: Sequence[str]) -> Differences:
    """Return how rows differ from those before; each side has a key once, without NULL."""
    pairs = _numbered(was, key, "#was").join(
        _numbered(now, key, "#now"), keys=[*key], join_type="full outer"
    )
    old, new = one_chunk(pairs["#was"]), one_chunk(pairs["#now"])
    missing = old.filter(pc.is_null(new))
    both = pc.and_(pc.is_valid(old), pc.is_valid(new))
    added = new.filter(pc.is_null(old))
    changed = _changed(was, old.filter(both), now, new.filter(both), key)
    return Differences(_taken(was, missing), _taken(now, pa.concat_arrays([added, changed])))


def has_duplicates(rows: pa.Table, key: Sequence[str]) -> bool:
    """Return whether a key occurs more than once."""
    keys = pa.table({each: _comparable(rows[each]) for each in key})
    return bool(keys.group_by([*key]).aggregate([]).num_rows < rows.num_rows)


def among(rows: pa.Table, wanted: Mapping[str, pa.Array]) -> pa.ChunkedArray:
    """Return whether each row has one of the values in each of these columns; NULL is a value."""
    found = pa.chunked_array([pa.repeat(True, rows.num_rows)])  # noqa: FBT003 - the value
    for name, values in wanted.items():
        found = pc.and_(found, _among(rows[name], values))
    return found


def _comparable(column: pa.ChunkedArray) -> pa.Array:
    """Return an array of a type that Arrow compares, equal where the values are the same."""
    values = one_chunk(column)
    if pa.types.is_floating(values.type):
        is_double = values.type == pa.float64()
        return values.view(pa.int64() if is_double else pa.int32())
    if pa.types.is_nested(values.type):
        return pa.array([None if v is None else repr(v) for v in values.to_pylist()], pa.string())
    return values


def _numbered(rows: pa.Table, key: Sequence[str], name: str) -> pa.Table:
    columns = {each: _comparable(rows[each]) for each in key}
    return pa.table({**columns, name: pa.arange(0, rows.num_rows)})


def _changed(
    was: pa.Table, old: pa.Array, now: pa.Table, new: pa.Array, key: Sequence[str]
) -> pa.Array:
    """Return those of `new` whose row differs from that of `old` at the same place."""
    same = pa.repeat(True, len(new))  # noqa: FBT003 - the value
    for name in now.column_names:
        if name not in key:
            one = _comparable(was[name]).take(old)
            other = _comparable(now[name]).take(new)
            both_null = pc.and_(pc.is_null(one), pc.is_null(other))
            equal = pc.fill_null(pc.equal(one, other), False)  # noqa: FBT003 - the value
            same = pc.and_(same, pc.or_(equal, both_null))
    return new.filter(pc.invert(same))


def _taken(rows: pa.Table, places: pa.Array) -> pa.Table:
    """Return rows in their order: that of a join is any."""
    return rows.take(places.take(pc.sort_indices(places)))


def _among(column: pa.ChunkedArray, values: pa.Array) -> pa.ChunkedArray:
    if pa.types.is_integer(column.type) and pa.types.is_integer(values.type):
        column, values = column.cast(pa.int64()), values.cast(pa.int64())
    if column.type == values.type:
        return pc.is_in(column, value_set=values)
    wanted = {*values.to_pylist()}  # as a number of another type, which Python compares
    return pa.chunked_array([pa.array([each in wanted for each in column.to_pylist()], pa.bool_())])
