"""Which way a view is computed: by the time that both took, or by a share of the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.views import View
from lockstep.jobs.views.costs import Costs, Decision, Stopwatch
from lockstep.jobs.views.plans import plan
from tests.fixtures import tpch_list

if TYPE_CHECKING:
    from collections.abc import Iterator

_SQL = "SELECT o_orderkey AS id, count(*) AS n FROM orders GROUP BY o_orderkey"
VIEW, OTHER = (
    plan("v", {"v": View(sql=sql, key=("id",))}, tpch_list.TABLES)
    for sql in (_SQL, _SQL.replace("orders", "orders WHERE o_orderkey > 1"))
)
ROWS = 1_000_000


def full(seconds: float, costs: Costs) -> Costs:
    costs.note(VIEW, Decision("v", "full", ""), seconds)
    return costs


def joined(keys: int, seconds: float, costs: Costs) -> Costs:
    costs.note(VIEW, Decision("v", "keys", "joined", keys), seconds)
    return costs


@pytest.mark.parametrize("costs", [Costs(), full(1.0, Costs()), joined(9_000, 9.0, Costs())])
def test_until_both_ways_were_measured_a_share_of_the_rows_decides(costs: Costs) -> None:
    assert costs.why_full(VIEW, ROWS // 5, ROWS) == ""
    assert costs.why_full(VIEW, ROWS // 5 + 1, ROWS) == "more than 20% are affected"


def test_the_cheaper_way_is_taken_whatever_the_share() -> None:
    slow = joined(10_000, 8.0, full(4.0, Costs()))
    says = "they would take 8.0 s, as the last 10,000, and all rows 4.0 s"
    assert slow.why_full(VIEW, 6_000, ROWS) == says
    fast = joined(10_000, 1.0, full(4.0, Costs()))
    assert fast.why_full(VIEW, 39_000, 50_000) == ""
    assert fast.why_full(VIEW, 41_000, 50_000).startswith("they would take 4.1 s")


def test_another_definition_has_no_figures_yet() -> None:
    assert joined(10_000, 8.0, full(4.0, Costs())).why_full(OTHER, 6_000, ROWS) == ""


def test_small_ways_are_no_figure() -> None:
    """Few affected keys are looked up: that shows nothing of many."""
    costs = full(4.0, Costs())
    costs.note(VIEW, Decision("v", "keys", "3 by changes of orders"), 9.0)
    costs.note(VIEW, Decision("v", "nothing", ""), 9.0)
    assert costs.why_full(VIEW, 6_000, ROWS) == ""


@given(st.floats(0.1, 1e3), st.floats(0.1, 1e3))
def test_a_way_that_was_slow_once_is_tried_again(all_rows: float, keys: float) -> None:
    costs = joined(10_000, keys, full(all_rows, Costs()))
    tries = 0
    while costs.why_full(VIEW, 10_000, ROWS):
        full(all_rows, costs)
        tries += 1
    assert tries <= 100


def test_what_is_done_with_items_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def made() -> Iterator[int]:
        nonlocal now
        for each in range(3):
            now += 2.0
            yield each
        now += 1.0

    clock = Stopwatch()
    for _ in clock.timed(made()):
        now += 100.0
    assert clock.seconds == 7.0
