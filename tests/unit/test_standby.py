"""When a standby follower takes over and gives way, from the reports that it reads."""

from __future__ import annotations

import pytest

from cdc.config import Config, Log, Source
from cdc.errors import UnavailableError
from cdc.log.follower_reports import FollowerRecord
from lockstep.jobs.apply import standby as module
from lockstep.jobs.apply.standby import MARK, Standby
from tests.fixtures.reported import reported

ME = f"here:1:a{MARK}"


class Clock:
    """Stands in for the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Reported:
    """The newest reports; None if they can't be read."""

    newest: dict[str, FollowerRecord] | None

    def __init__(self) -> None:
        self.newest = {}

    def refresh(self, _: float) -> dict[str, FollowerRecord]:
        if self.newest is None:
            raise UnavailableError("no broker", hint="")
        return self.newest

    def report(self, owner: str, at_us: int = 1, state: str = "following") -> None:
        self.newest = {"cache": reported(owner=owner, at_us=at_us, state=state)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "JITTER_SECONDS", 0.0)
    return clock


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Reported:
    log = Reported()
    monkeypatch.setattr(module, "Readings", lambda _: log)
    return log


@pytest.fixture
def mine(clock: Clock, log: Reported) -> Standby:
    config = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))
    return Standby(config, "cache", ME, 8.0)


def test_it_waits_while_reports_arrive_and_takes_over_after_silence(
    clock: Clock, log: Reported, mine: Standby
) -> None:
    for second in range(0, 40, 5):
        log.report("there:2:b", at_us=second)
        clock.now = 100.0 + second
        assert not mine.is_free()
    clock.now += 7.9
    assert not mine.is_free()
    clock.now += 0.2
    assert mine.is_free()


def test_an_old_report_counts_from_when_it_was_read(
    clock: Clock, log: Reported, mine: Standby
) -> None:
    """Two machines' clocks are never compared."""
    log.report("there:2:b", at_us=-(10**15))
    assert not mine.is_free()
    clock.now += 8
    assert mine.is_free()


def test_time_without_an_answer_from_the_log_is_no_silence(
    clock: Clock, log: Reported, mine: Standby
) -> None:
    log.report("there:2:b")
    assert not mine.is_free()
    kept, log.newest = log.newest, None
    clock.now += 60
    assert not mine.is_free()
    log.newest = kept
    assert not mine.is_free()
    clock.now += 8
    assert mine.is_free()


def test_a_stopped_follower_is_free_at_once_and_a_halted_one_never(
    clock: Clock, log: Reported, mine: Standby
) -> None:
    log.report("there:2:b", state="halted")
    clock.now += 1_000
    assert not mine.is_free()
    log.report("there:3:c:rebuild", state="stopped")
    assert not mine.is_free(), "a rebuild says nothing about the copy that follows"
    log.report("there:2:b", state="stopped")
    assert mine.is_free()


def test_a_follower_without_any_report_is_free(mine: Standby) -> None:
    assert mine.is_free()


@pytest.mark.parametrize(
    ("owner", "state", "gives_way"),
    [
        (ME, "following", False),
        ("there:2:b", "following", True),
        ("there:2:b", "stopped", False),
        ("there:2:b", "halted", False),
        ("there:3:c:rebuild", "rebuilding", False),
        (f"earlier{MARK}", "following", True),
        (f"later{MARK}", "following", False),
    ],
)
def test_it_gives_way_to_a_copy_that_will_not_give_way_to_it(
    log: Reported, mine: Standby, owner: str, state: str, *, gives_way: bool
) -> None:
    log.report(owner, state=state)
    assert mine.gives_way() == gives_way


def test_a_session_after_an_error_does_not_wait_again(
    clock: Clock, log: Reported, mine: Standby
) -> None:
    log.report(ME, state="waiting")
    assert mine.is_free()
