"""Snapshots under constant writes, with random faults: one of each kind in every run, or many.

LOCKSTEP_SNAPSHOTS sets how many, LOCKSTEP_SEED the first seed, LOCKSTEP_RUNNER the runner (`local`,
or `spark`), LOCKSTEP_RESULT names a file for their figures; `make campaign` runs fifty.
"""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from cdc.playground.servers.stack import LocalStack
from tests.faults.live_campaign import LiveRound
from tests.faults.snapshot_campaign import Round
from tests.fixtures.seeds import first_seed
from tests.fixtures.servers import Database

_COUNT = int(os.environ.get("LOCKSTEP_SNAPSHOTS", "1"))
_SEED = first_seed("LOCKSTEP_SNAPSHOTS")
_RUNNER = os.environ.get("LOCKSTEP_RUNNER", "local")
_RESULT = os.environ.get("LOCKSTEP_RESULT")


@pytest.mark.commit("a sample of the snapshots' campaign")
@pytest.mark.long("more rounds, and incremental snapshots", sample=["0-Round"], again=True)
@pytest.mark.snapshots
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [Round, LiveRound])
@pytest.mark.parametrize("number", range(_COUNT))
def test_what_is_read_and_what_is_streamed_are_the_source_whatever_is_killed(
    kind: type[Round],
    number: int,
    killable_stack: LocalStack,
    killable_database: Database,
    killable_topic_prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = _SEED + number
    print(f"snapshot: LOCKSTEP_SEED={seed} LOCKSTEP_RUNNER={_RUNNER}")  # noqa: T201 - on failure
    bootstrap = killable_stack.endpoints().kafka_bootstrap
    assert bootstrap is not None
    snapshot = kind(
        killable_stack,
        killable_database,
        bootstrap,
        killable_topic_prefix,
        tmp_path,
        seed=seed,
        runner=_RUNNER,
    )
    try:
        snapshot.run()
        line = orjson.dumps({"kind": kind.__name__, **snapshot.report()})
    finally:
        snapshot.close()
    with capsys.disabled():
        print(f"\nsnapshot: {line.decode()}", flush=True)  # noqa: T201 - its progress
    if _RESULT:
        with Path(_RESULT).open("ab") as file:
            file.write(line + b"\n")
