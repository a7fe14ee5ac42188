"""`cdc tail` while nothing arrives: it shows on stderr that it waits, and where the log ends."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.cli import tail
from cdc.events import LSN


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock, `now`, and a log that ends at seq 41."""
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr("cdc.cli.tail.time.monotonic", lambda: clock.now)
    at_us = time.time_ns() // 1_000
    position = SimpleNamespace(end_lsn=LSN(0x16E9088), seq=41, at_us=at_us)
    monkeypatch.setattr("cdc.log.reader.read_resume", lambda _: (None, position))
    return clock


def lines_of(clock: SimpleNamespace, seconds: int, *arrivals: int) -> None:
    """Note every tenth of a second whether something arrived; `arrivals` are seconds."""
    config: Any = None
    idle = tail.IdleLine(config)
    for tenth in range(10 * seconds):
        clock.now += 0.1
        idle.note(arrived=tenth in {10 * each for each in arrivals})


def test_where_stderr_is_no_terminal_it_is_shown_once(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    lines_of(clock, 600)
    out, err = capsys.readouterr()
    assert out == "", "it would be among the events"
    (line,) = err.splitlines()
    assert "waiting, at LSN 0/16E9088, seq 41" in line


def test_on_a_terminal_ever_more_rarely(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    lines_of(clock, 100)
    assert len(capsys.readouterr().err.splitlines()) == 6  # after 3, 6, 12, 24, 48 and 96 seconds


def test_it_is_shown_again_after_something_has_arrived(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    lines_of(clock, 60, 1, 2, 30)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_while_events_arrive_nothing_is_shown(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    lines_of(clock, 30, *range(30))
    assert capsys.readouterr().err == ""
