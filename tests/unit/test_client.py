"""A wait's error names followers that lag, and by how much, do not run, or have halted and why."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc import client as module
from cdc.client import Client, lagging, waited_for
from cdc.config import Config, Log, Source
from cdc.config.followers import Follower
from cdc.config.views import View
from cdc.errors import ConfigError, Exit, UnavailableError
from cdc.events import LSN
from cdc.log.follower_reports import SILENT_SECONDS, FollowerRecord, FollowerState
from tests.fixtures.reported import reported

STATES: list[FollowerState] = [
    *("starting", "following", "catching_up", "waiting", "rebuilding", "halted", "stopped")
]


def record(
    lsn: int, state: FollowerState = "following", age: float = 0, what: str = ""
) -> FollowerRecord:
    at_us = int((time.time() - age) * 1e6)
    return reported(lsn=LSN(lsn), state=state, what=what, hint="fix it", at_us=at_us)


@given(st.integers(0, 10), st.integers(0, 10), st.sampled_from(STATES), st.floats(0, 60))
def test_the_applied_frontier_decides_unless_the_store_has_lost_it(
    lsn: int, at: int, state: FollowerState, age: float
) -> None:
    late = bool(lagging(LSN(lsn), ["cache"], {"cache": record(at, state, age)}))
    assert late is (at < lsn or state == "rebuilding")


VIEWED = Config(
    pipeline="p",
    source=Source(dsn="postgresql:///x"),
    log=Log(bootstrap_servers="h:1"),
    views={name: View(sql="SELECT 1", key=("a",)) for name in ("totals", "timeline", "unheld")},
    followers={
        "lake": Follower(),
        "answers": Follower(views=("totals", "timeline")),
        "cache": Follower(views=("timeline",)),
    },
)


def test_a_view_names_every_follower_that_holds_it() -> None:
    assert waited_for(VIEWED, None) == ["lake", "answers", "cache"]
    assert waited_for(VIEWED, ["view:totals"]) == ["answers"]
    assert waited_for(VIEWED, ["cache", "view:timeline", "lake"]) == ["cache", "answers", "lake"]


@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("view:x", "there is no view x", "totals, timeline, unheld"),
        ("view:", "there is no view", "totals, timeline, unheld"),
        ("view:unheld", "no follower holds the view unheld", "a follower's `views`"),
        ("totals", "there is no follower totals", "lake, answers, cache"),
    ],
)
def test_waiting_for_an_unknown_view_is_refused(name: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        waited_for(VIEWED, [name])
    assert says in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("state", "age", "says", "code"),
    [
        ("following", 0, "is following, at 0/A, with a lag of 2.0 KiB: away", 75),
        ("halted", 0, "has halted at 0/A, with a lag of 2.0 KiB: away", 78),
        ("stopped", 0, "is not running, at 0/A, with a lag of 2.0 KiB", 69),
        ("following", SILENT_SECONDS + 9, "is not running, at 0/A, with a lag of 2.0 KiB", 69),
        (None, 0, "has never run", 69),
    ],
)
def test_it_gives_the_reason(state: FollowerState | None, age: float, says: str, code: int) -> None:
    newest = {"cache": record(10, state, age, what="away")} if state else {}
    (late,) = lagging(LSN(2058), ["cache"], newest)
    assert says in late.why
    assert late.exit_code is Exit(code)
    assert late.hopeless is (state == "halted")
    assert late.hint


def test_what_has_applied_nothing_has_no_lag_in_bytes() -> None:
    (late,) = lagging(LSN(2058), ["cache"], {"cache": record(0, "catching_up", 0)})
    assert late.why == "is catching up, with nothing applied yet"


class Away:
    """Returns reports once; then no broker answers, and each call waits for its full timeout."""

    newest_made: ClassVar[Away]

    def __init__(self, _: Config) -> None:
        self.newest = {"cache": record(5)}
        self.asked: list[float] = []
        Away.newest_made = self

    def refresh(self, seconds: float) -> dict[str, FollowerRecord]:
        self.asked.append(seconds)
        if len(self.asked) == 1:
            return self.newest
        time.sleep(seconds)
        raise UnavailableError("nobody answers", hint="")

    def close(self) -> None:
        """Do nothing: nothing is open."""


def test_threads_wait_for_a_missing_broker_in_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one after another, where each would also wait for all before it."""
    monkeypatch.setattr(module, "Readings", Away)
    monkeypatch.setattr(module, "ASK_SECONDS", 0.5)
    cache = msgspec.convert({"redis": {"url": "redis://localhost"}}, Follower)
    source, log = Source(dsn=""), Log(bootstrap_servers="")
    client = Client(Config(pipeline="shop", source=source, log=log, followers={"cache": cache}))
    client.applied()
    asked = Away.newest_made.asked
    together, failed = threading.Barrier(8), []

    def waits() -> None:
        together.wait()
        try:
            client.wait(LSN(6), timeout=0.01)
        except UnavailableError as error:
            failed.append(error)

    threads = [threading.Thread(target=waits) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 8
    # One after another that would be 4 s; the first call may take longer, because it connects.
    assert asked[0] >= 5
    assert sum(asked[1:]) < 2
