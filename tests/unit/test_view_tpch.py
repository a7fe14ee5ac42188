"""Which of TPC-H's queries can be views as they are, and why the others can't."""

from __future__ import annotations

import pytest

from lockstep.jobs.views.plans import plan
from lockstep.jobs.views.refusing import UnsupportedError
from tests.fixtures.tpch_list import QUERIES, REWRITTEN, TABLES, original, rewritten, tables

_TIED = {2: ', "p_partkey"', 3: ', "l_orderkey"', 10: ', "c_custkey"', 18: ', "o_orderkey"'}


@pytest.mark.parametrize("number", QUERIES)
def test_each_query_of_tpch_is_a_view_where_texts_are_ordered_by_their_bytes(number: int) -> None:
    view = original(number)
    found = plan("q", {"q": view}, tables("C"))
    # Where its order decides, Postgres is asked for the query as it is.
    assert (found.asked["q"] != view.sql) == (number in _TIED)
    assert _TIED.get(number, "") in found.asked["q"]


@pytest.mark.parametrize("number", QUERIES)
def test_a_query_that_orders_texts_is_refused_by_name_in_other_databases(number: int) -> None:
    if number not in REWRITTEN:
        plan("q", {"q": original(number)}, TABLES)
        return
    with pytest.raises(UnsupportedError, match="text in the database's collation") as caught:
        plan("q", {"q": original(number)}, TABLES)
    assert 'COLLATE "C"' in caught.value.hint
    plan("q", {"q": rewritten(number)}, TABLES)


def test_twenty_of_the_22_are_views_in_any_database() -> None:
    assert len(QUERIES) == 22
    assert len(QUERIES.keys() - REWRITTEN) == 20
