"""The worker runs calls one after another and wakes the loop."""

from __future__ import annotations

import select
import threading

import pytest

from cdc.runtime.background import BackgroundThread


def readable(worker: BackgroundThread, seconds: float) -> bool:
    poll = select.poll()
    poll.register(worker.wake_fd, select.POLLIN)
    return bool(poll.poll(seconds * 1_000))


def test_a_call_ends_in_its_future_and_wakes_the_loop() -> None:
    worker = BackgroundThread()
    assert not readable(worker, 0)
    future = worker.submit(lambda: 41 + 1)
    assert readable(worker, 10)
    assert future.done()
    assert future.result(0) == 42
    worker.drain()
    assert not readable(worker, 0)
    worker.drain()  # nothing to drain is no error


def test_what_a_call_raises_is_raised_by_its_future() -> None:
    def fail() -> None:
        raise KeyError("gone")

    worker = BackgroundThread()
    future = worker.submit(fail)
    assert readable(worker, 10)
    with pytest.raises(KeyError, match="gone"):
        future.result(0)
    assert worker.submit(lambda: "next").result(60) == "next"


def test_calls_run_in_order_and_never_at_once() -> None:
    worker = BackgroundThread()
    gate = threading.Event()
    seen: list[str] = []

    def wait() -> None:
        gate.wait(60)
        seen.append("first")

    first = worker.submit(wait)
    second = worker.submit(lambda: seen.append("second"))
    assert not second.done()
    gate.set()
    second.result(60)
    assert first.done()
    assert seen == ["first", "second"]


def test_a_signal_handler_may_wake_the_loop() -> None:
    worker = BackgroundThread()
    worker.wake()
    worker.wake()
    assert readable(worker, 0)
    worker.drain()
    assert not readable(worker, 0)
