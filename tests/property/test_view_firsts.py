"""The first rows of each key among its first rows and added ones are those among all rows."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.views import View
from lockstep.jobs.views.firsts import Firsts, Ordered, first_rows
from lockstep.jobs.views.plans import plan
from tests.fixtures.view_list import TIMELINE as OF_USERS
from tests.unit.test_view_plans import TABLES

TIMELINE: Final = OF_USERS.sql
_SCHEMA: Final = pa.schema([("k", pa.string()), ("a", pa.int32()), ("id", pa.int64())])
_ROWS: Final = st.lists(
    st.fixed_dictionaries({"k": st.sampled_from("xyz"), "a": st.none() | st.integers(0, 3)}),
    max_size=30,
)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, _SCHEMA)


@given(_ROWS, st.integers(0, 30), st.integers(1, 4), st.tuples(*[st.booleans()] * 3))
def test_added_rows_take_the_places_of_others(
    rows: list[dict[str, Any]], at: int, most: int, drawn: tuple[bool, bool, bool]
) -> None:
    descends, nulls_first, other = drawn
    rows = [{**row, "id": number} for number, row in enumerate(rows)]
    order = (Ordered("a", descends, nulls_first), Ordered("id", other, other))
    of = Firsts("k", order, most)
    before = first_rows(_table(rows[:at]), of)
    assert before is not None
    found = first_rows(pa.concat_tables([before, _table(rows[at:])]), of)
    assert found is not None
    wanted = []
    for key in "xyz":
        of_key = [row for row in rows if row["k"] == key]
        of_key.sort(key=lambda row: row["id"], reverse=other)
        of_key.sort(key=lambda row: row["a"] or 0, reverse=descends)
        of_key.sort(key=lambda row: row["a"] is None, reverse=nulls_first)
        wanted += of_key[:most]
    assert found.to_pylist() == wanted


def test_rows_without_a_key_are_computed_again() -> None:
    rows = _table([{"k": "x", "a": 1, "id": 1}, {"k": None, "a": 1, "id": 2}])
    assert (
        first_rows(rows, Firsts("k", (Ordered("id", descends=True, nulls_first=True),), 1)) is None
    )


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("JOIN", "LEFT JOIN"),
        ("JOIN follows f", "JOIN (SELECT DISTINCT follower_id, followee_id FROM follows) f"),
        ("place <= 3", "place < 3"),
        ("place <= 3", "place <= 3 AND body <> ''"),
        ("WHERE place <= 3", "WHERE place <= 3 AND tweet_id IN (SELECT id FROM orders)"),
        ("body, at FROM (SELECT", "body, at, place FROM (SELECT"),
        ("follower_id, tweet_id, body, at", "tweet_id, body, at"),
        ("row_number()", "rank()"),
        ("t.id DESC)", "t.id DESC, f.followee_id)"),
    ],
)
def test_other_forms_are_computed_again(written: str, instead: str) -> None:
    assert TIMELINE.count(written) >= 1
    view = View(sql=TIMELINE.replace(written, instead, 1), key=("tweet_id",))
    assert plan("v", {"v": view}, TABLES).firsts is None


def test_the_form_is_seen_whatever_its_columns_are_called() -> None:
    sql = TIMELINE.replace(
        "follower_id, tweet_id, body, at", "at AS a, tweet_id AS t, follower_id AS who"
    )
    found = plan("v", {"v": View(sql=sql, key=("who", "t"))}, TABLES).firsts
    assert found is not None
    assert (found.by, [*found.order], found.most) == (
        "who",
        [Ordered(name, descends=True, nulls_first=True) for name in "at"],
        3,
    )
