"""Times of a mirror's rows have the form that the log has: no digits that say nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sinks.contract import Column, Version
from lockstep.sinks.delta import json as delta_json
from lockstep.sinks.delta import layout

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST: Final = datetime(1, 1, 1, tzinfo=UTC)
_LAST: Final = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
_ROUND: Final = st.sampled_from([1, 10, 1_000, 1_000_000, 60_000_000, 86_400_000_000])
_COLUMN: Final = Column("at", "timestamptz", 1184, -1, nullable=True)
_TABLE: Final = Version(1, "public", "t", "x.public.t", ("at",), (_COLUMN,), {})


@given(st.lists(st.none() | st.tuples(st.datetimes(timezones=st.just(UTC)), _ROUND)))
def test_times_have_the_digits_that_they_need(drawn: list[tuple[datetime, int] | None]) -> None:
    times = [
        each and max(_FIRST, each[0] - (each[0] - _EPOCH) % timedelta(microseconds=each[1]))
        for each in (*drawn, (_LAST, 1))
    ]
    table = pa.table(
        {
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            layout.EXACT: pa.nulls(len(times), pa.map_(pa.string(), pa.string())),
        }
    )
    wanted = []
    for each in times:
        digits = each and f".{each.microsecond:06}".rstrip("0").rstrip(".")
        wanted.append(each and f"{each.replace(microsecond=0, tzinfo=None).isoformat()}{digits}Z")
    found = [msgspec.json.decode(row)["at"] for _, row in delta_json.rows(table, _TABLE)]
    assert found == wanted
