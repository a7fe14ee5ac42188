"""Random kills of processes that keep views: fifty rounds of all views with `make campaign`.

A test run has one round of some views. LOCKSTEP_VIEW_KILLS sets how many rounds of all,
LOCKSTEP_SEED the first one's seed, LOCKSTEP_INJURIES names faults to inject instead of the seed's
choice, LOCKSTEP_RESULT names a file for the figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import orjson
import pytest

from cdc.playground.servers.stack import LocalStack
from tests.faults.view_campaign import ViewCampaign
from tests.faults.view_world import ViewWorld
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.seeds import first_seed
from tests.fixtures.servers import Database, fresh_database
from tests.fixtures.spark import need_java
from tests.fixtures.view_list import VIEWS

_ROUNDS = int(os.environ.get("LOCKSTEP_VIEW_KILLS", "1"))
_SEED = first_seed("LOCKSTEP_VIEW_KILLS")
# A test run uses this one, and some of the views; a campaign uses the seed's choice, and all.
_SAMPLE = "" if "LOCKSTEP_VIEW_KILLS" in os.environ else "java"
_SOME = [*VIEWS] if "LOCKSTEP_VIEW_KILLS" in os.environ else Random(_SEED).sample([*VIEWS], 4)
_INJURIES = tuple(filter(None, os.environ.get("LOCKSTEP_INJURIES", _SAMPLE).split(",")))
_RESULT = os.environ.get("LOCKSTEP_RESULT")


@pytest.fixture
def world(
    killable_stack: LocalStack,
    killable_pipeline: NewPipeline,
    killable_database: Database,
    tmp_path: Path,
) -> Iterator[ViewWorld]:
    need_java()
    with fresh_database(killable_database.dsn) as copied:
        made = ViewWorld(killable_pipeline, killable_stack, copied, tmp_path, _SEED, _SOME)
        yield made
        made.close()


@pytest.fixture
def replayed(killable_database: Database) -> Iterator[Database]:
    with fresh_database(killable_database.dsn) as fresh:
        yield fresh


@pytest.mark.long("all views, and more rounds", again=True)
@pytest.mark.view_kills
@pytest.mark.slow
@pytest.mark.timeout(3_600 + 1_800 * _ROUNDS)
def test_every_state_of_every_view_is_postgres_own_answer_whatever_is_killed(
    world: ViewWorld, replayed: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """At each frontier of each store, DDL among the changes."""
    print(f"views: LOCKSTEP_SEED={_SEED} LOCKSTEP_VIEW_KILLS={_ROUNDS}")  # noqa: T201 - on failure

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\nviews: {line}", flush=True)  # noqa: T201 - its progress

    campaign = ViewCampaign(world, replayed, show)
    campaign.begin()
    for number in range(_ROUNDS):
        campaign.round(_SEED + number, _INJURIES)
    report = {"first_seed": _SEED, **campaign.report()}
    show(orjson.dumps(report).decode())
    if _RESULT:
        Path(_RESULT).write_bytes(orjson.dumps(report))
    assert campaign.wrong == []
    assert all(count > 1 for count in report["cuts"].values())
