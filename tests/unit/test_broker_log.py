"""An unavailable broker is one line in the log, and another when something changes."""

from __future__ import annotations

import logging

import pytest

from cdc.log import broker_log
from cdc.log.broker_log import BrokerLog


class Clock:
    now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(broker_log, "time", clock)
    return clock


def output(log: BrokerLog, client: int, reason: str, port: int = 9092, ms: int = 0) -> str | None:
    """Return the line that passes when one of our clients logs a failure."""
    broker = f"127.0.0.1:{port}/bootstrap"
    text = f"[thrd:{broker}]: {broker}: Connect to ipv4#127.0.0.1:{port} failed: {reason}"
    text += f" (after {ms}ms in state CONNECT, {ms} identical error(s) suppressed)"
    record = logging.LogRecord(
        "k", logging.ERROR, "", 0, "%s [%s] %s", ("FAIL", f"lockstep-shop#{client}", text), None
    )
    return record.getMessage() if log.filter(record) else None


def test_hundreds_of_attempts_of_many_clients_are_one_line(clock: Clock) -> None:
    log = BrokerLog()
    first = output(log, 1, "Connection refused")
    assert first == "Kafka broker 127.0.0.1:9092: Connection refused"
    for number in range(500):
        clock.now += 0.1
        assert output(log, number % 5, "Connection refused", ms=number) is None
    assert log.failures() == "127.0.0.1:9092: Connection refused"


def test_another_reason_and_another_broker_are_logged(clock: Clock) -> None:
    log = BrokerLog()
    assert output(log, 1, "Connection refused")
    assert output(log, 1, "Connection timed out")
    assert output(log, 1, "Connection refused", port=9093)
    assert output(log, 1, "Connection timed out") is None


def test_an_outage_after_a_quiet_time_is_logged_again(clock: Clock) -> None:
    log = BrokerLog()
    assert output(log, 1, "Connection refused")
    clock.now += 20
    assert log.failures() == ""
    assert output(log, 1, "Connection refused")


def test_a_long_outage_is_called_to_mind_with_a_count(clock: Clock) -> None:
    log = BrokerLog()
    assert output(log, 1, "Connection refused")
    reported = []
    for _ in range(310):
        clock.now += 1
        reported.append(output(log, 1, "Connection refused"))
    again = [each for each in reported if each]
    assert len(again) == 1
    assert "299 more lines like this were left out" in again[0]


def test_other_lines_pass_without_their_noise(clock: Clock) -> None:
    record = logging.LogRecord(
        "k", logging.WARNING, "", 0, "%s [%s] %s", ("CONFWARN", "x#1", "[thrd:app]: odd"), None
    )
    assert BrokerLog().filter(record)
    assert record.getMessage() == "odd"
