"""What a follower's run says of itself, without its session."""

from __future__ import annotations

import logging
import time

import pytest

from cdc.config import Config, Log, Source
from cdc.errors import Exit, UnavailableError
from cdc.events import LSN
from jobs.running import Run
from sinks.contract import Applied


def made(session: object = None) -> Run:
    config = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))
    return Run(config, "cache", "redis", session, quiet=True)  # type: ignore[arg-type]


def test_where_nobody_writes_it_follows_by_the_canaries() -> None:
    """The last commit grows old on an idle database; what is new is not behind for that."""
    run, now_us = made(), time.time_ns() // 1_000
    old = Applied("shop", 1, 1, LSN(0x100), 7, now_us - 3_600_000_000, 3, {})
    said = []
    for canary in (now_us, None):
        run.has_applied(old, 1, set(), 0.1, canary)
        said.append(run.state)
    assert said == ["following", "catching_up"]


def test_told_to_stop_it_says_nothing_of_what_that_broke_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def session(run: Run) -> None:
        run.stop()
        raise UnavailableError("broken off", hint="")

    with caplog.at_level(logging.INFO, "jobs.follow"):
        assert made(session).run() is Exit.OK
    assert [record.getMessage() for record in caplog.records] == ["cache: stopped"]
