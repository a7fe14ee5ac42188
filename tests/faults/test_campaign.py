"""Random kills: a few in every test run, fifty with `make campaign`.

LOCKSTEP_KILLS says how many, LOCKSTEP_SEED repeats a campaign.
"""

from __future__ import annotations

import os
import secrets

import pytest

from cdc.local.stack import LocalStack
from tests.faults.campaign import Campaign
from tests.fixtures.daemon import NewPipeline

_KILLS = int(os.environ.get("LOCKSTEP_KILLS", "3"))
_SEED = int(os.environ.get("LOCKSTEP_SEED") or secrets.randbelow(1_000_000))


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(180 + 40 * _KILLS)
def test_random_kills_lose_nothing(
    killable_stack: LocalStack,
    killable_pipeline: NewPipeline,
    capsys: pytest.CaptureFixture[str],
) -> None:
    print(f"campaign: LOCKSTEP_SEED={_SEED} LOCKSTEP_KILLS={_KILLS}")  # noqa: T201 - shown on failure
    campaign = Campaign(killable_pipeline, killable_stack, seed=_SEED, kills=_KILLS)
    campaign.run()
    line, proof, difference = campaign.report()
    with capsys.disabled():
        print(f"\ncampaign: {line}")  # noqa: T201 - the campaign's one line
    assert campaign.killed.total() == _KILLS
    assert proof.equal
    assert (difference.lost, difference.duplicate, difference.reordered) == (0, 0, 0)
