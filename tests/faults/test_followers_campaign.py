"""Random faults in followers: a round in every test run, fifty with `make campaign`.

LOCKSTEP_FOLLOWERS sets how many rounds, LOCKSTEP_SEED the first one's seed, LOCKSTEP_READS how
often the mirrors are read at a random frontier in the end, LOCKSTEP_INJURIES names faults to inject
instead of the seed's choice, LOCKSTEP_RESULT names a file for the figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from cdc.playground.servers.stack import LocalStack
from tests.faults.follower_campaign import FollowerCampaign
from tests.faults.follower_world import World
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.seeds import first_seed
from tests.fixtures.servers import Database, fresh_database
from tests.fixtures.spark import need_java

_ROUNDS = int(os.environ.get("LOCKSTEP_FOLLOWERS", "1"))
_SEED = first_seed("LOCKSTEP_FOLLOWERS")
# A test run uses these two, and reads less; a campaign uses the seed's choice.
_SAMPLE, _FEW = ("", "50") if "LOCKSTEP_FOLLOWERS" in os.environ else ("503,driver", "10")
_READS = int(os.environ.get("LOCKSTEP_READS", _FEW))
_INJURIES = tuple(filter(None, os.environ.get("LOCKSTEP_INJURIES", _SAMPLE).split(",")))
_RESULT = os.environ.get("LOCKSTEP_RESULT")


@pytest.fixture
def world(
    killable_stack: LocalStack,
    killable_pipeline: NewPipeline,
    killable_database: Database,
    tmp_path: Path,
) -> Iterator[World]:
    need_java()
    with fresh_database(killable_database.dsn) as copied:
        made = World(killable_pipeline, killable_stack, copied, tmp_path, _SEED)
        yield made
        made.close()


@pytest.mark.commit("a sample of the followers' campaign")
@pytest.mark.long("more rounds", again=True)
@pytest.mark.followers
@pytest.mark.slow
@pytest.mark.timeout(1_200 + 1_200 * _ROUNDS + _READS)
def test_every_state_is_the_databases_and_every_injury_is_recovered_from(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """No partial transaction in any store, and no difference in the end."""
    print(f"followers: LOCKSTEP_SEED={_SEED} LOCKSTEP_FOLLOWERS={_ROUNDS}")  # noqa: T201 - on failure

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\nfollowers: {line}", flush=True)  # noqa: T201 - its progress

    campaign = FollowerCampaign(world, show)
    campaign.begin()
    for number in range(_ROUNDS):
        campaign.round(_SEED + number, _INJURIES)
    campaign.read_mirrors(_READS)
    report = {"first_seed": _SEED, **campaign.report()}
    show(orjson.dumps(report).decode())
    if _RESULT:
        Path(_RESULT).write_bytes(orjson.dumps(report))
    assert campaign.wrong == []
    for readings, frontiers in report["states"].values():
        assert readings >= frontiers > 1
