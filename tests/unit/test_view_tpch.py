"""Which of TPC-H's queries can be views, and why the others can't."""

from __future__ import annotations

import pytest

from cdc.config.views import View
from lockstep.jobs.views.plans import plan
from lockstep.jobs.views.refusing import UnsupportedError
from tests.fixtures.tpch_list import QUERIES, REWRITTEN, TABLES

_ANY_ORDER = "LIMIT whose ORDER BY may leave rows in any order"
_COLLATED = "ORDER BY of text in the database's collation"
REFUSED = {
    2: _COLLATED,
    3: _ANY_ORDER,
    10: _ANY_ORDER,
    17: "a numeric of 40 digits",
    18: _ANY_ORDER,
    21: _COLLATED,
}


def _check(number: int, sql: str) -> None:
    key, _ = QUERIES[number]
    plan("q", {"q": View(sql=sql, key=tuple(key.split()))}, TABLES)


@pytest.mark.parametrize("number", QUERIES)
def test_a_query_of_tpch_is_a_view_or_refused_by_name(number: int) -> None:
    sql = QUERIES[number][1]
    if number not in REFUSED:
        _check(number, sql)
        return
    with pytest.raises(UnsupportedError) as caught:
        _check(number, sql)
    assert REFUSED[number] in caught.value.what
    assert caught.value.hint
    old, new = REWRITTEN[number]
    assert old in sql
    _check(number, sql.replace(old, new))


def test_sixteen_of_the_22_are_views_as_they_are() -> None:
    assert len(QUERIES) == 22
    assert len(QUERIES.keys() - REFUSED) == 16
