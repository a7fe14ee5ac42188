"""Views under random changes and kills: after each cut each one is Postgres' own answer.

    LOCKSTEP_VIEWS=50 pytest tests/integration/test_views_campaign.py --tier all -n 3

LOCKSTEP_SEED is the first seed; each seed adds its figures to the file that LOCKSTEP_RESULT names.

A seed chooses the changes, DDL of what no view reads among them, how much of the tables is read by
Spark, and where the follower is killed: before its commit, after it, or between cuts. Each seed has
all listed views; without the variable there is one seed, which chooses four of them.

The mirrors are filled from SELECT, the store is in memory, and a kill is an exception: so there can
be many seeds. `tests/faults/view_campaign.py` has a daemon, processes and stores.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import orjson
import pytest
from pyspark.sql import SparkSession

from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.views import computing, reducing, states
from lockstep.sinks.contract import Applied
from lockstep.sinks.delta import plain
from tests.fixtures.seeds import first_seed
from tests.fixtures.servers import Database
from tests.fixtures.view_list import VIEWS
from tests.fixtures.viewed import Shop, Workload

_SEEDS: Final = int(os.environ.get("LOCKSTEP_VIEWS", "1"))
_FIRST: Final = first_seed("LOCKSTEP_VIEWS")
_CUTS: Final = 10 if "LOCKSTEP_VIEWS" in os.environ else 4
_CHOSEN: Final = len(VIEWS) if "LOCKSTEP_VIEWS" in os.environ else 4
_RESULT: Final = os.environ.get("LOCKSTEP_RESULT")
_KINDS: Final = {
    "before": "killed before its commit",
    "after": "killed after its commit",
    "between": "restarted between cuts",
}
# What is read completely, kept or passed by literals: with 0 nothing.
_LIMITS: Final = (
    (plain, "MOST_FILES"),
    (states, "SMALL_ROWS"),
    (reducing, "MOST_ROWS"),
    (computing, "MOST_ROWS"),
    (computing, "MOST_ANCHORS"),
    (computing, "MOST_LITERALS"),
)


class _KilledError(Exception):
    """The follower ends here, as if by SIGKILL."""


def _sink(store: str, killed: str) -> MemorySink:
    class Killed(MemorySink):
        def commit(self, applied: Applied) -> None:
            if killed == "before":
                raise _KilledError
            super().commit(applied)
            if killed == "after":
                raise _KilledError

    return Killed(store)


@pytest.mark.long("more seeds", again=True)
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _SEEDS))
def test_views_are_postgres_own_answers_whatever_is_killed(
    database: Database,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    chosen = Random(seed)
    names = sorted(chosen.sample([*VIEWS], _CHOSEN))
    shop, store = Shop(database, tmp_path / "lake", VIEWS, names), str(tmp_path)
    load = Workload(database, seed, altering=True)
    load.run(70)
    began, kinds, compared = time.monotonic(), Counter[str](), 0
    for cut in range(_CUTS):
        load.run(chosen.choice([1, 1, 3, 10]))
        shop.adapt()
        shop.cut()
        killed = chosen.choice(["", "", "", "before", "after", "between"])
        with monkeypatch.context() as patched:
            for limit in chosen.sample(_LIMITS, chosen.choice([0, 0, 1, 2])):
                patched.setattr(*limit, 0)
            _follow(shop, spark, partial(_sink, store, killed), killed=killed)
        if killed == "before":
            shop.follow(spark, lambda: MemorySink(store))
        kinds.update([_KINDS[killed]] if killed else [])
        for view in names:
            rows = list(STORES[store].rows(f"views.{view}").values())
            assert shop.differences(view, rows) == "", (seed, cut, killed)
            compared += 1
    if _RESULT:
        figures = {
            "seed": seed,
            "views": len(names),
            "cuts": _CUTS,
            "kinds": kinds,
            "ddl": load.altered,
            "comparisons": compared,
            "differences": 0,
            "seconds": round(time.monotonic() - began, 1),
        }
        with Path(_RESULT).open("ab") as file:
            file.write(orjson.dumps(figures, option=orjson.OPT_APPEND_NEWLINE))


def _follow(
    shop: Shop, spark: SparkSession, sink: Callable[[], MemorySink], *, killed: str
) -> None:
    """Apply a cut, up to where the follower is killed."""
    try:
        shop.follow(spark, sink, restarted=killed == "between")
    except _KilledError:
        shop.remembering = None
