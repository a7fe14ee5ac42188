"""LSNs and positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.events import LSN, Position

lsns = st.integers(0, 2**64 - 1).map(LSN)


@given(lsns)
def test_an_lsn_reads_what_it_writes(lsn: LSN) -> None:
    assert LSN.parse(str(lsn)) == lsn
    assert LSN.parse(str(lsn).lower()) == lsn
    assert isinstance(LSN.parse(str(lsn)), LSN)


def test_an_lsn_is_written_as_postgres_writes_it() -> None:
    assert str(LSN(0)) == "0/0"
    assert str(LSN(24023176)) == "0/16E9088"
    assert str(LSN(2**64 - 1)) == "FFFFFFFF/FFFFFFFF"
    assert repr(LSN(24023176)) == "LSN('0/16E9088')"


@pytest.mark.parametrize(
    "text",
    ["", "0", "/", "0/", "/0", "1/2/3", "g/0", "-1/0", "+1/0", "0x1/0", "1_0/0", " 1/1", "1/1 ",
     "1/1\n", "100000000/0", "0/100000000", "\u0661/1"],
)  # fmt: skip
def test_anything_else_is_no_lsn(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        LSN.parse(text)


@given(st.lists(st.tuples(st.integers(1, 3), lsns, st.integers(1, 9)), max_size=9))
def test_positions_order_by_epoch_then_commit_then_ordinal(
    places: list[tuple[int, LSN, int]],
) -> None:
    assert [tuple(p) for p in sorted(Position(*place) for place in places)] == sorted(places)
