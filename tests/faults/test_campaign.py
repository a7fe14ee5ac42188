"""Random faults: a few in every test run, a thousand and more with `make campaign`.

LOCKSTEP_KILLS sets how many, LOCKSTEP_SEED repeats a campaign, LOCKSTEP_RESULT names a file for its
figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from cdc.playground.servers.stack import LocalStack
from tests.faults.campaign import Campaign
from tests.fixtures.daemon import NewPipeline
from tests.fixtures.proxy import Proxy
from tests.fixtures.seeds import first_seed

_FAULTS = int(os.environ.get("LOCKSTEP_KILLS", "8"))
_SEED = first_seed("LOCKSTEP_KILLS")
_RESULT = os.environ.get("LOCKSTEP_RESULT")


@pytest.mark.commit("a sample of the campaign of faults")
@pytest.mark.long("more faults", again=True)
@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(900 + 10 * _FAULTS)
def test_random_faults_lose_nothing(
    killable_stack: LocalStack,
    killable_pipeline: NewPipeline,
    new_proxy: Callable[[str, int], Proxy],
    capsys: pytest.CaptureFixture[str],
) -> None:
    print(f"campaign: LOCKSTEP_SEED={_SEED} LOCKSTEP_KILLS={_FAULTS}")  # noqa: T201 - on failure

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\ncampaign: {line}", flush=True)  # noqa: T201 - its progress

    campaign = Campaign(
        killable_pipeline, killable_stack, new_proxy, seed=_SEED, faults=_FAULTS, show=show
    )
    campaign.run()
    report = campaign.report()
    show(orjson.dumps(report).decode())
    if _RESULT:
        Path(_RESULT).write_bytes(orjson.dumps(report))
    assert report["faults"] >= _FAULTS
    assert (report["lost"], report["duplicate"], report["reordered"]) == (0, 0, 0)
