"""The worker runs calls one after another and wakes the loop."""

from __future__ import annotations

import os
import select
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.errors import StoppedError, UnavailableError
from cdc.runtime.background import BackgroundThread
from cdc.snapshot.initial import session
from tests.fixtures.daemon import wait_until

_CONFIG: Any = None  # the state that it would be read for is given


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


def open_eventfds() -> set[str]:
    """Return the eventfds of this process."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            if "eventfd" in str(fd.readlink()):
                found.add(fd.name)
    return found


def test_a_closed_worker_ends_after_the_calls_before_and_closes_its_own_fd() -> None:
    worker = BackgroundThread()
    other = BackgroundThread(worker.wake_fd)
    gate = threading.Event()
    worker.submit(lambda: gate.wait(60))
    last = worker.submit(lambda: "done")
    other.close()
    worker.close()
    assert not last.done()
    os.fstat(worker.wake_fd)  # a call that still runs wakes it when it ends
    gate.set()
    assert last.result(60) == "done"
    wait_until(lambda: str(worker.wake_fd) not in open_eventfds(), "its fd is open", 20, pause=0.01)


def test_a_call_that_has_ended_is_not_kept() -> None:
    class Held:
        def call(self) -> None:
            """Do nothing."""

    worker, held = BackgroundThread(), Held()
    is_held = weakref.ref(held)
    worker.submit(held.call).result(60)
    del held
    wait_until(lambda: is_held() is None, "it is kept", 20, pause=0.01)
    worker.close()


@pytest.mark.parametrize("ends", ["done", "unavailable", "stopped"])
def test_sessions_leave_no_thread_and_no_descriptor(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby starts a session every second, for as long as the primary's daemon runs."""
    gate = threading.Event()

    def state(_: object) -> SimpleNamespace:
        if ends == "unavailable":
            raise UnavailableError("no broker", hint="")
        if ends == "stopped":
            gate.wait(60)  # the call is left running, and ends later
        return SimpleNamespace(stage="done")

    monkeypatch.setattr("cdc.snapshot.initial.due.state", state)
    host: Any = SimpleNamespace(beat=lambda: None, stopping=ends == "stopped")
    threads, fds = set(threading.enumerate()), open_eventfds()
    for _ in range(10):
        try:
            assert session.take(_CONFIG, host) == "done"
        except (UnavailableError, StoppedError):
            assert ends != "done"
    gate.set()
    wait_until(lambda: set(threading.enumerate()) <= threads, "threads are left", 20, pause=0.01)
    assert open_eventfds() <= fds
