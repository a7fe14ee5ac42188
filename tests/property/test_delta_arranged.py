"""Rows that tasks write as they are equal those that pass through JSON, as a sink gets them."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.events import LSN
from lockstep.jobs.views.types import PgType, numeric
from lockstep.sinks.contract import Applied, Change, Changes, Version
from lockstep.sinks.delta import json as delta_json
from lockstep.sinks.delta import layout
from lockstep.sinks.delta.columns import arrow_type
from lockstep.sinks.delta.rows import EXACT_TYPE, arranged, batch

_AT: Final = Applied("x", 1, 1, LSN(77), 55, 1_790_000_000_123_456, 1, {})
_TEXT: Final = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_TIMES: Final = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))  # noqa: DTZ001 - of no zone
# A value of each type of a view's columns, as Spark returns it.
_VALUES: Final[dict[PgType, st.SearchStrategy[Any]]] = {
    PgType("int2"): st.integers(-(1 << 15), (1 << 15) - 1),
    PgType("int4"): st.integers(-(1 << 31), (1 << 31) - 1),
    PgType("int8"): st.integers(-(1 << 63), (1 << 63) - 1),
    PgType("bool"): st.booleans(),
    PgType("float4"): st.floats(width=32),
    PgType("float8"): st.floats(),
    numeric(10, 2): st.integers(-(10**10) + 1, 10**10 - 1).map(lambda n: Decimal(n).scaleb(-2)),
    numeric(38, 20): st.integers(-(10**30), 10**30).map(lambda n: Decimal(n).scaleb(-20)),
    PgType("numeric"): st.integers(-(10**50), 10**50).map(lambda n: f"{n}.50"),
    PgType("text"): _TEXT,
    PgType("jsonb"): st.dictionaries(_TEXT, st.integers(), max_size=3).map(repr),
    PgType("uuid"): st.uuids().map(str),
    PgType("bytea"): st.binary(),
    PgType("date"): st.dates(date(1, 1, 2)),
    PgType("timestamp"): _TIMES,
    PgType("timestamp", 3): _TIMES,
    PgType("timestamptz"): _TIMES.map(lambda each: each.replace(tzinfo=UTC)),
    PgType("time"): st.sampled_from(["10:20:30", "00:00:00.000001", "24:00:00"]),
    PgType("interval"): st.sampled_from(["1 day 02:03:04", "-1 mons"]),
    PgType("text", mask="hmac:k"): _TEXT,
    PgType("_int4"): st.lists(st.none() | st.integers(-(1 << 31), (1 << 31) - 1)),
    PgType("_text"): st.lists(st.none() | _TEXT),
}


@pytest.mark.parametrize("kind", _VALUES, ids=lambda kind: f"{kind.title}{kind.modifier}")
@given(data=st.data())
def test_rows_as_they_are_equal_those_through_json(kind: PgType, data: st.DataObject) -> None:
    """Of every type, and NULL; with a column that the rows lack and one spelled differently."""
    values = data.draw(st.lists(st.none() | _VALUES[kind], max_size=5))
    version = Version(
        3, "views", "v", "views.v", ("id",), (PgType("int4").column("id"), kind.column("v")), {}
    )
    given_type = arrow_type(kind.delta)
    rows = pa.table(
        {"id": pa.array(range(len(values)), pa.int32()), "v": pa.array(values, given_type)}
    )
    schema = pa.schema(
        [
            ("id", pa.int32()), ("V", given_type), ("older", pa.string()),
            (layout.SEQ, pa.int64()), (layout.COMMIT_LSN, pa.int64()),
            (layout.COMMITTED_AT, pa.timestamp("us", "UTC")), (layout.EXACT, EXACT_TYPE),
        ]
    )  # fmt: skip
    with_exact = rows.append_column(layout.EXACT, pa.nulls(len(values), EXACT_TYPE))
    changes = [
        Change(key, _AT.seq, row, 3, _AT.lsn, _AT.committed_at_us)
        for key, row in delta_json.rows(with_exact, version)
    ]
    through = batch(Changes((version,), changes), schema, {}).rows
    assert repr(arranged(rows, schema, _AT).to_pylist()) == repr(through.to_pylist())
    assert arranged(rows, schema, _AT).schema == schema
