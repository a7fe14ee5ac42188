"""Every stalled follower is reported; one that keeps up, or has just started, is not."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.archive import Archive
from cdc.config.followers import Follower
from cdc.config.views import View
from cdc.errors import Exit
from cdc.log.frontier_tail import Unapplied
from cdc.operate.findings import Cause, Level
from cdc.operate.followers import FollowerStatus, judge
from tests.fixtures.reported import reported
from tests.unit.test_control_doctor import CONFIG

HOUR, DAY = 3_600.0, 86_400.0
FOLLOWERS = {
    "cache": {"redis": {"url": "redis://localhost"}},
    "hourly": {"redis": {"url": "redis://localhost"}, "every_seconds": HOUR},
    "docs": {"redis": {"url": "redis://localhost"}, "mirror": "hourly", "documents": {}},
    "answers": {"redis": {"url": "redis://localhost"}, "mirror": "cache", "views": ["a", "b", "c"]},
}
VIEWS = {
    "a": {"sql": "SELECT", "key": ["id"]},
    "b": {"sql": "SELECT", "key": ["id"], "freshness_seconds": 10},
    "c": {"sql": "SELECT", "key": ["id"], "freshness_seconds": 30},
}
# A job that has run for a day, at a pipeline that is idle or busy.
IDLE = {"began": DAY, "moved": 3, "canary": 3}


def ago(seconds: float) -> int:
    return int((time.time() - seconds) * 1e6)


def described(
    name: str = "cache",
    lag: float | None = None,
    canary_seconds: float = 5.0,
    **given: Any,  # noqa: ANN401 - the report's fields
) -> list[Cause]:
    """Return the causes that a follower is; times are in seconds ago."""
    fields = {"began": "began_at_us", "moved": "moved_at_us", "canary": "canary_at_us"}
    fields |= {"failing": "failing_since_us", "age": "at_us"}
    record = reported(
        **{
            fields.get(each, each): ago(value) if each in fields else value
            for each, value in given.items()
        }
    )
    source = msgspec.structs.replace(CONFIG.source, canary_seconds=canary_seconds)
    followers = msgspec.convert(FOLLOWERS, dict[str, Follower])
    archive = Archive(path="/srv/archive")
    views = msgspec.convert(VIEWS, dict[str, View])
    config = msgspec.structs.replace(
        CONFIG, followers=followers, views=views, source=source, archive=archive
    )
    unapplied = Unapplied(None if lag is None else ago(lag))
    return list(judge(config, [FollowerStatus(name, record, None, unapplied)]))


@pytest.mark.parametrize(
    "given",
    [
        IDLE,
        IDLE | {"lag": 2.0},
        # No writes, and no canaries: nothing is applied because there is nothing.
        IDLE | {"canary_seconds": 0.0, "moved": DAY, "canary": DAY},
        # It has just started, after a night without any job.
        {"began": 2, "moved": 2, "canary": DAY / 2, "state": "starting"},
        # Its batches take long, and it makes one after another.
        IDLE | {"lag": 30.0, "moved": 30.0, "batch_seconds": 10.0},
        # Documents are made from what their mirror has reported.
        IDLE | {"name": "answers", "lag": 9.0, "moved": 9.0},
        # Configured to apply once an hour, and documents that are made from such a mirror.
        IDLE | {"name": "hourly", "lag": 1.5 * HOUR, "moved": HOUR, "canary": HOUR},
        IDLE | {"name": "docs", "lag": 1.5 * HOUR, "moved": HOUR, "canary": HOUR},
        # Views that may be 10 s late.
        IDLE | {"name": "answers", "lag": 9.0},
        # An error that is over.
        IDLE | {"errors": 7},
        # The archive reports no canaries.
        {"name": "archive", "began": DAY, "moved": DAY},
    ],
)
def test_what_keeps_up_or_has_just_started_is_ok(given: dict[str, Any]) -> None:
    assert described(**given) == []


@pytest.mark.parametrize(
    ("given", "says", "code"),
    [
        # A restarted job, whose first large batch waits for executors for hours.
        (
            {"began": 3 * HOUR, "moved": 3 * HOUR, "canary": DAY, "lag": DAY},
            "cache has applied nothing for 3 h, and the log has held for",
            Exit.FAILED,
        ),
        ({"began": 70, "moved": 70, "lag": DAY}, "cache has applied nothing for 70 s", Exit.OK),
        ({"began": 2, "moved": 2, "lag": DAY / 2}, "cache lags: the log has held", Exit.OK),
        (
            {"began": 2, "moved": 2, "state": "starting", "lag": 2.0},
            "cache is starting, and the log has more for it",
            Exit.OK,
        ),
        (
            IDLE | {"lag": 17.0, "moved": 17.0, "batches": 3},
            "cache has applied nothing for 17 s, and the log has more for it",
            Exit.OK,
        ),
        # However long it says that its batches take.
        (
            IDLE | {"lag": 61.0, "moved": 61.0, "batch_seconds": DAY},
            "cache has applied nothing for 61 s",
            Exit.OK,
        ),
        # A store that was up when the session started, and refuses every batch.
        (
            IDLE | {"lag": HOUR, "moved": HOUR, "state": "following"},
            "cache has applied nothing for 60 min",
            Exit.FAILED,
        ),
        # Documents whose mirror is stalled, or missing.
        (
            IDLE | {"name": "docs", "lag": DAY, "moved": DAY},
            "docs has applied nothing for 24 h",
            Exit.FAILED,
        ),
        # A store that does not answer: a restart of it is no failure.
        (
            IDLE | {"what": "away", "failing": 20, "state": "waiting", "moved": DAY},
            "cache is waiting: away",
            Exit.OK,
        ),
        (
            IDLE | {"what": "away", "failing": HOUR, "state": "waiting"},
            "cache is waiting: away",
            Exit.FAILED,
        ),
        (
            IDLE | {"what": "away", "failing": 1, "state": "waiting", "lag": HOUR, "moved": HOUR},
            "cache is waiting and lags by 60 min: away",
            Exit.FAILED,
        ),
        ({"began": 300, "moved": 3}, "cache: it has applied no canary for 300 s", Exit.OK),
        (IDLE | {"canary": 300}, "cache: it has applied no canary for 300 s", Exit.OK),
        (
            {"canary": 300},
            "cache: it has applied no canary",
            Exit.OK,
        ),  # a job that reports nothing else
        (IDLE | {"age": 30}, "cache is not running", Exit.FAILED),
        ({"state": "stopped"}, "cache is not running", Exit.FAILED),
        ({"name": "archive", "age": 30}, "archive is not running", Exit.FAILED),
        (
            {"name": "archive", "began": DAY, "moved": DAY, "lag": HOUR},
            "archive has applied nothing for 60 min",
            Exit.FAILED,
        ),
        (
            IDLE | {"name": "answers", "lag": 20.0},
            "answers is 20 s late, later than freshness_seconds of b (10 s)",
            Exit.OK,
        ),
        (IDLE | {"name": "answers", "lag": 100.0}, "answers lags: the log has held", Exit.OK),
        ({"state": "halted", "what": "a gap"}, "cache has halted: a gap", Exit.CONFIG),
    ],
)
def test_a_stalled_follower_is_reported(given: dict[str, Any], says: str, code: Exit) -> None:
    (cause,) = described(**given)
    assert cause.what.startswith(says), cause
    assert cause.level is (Level.FAILED if code else Level.DEGRADED)
    assert cause.exit_code == (code or Exit.FAILED)
    assert cause.subject == given.get("name", "cache")
    assert cause.about == ("archive" if cause.subject == "archive" else "follower")
    assert cause.remedy or given.get("what")


@given(
    st.sampled_from(["starting", "following", "catching_up", "waiting", "rebuilding"]),
    st.floats(400, DAY),
    st.floats(0, DAY),
    st.one_of(st.none(), st.floats(0, DAY)),
    st.sampled_from(["", "away"]),
)
def test_whatever_its_state_who_applies_nothing_of_what_there_is_fails(
    state: str, stalled_for: float, more: float, canary: float | None, what: str
) -> None:
    times: dict[str, Any] = {} if canary is None else {"canary": canary}
    (cause,) = described(
        lag=stalled_for + more, began=DAY, moved=stalled_for, state=state, what=what, **times
    )
    assert (cause.level, cause.exit_code) == (Level.FAILED, Exit.FAILED)
