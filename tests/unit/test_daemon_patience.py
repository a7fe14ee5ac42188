"""A server that refuses us after we have streamed is retried, rarely and not for ever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cdc.config import Config, Log, Source
from cdc.daemon import process as module
from cdc.daemon.process import Daemon
from cdc.errors import CDCError, Exit, GapError, PermissionDeniedError, UnavailableError
from cdc.operate.health import HealthState
from cdc.sequence.replay import HistoryError

CONFIG = Config(
    pipeline="shop",
    source=Source(dsn="postgresql://localhost/shop"),
    log=Log(bootstrap_servers="localhost:9092"),
)
REFUSED = PermissionDeniedError("password authentication failed", hint="rotate it here too")


class Clock:
    """A clock that advances only in sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Scripted(Daemon):
    """A daemon whose sessions end as given; None is one that streamed."""

    def __init__(self, clock: Clock, *ends: CDCError | None) -> None:
        super().__init__(CONFIG)
        self.clock = clock
        self.ends = list(ends)
        self.slept: list[float] = []

    def _session(self) -> None:
        if not self.ends:
            self.stopping = True
            return
        if (end := self.ends.pop(0)) is None:
            self.to(HealthState.STREAMING, "streaming")
        else:
            raise end

    def pause(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_refused_at_its_start_it_stops(clock: Clock) -> None:
    daemon = Scripted(clock, REFUSED)
    assert daemon.run() is Exit.PERMISSION
    assert daemon.slept == []


def test_refused_after_having_streamed_it_tries_again_seldom(clock: Clock) -> None:
    daemon = Scripted(clock, None, REFUSED, REFUSED, None)
    assert daemon.run() is Exit.OK
    assert len(daemon.slept) == 2
    assert min(daemon.slept) >= 0.75 * module.SLOW_SECONDS


def test_refused_for_ever_it_stops_in_the_end(clock: Clock) -> None:
    daemon = Scripted(clock, None, *[REFUSED] * 500)
    assert daemon.run() is Exit.PERMISSION
    assert module.PATIENCE_SECONDS <= clock.seconds <= module.PATIENCE_SECONDS + 60
    assert daemon.health.state is HealthState.HALTED


def test_accepted_again_it_is_as_patient_as_before(clock: Clock) -> None:
    times = int(0.7 * module.PATIENCE_SECONDS / module.SLOW_SECONDS)
    daemon = Scripted(clock, None, *[REFUSED] * times, None, *[REFUSED] * times, None)
    assert daemon.run() is Exit.OK


def test_a_gap_is_never_tried_again(clock: Clock) -> None:
    daemon = Scripted(clock, None, GapError("gone", hint="start over"))
    assert daemon.run() is Exit.CONFIG
    assert daemon.slept == []


APART = HistoryError("another history", hint="start over")


def test_another_history_is_believed_when_two_sessions_in_a_row_find_it(clock: Clock) -> None:
    assert Scripted(clock, APART, None).run() is Exit.OK
    again = UnavailableError("away", hint="wait")
    assert Scripted(clock, None, APART, again, APART).run() is Exit.CONFIG


@pytest.mark.parametrize("proven", [True, False])
def test_a_session_that_proved_the_history_ends_the_doubt(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, *, proven: bool
) -> None:
    ends = [APART, UnavailableError("away", hint="wait"), APART]

    def session(_config: Config, daemon: Daemon) -> SimpleNamespace:
        def run() -> None:
            if not ends:
                daemon.stopping = True
                return
            raise ends.pop(0)

        its = proven and len(ends) == 2
        return SimpleNamespace(start=lambda: None, run=run, close=lambda: None, proven=its)

    monkeypatch.setattr(module, "Pipeline", session)
    monkeypatch.setattr("cdc.snapshot.initial.session.take", lambda *_: None)
    daemon = Daemon(CONFIG)
    monkeypatch.setattr(daemon, "pause", lambda _: None)
    assert daemon.run() is (Exit.OK if proven else Exit.CONFIG)
