"""Maintained views are Postgres' own answers at each frontier of their mirror, in every store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lockstep.conformance.memory import STORES, MemorySink
from tests.fixtures.servers import Database
from tests.fixtures.view_list import FULL, STRICT, VIEWS
from tests.fixtures.viewed import Shop, Workload

PARTS = 5


def _rows(store: str, view: str) -> list[dict[str, Any]]:
    return list(STORES[store].rows(f"views.{view}").values())


@pytest.mark.long("the views in five parts, of which one has each kind of join", sample=["0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_each_view_is_postgres_own_answer_after_each_cut(
    database: Database, tmp_path: Path, spark: SparkSession, part: int
) -> None:
    """Of a random workload with new keys, deletes and truncates over six tables."""
    views = {name: VIEWS[name] for name in list(VIEWS)[part::PARTS]}
    shop, name = Shop(database, tmp_path / "lake", VIEWS, views), str(tmp_path)
    load = Workload(database, part)
    wrong, done = [], dict[str, set[str]]()
    for step in range(3):
        load.run(70 if step == 0 else 10)
        shop.cut()
        decisions = shop.follow(spark, lambda: MemorySink(name))
        for view, (how, _) in decisions.items():
            done.setdefault(view, set()).add(how)
        wrong += [
            f"cut {step}, {decisions[view]}, {found}"
            for view in views
            if (found := shop.differences(view, _rows(name, view)))
        ]
    assert wrong == []
    assert [view for view in views if view in STRICT and "full" in done[view]] == []
    assert [view for view in views if view in FULL and not done[view] & {"full", "keys"}] == []
