"""What Arrow finds to differ between the rows of a view is what Python finds, value by value."""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs.views.comparing import among, differences, has_duplicates
from tests.fixtures.seeds import examples

_FLOATS: Final = st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf"), -2.0])
_TIMES: Final = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - its zone is given
_KINDS: Final[dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]]] = {
    "int4": (pa.int32(), st.integers(-2, 2)),
    "int8": (pa.int64(), st.integers(-2, 2)),
    "text": (pa.string(), st.text("aé\0", max_size=2)),
    "bytea": (pa.binary(), st.binary(max_size=1)),
    "bool": (pa.bool_(), st.booleans()),
    "float4": (pa.float32(), _FLOATS),
    "float8": (pa.float64(), _FLOATS),
    "numeric": (pa.decimal128(9, 2), st.sampled_from([Decimal("0.00"), Decimal("1.50")])),
    "date": (pa.date32(), st.sampled_from([date(1, 1, 1), date(2024, 2, 29)])),
    "timestamptz": (pa.timestamp("us", "UTC"), _TIMES),
    "_float8": (pa.list_(pa.float64()), st.lists(_FLOATS | st.none(), max_size=2)),
}


def _same(value: Any) -> object:  # noqa: ANN401 - any type's
    if isinstance(value, list):
        return tuple(map(_same, value))
    return struct.pack(">d", value) if isinstance(value, float) else value


def _rows(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(map(_same, row.values())) for row in table.to_pylist()]


@st.composite
def _states(draw: st.DrawFn) -> tuple[int, pa.Table, pa.Table]:
    """Draw the number of key columns, and two tables in which each key is once."""
    keys = draw(st.lists(st.sampled_from([*_KINDS]), min_size=1, max_size=2))
    kinds = [_KINDS[each] for each in (*keys, *draw(st.lists(st.sampled_from([*_KINDS]))))]
    values = [each if at < len(keys) else each | st.none() for at, (_, each) in enumerate(kinds)]
    schema = pa.schema([(str(at), kind) for at, (kind, _) in enumerate(kinds)])

    def table() -> pa.Table:
        drawn = draw(st.lists(st.tuples(*values), max_size=12))
        once = {tuple(map(_same, row[: len(keys)])): row for row in drawn}.values()
        cut = draw(st.integers(0, len(once)))
        parts = [[*once][:cut], [*once][cut:]]
        rows = ([{str(at): each for at, each in enumerate(row)} for row in part] for part in parts)
        return pa.concat_tables(pa.Table.from_pylist(part, schema) for part in rows)

    return len(keys), table(), table()


@given(_states())
@settings(max_examples=examples(300))
def test_rows_that_differ_are_found(drawn: tuple[int, pa.Table, pa.Table]) -> None:
    keys, was, now = drawn
    found = differences(was, now, [str(at) for at in range(keys)])
    old, new = ({row[:keys]: row for row in _rows(side)} for side in (was, now))
    assert _rows(found.missing) == [row for key, row in old.items() if key not in new]
    assert _rows(found.now) == [row for key, row in new.items() if old.get(key) != row]


@given(_states())
@settings(max_examples=examples(100))
def test_a_key_that_occurs_twice_is_found(drawn: tuple[int, pa.Table, pa.Table]) -> None:
    keys, was, now = drawn
    names, both = [str(at) for at in range(keys)], pa.concat_tables([was, now])
    assert not has_duplicates(was, names)
    of_both = [row[:keys] for row in _rows(both)]
    assert has_duplicates(both, names) == (len({*of_both}) < len(of_both))


@pytest.mark.parametrize(
    ("column", "values", "found"),
    [
        (pa.array([1, 2, None], pa.int32()), pa.array([2, None], pa.int64()), [False, True, True]),
        (pa.array([1, 2, None], pa.int32()), pa.array([2], pa.int64()), [False, True, False]),
        (pa.array(["a", ""]), pa.array([""]), [False, True]),
        (pa.array([Decimal("1.50")]), pa.array([Decimal("1.500")]), [True]),
        (pa.array([Decimal(3)]), pa.array([3, 4]), [True]),
        (pa.array([1, 2]), pa.array([], pa.int64()), [False, False]),
    ],
)
def test_rows_with_a_wanted_value_are_found(
    column: pa.Array, values: pa.Array, found: list[bool]
) -> None:
    rows = pa.table({"a": column})
    assert among(rows, {"a": values}).to_pylist() == found
    assert among(rows, {}).to_pylist() == [True] * rows.num_rows
