"""Random kills around the archive: a short round in every run, fifty of a minute in a campaign.

LOCKSTEP_ARCHIVES sets how many, LOCKSTEP_SEED the first seed, LOCKSTEP_ARCHIVE_SECONDS how long
load and faults last, LOCKSTEP_RESULT names a file for their figures; `make campaign` runs fifty.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson
import pytest
import redis

from tests.faults.archive_campaign import ArchiveRound, archive_pipeline, forgetful_kafka
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import making
from tests.fixtures.seeds import first_seed
from tests.fixtures.servers import Database
from tests.fixtures.spark import need_java
from tests.integration.test_bootstrap import Past

_COUNT = int(os.environ.get("LOCKSTEP_ARCHIVES", "1"))
_SEED = first_seed("LOCKSTEP_ARCHIVES")
_LONG = "LOCKSTEP_ARCHIVES" in os.environ
_SECONDS = float(os.environ.get("LOCKSTEP_ARCHIVE_SECONDS", "75" if _LONG else "15"))
_RESULT = os.environ.get("LOCKSTEP_RESULT")


@pytest.mark.long("more rounds", again=True)
@pytest.mark.archives
@pytest.mark.slow
@pytest.mark.timeout(900 + _SECONDS)
@pytest.mark.parametrize("number", range(_COUNT))
def test_every_event_is_archived_once_and_every_store_is_the_database(
    number: int,
    database: Database,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_java()
    seed = _SEED + number
    print(f"archives: LOCKSTEP_SEED={seed} LOCKSTEP_ARCHIVES=1")  # noqa: T201 - on failure
    with forgetful_kafka(tmp_path / "broker") as bootstrap, ExitStack() as stack:
        made = contextmanager(making)(database, bootstrap, f"shop{seed}", tmp_path)
        line = archive_pipeline(stack.enter_context(made), tmp_path, redis_url)
        line.start().wait_ready()
        round_ = ArchiveRound(Past(Archived(line), tmp_path, redis_client), seed, _SECONDS)
        stack.callback(round_.close)
        round_.run()
        figures = orjson.dumps(round_.report())
    with capsys.disabled():
        print(f"\narchives: {figures.decode()}", flush=True)  # noqa: T201 - its progress
    if _RESULT:
        with Path(_RESULT).open("ab") as file:
            file.write(figures + b"\n")
