"""Whoever waits is told who is behind and by how much, who does not run, who has halted and why."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.client import behind
from cdc.errors import Exit
from cdc.events import LSN
from cdc.log.followers import SILENT_SECONDS, FollowerRecord, FollowerState
from tests.fixtures.reported import reported

STATES: list[FollowerState] = [
    *("starting", "following", "catching_up", "waiting", "rebuilding", "halted", "stopped")
]


def record(
    lsn: int, state: FollowerState = "following", age: float = 0, what: str = ""
) -> FollowerRecord:
    at_us = int((time.time() - age) * 1e6)
    return reported(lsn=LSN(lsn), state=state, what=what, hint="mend it", at_us=at_us)


@given(st.integers(0, 10), st.integers(0, 10), st.sampled_from(STATES), st.floats(0, 60))
def test_the_applied_frontier_decides_unless_the_store_has_lost_it(
    lsn: int, at: int, state: FollowerState, age: float
) -> None:
    late = bool(behind(LSN(lsn), ["cache"], {"cache": record(at, state, age)}))
    assert late is (at < lsn or state == "rebuilding")


@pytest.mark.parametrize(
    ("state", "age", "says", "code"),
    [
        ("following", 0, "is following, 2.0 KiB behind at 0/A: away", 75),
        ("halted", 0, "has halted 2.0 KiB behind at 0/A: away", 78),
        ("stopped", 0, "is not running, 2.0 KiB behind at 0/A", 69),
        ("following", SILENT_SECONDS + 9, "is not running, 2.0 KiB behind at 0/A", 69),
        (None, 0, "has never run", 69),
    ],
)
def test_it_says_why(state: FollowerState | None, age: float, says: str, code: int) -> None:
    newest = {"cache": record(10, state, age, what="away")} if state else {}
    (late,) = behind(LSN(2058), ["cache"], newest)
    assert says in late.why
    assert late.exit_code is Exit(code)
    assert late.hopeless is (state == "halted")
    assert late.hint


def test_what_has_applied_nothing_is_not_told_in_bytes() -> None:
    (late,) = behind(LSN(2058), ["cache"], {"cache": record(0, "catching_up", 0)})
    assert late.why == "is catching up, with nothing applied yet"
