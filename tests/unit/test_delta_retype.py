"""A column of another type: each stored value as Postgres casts it, or its text in `_exact`."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from lockstep.sinks.delta.retype import retyped

TEXT: Final = pa.string()
SINGLE, DOUBLE, LONG = pa.float32(), pa.float64(), pa.int64()
AMOUNT: Final = pa.decimal128(10, 2)
INSTANT: Final = pa.timestamp("us", "UTC")
NAN: Final = float("nan")
INFINITE: Final = float("inf")


@pytest.mark.parametrize(
    ("stored", "kind", "values", "texts"),
    [
        # As Postgres prints it: SELECT 3.3::real::text and so on.
        ((SINGLE, [3.3, 1e6, 0.0, NAN]), TEXT, ["3.3", "1e+06", "0", "NaN"], []),
        ((DOUBLE, [0.1, 1e15, 1.0, -INFINITE]), TEXT, ["0.1", "1e+15", "1", "-Infinity"], []),
        ((pa.list_(SINGLE), [[3.3, None]]), TEXT, ["{3.3,NULL}"], []),
        ((SINGLE, [3.3, 1234567.0]), AMOUNT, [Decimal("3.30"), Decimal("1234570.00")], []),
        ((SINGLE, [1e30, -INFINITE]), AMOUNT, [None, None], [f"1{30 * '0'}", "-Infinity"]),
        ((SINGLE, [3.3]), DOUBLE, [3.299999952316284], []),
        ((DOUBLE, [3.0, 3.5, 1e30]), LONG, [3, None, None], ["3.5", "1e+30"]),
        # What the new type can't hold: none of it stops the follower.
        ((TEXT, ["7", 30 * "1", "x"]), LONG, [7, None, None], [30 * "1", "x"]),
        ((TEXT, ["0001-01-01 00:00:00+14"]), INSTANT, [None], ["0001-01-01 00:00:00+14"]),
        ((TEXT, ["2026-01-02 03:00:00+01"]), INSTANT, [datetime(2026, 1, 2, 2, tzinfo=UTC)], []),
        ((TEXT, ["1e999", "NaN", "0.5"]), AMOUNT, [None, None, Decimal("0.50")], ["1e999", "NaN"]),
    ],
)
def test_a_value_under_another_type(
    stored: tuple[pa.DataType, list[Any]], kind: pa.DataType, values: list[Any], texts: list[str]
) -> None:
    kept = pa.array(stored[1], stored[0])
    found, odd = retyped(pa.concat_arrays([kept, pa.nulls(1, kept.type)]), None, kind)
    assert found.to_pylist() == [*values, None]
    assert [each for each in odd.to_pylist() if each is not None] == texts
