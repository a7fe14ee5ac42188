"""The model on real servers: two short runs in every test run, many with `make campaign`.

LOCKSTEP_SEED repeats a run, including whether it streams transactions; LOCKSTEP_STEPS sets its
length. A failing run is made smaller with fewer steps, since the first steps of a seed do not
depend on how many follow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cdc.playground.servers.stack import LocalStack
from tests.fixtures.daemon import PipelineUnderTest
from tests.fixtures.seeds import first_seed
from tests.fixtures.servers import (
    POSTGRES_SETTINGS,
    KafkaServer,
    fresh_database,
    fresh_topic_prefix,
)
from tests.fixtures.standby import majors
from tests.stateful.run import Run
from tests.stateful.source import SCHEMAS, SETUP

_SETTINGS = {"max_prepared_transactions": "50", "logical_decoding_work_mem": "64kB"}
_STEPS = int(os.environ.get("LOCKSTEP_STEPS", "300"))
_RUNS = int(os.environ.get("LOCKSTEP_RUNS", "2"))
_FIRST = first_seed("LOCKSTEP_RUNS")


@pytest.mark.long("more runs", again=True)
@pytest.mark.slow
@pytest.mark.majors
@pytest.mark.stateful
@pytest.mark.parametrize("number", range(_RUNS))
@pytest.mark.parametrize("major", majors(15, 16, 17, 18))
def test_the_log_is_what_was_committed_whatever_was_done(
    number: int, major: int, modelled: PipelineUnderTest
) -> None:
    seed = _FIRST + number
    print(f"model: LOCKSTEP_SEED={seed} LOCKSTEP_STEPS={_STEPS} LOCKSTEP_RUNS=1")  # noqa: T201
    with closing(Run(modelled, seed)) as run:
        run.begin()
        run.write(_STEPS)
        print(dict(run.done))  # noqa: T201 - shown on failure
        assert run.check() > 0


@pytest.fixture(scope="module")
def model_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], str]]:
    """Start a separate server of a major: it allows two-phase commits, and streams early."""
    stacks: dict[int, LocalStack] = {}

    def server(major: int) -> str:
        if major not in stacks:
            stacks[major] = LocalStack(tmp_path_factory.mktemp(f"model-{major}"), tied=True)
        settings = {"postgres": {**POSTGRES_SETTINGS, **_SETTINGS}}
        dsn = stacks[major].up(["postgres"], pg_major=major, settings=settings).postgres_dsn
        assert dsn is not None
        return dsn

    yield server
    for stack in stacks.values():
        stack.down()


@pytest.fixture
def modelled(
    major: int,
    number: int,
    model_servers: Callable[[int], str],
    kafka_server: KafkaServer,
    tmp_path: Path,
) -> Iterator[PipelineUnderTest]:
    """Create a pipeline for the model's schemas, not yet set up."""
    with (
        fresh_database(model_servers(major)) as database,
        fresh_topic_prefix(kafka_server.bootstrap) as prefix,
    ):
        database.execute(*SETUP)
        pipeline = PipelineUnderTest(
            database,
            kafka_server.bootstrap,
            prefix,
            tmp_path,
            source={
                "tables": [f"{schema}.*" for schema in SCHEMAS],
                "new_tables": "publish",
                "streaming": "off" if (_FIRST + number) % 2 else "on",
            },
            batch={"max_events": 40, "max_wait_ms": 50},
        )
        try:
            yield pipeline
        finally:
            pipeline.close()
