"""The worker runs calls one after another and wakes the loop."""

from __future__ import annotations

import select
import threading

import pytest

from cdc.runtime.background import Worker


def readable(worker: Worker, seconds: float) -> bool:
    poll = select.poll()
    poll.register(worker.wake_fd, select.POLLIN)
    return bool(poll.poll(seconds * 1_000))


def test_a_call_ends_in_its_future_and_wakes_the_loop() -> None:
    worker = Worker()
    assert not readable(worker, 0)
    future = worker.submit(lambda: 41 + 1)
    assert readable(worker, 10)
    assert future.done()
    assert future.result(0) == 42
    worker.drain()
    assert not readable(worker, 0)
    worker.drain()  # nothing to drain is no error


def test_what_a_call_raises_is_raised_where_the_loop_looks() -> None:
    def fail() -> None:
        raise KeyError("gone")

    worker = Worker()
    future = worker.submit(fail)
    assert readable(worker, 10)
    with pytest.raises(KeyError, match="gone"):
        future.result(0)
    assert worker.submit(lambda: "next").result(10) == "next"


def test_calls_run_in_order_and_never_at_once() -> None:
    worker = Worker()
    gate = threading.Event()
    seen: list[str] = []

    def wait() -> None:
        gate.wait(10)
        seen.append("first")

    first = worker.submit(wait)
    second = worker.submit(lambda: seen.append("second"))
    assert not second.done()
    gate.set()
    second.result(10)
    assert first.done()
    assert seen == ["first", "second"]


def test_a_signal_handler_may_wake_the_loop() -> None:
    worker = Worker()
    worker.wake()
    worker.wake()
    assert readable(worker, 0)
    worker.drain()
    assert not readable(worker, 0)
