"""From a place in Redis follow, for any values, the keys whose row may be there."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.sinks.shapes import Placer, RowShape


@settings(max_examples=200)
@given(
    values=st.lists(st.none() | st.integers() | st.booleans() | st.text(), min_size=1, max_size=3)
)
def test_a_place_shows_its_possible_keys(values: list[object]) -> None:
    columns = tuple(f"c{n}" for n in range(len(values)))
    key = msgspec.json.encode(dict(zip(columns, values, strict=True)))
    placer = Placer(RowShape(), "shop", "public.users")
    assert key in placer.keys(placer.place(key), columns)
