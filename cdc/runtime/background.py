"""Run blocking calls in the background, one after another, and wake the loop when one is done.

The loop must answer Postgres in time whatever Kafka does, so calls that may block on Kafka, or on a
second connection, run here. A daemon thread: a call that never returns does not delay the exit.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class BackgroundThread:
    """One thread, a queue of calls, and `wake_fd`, readable after a call has ended."""

    def __init__(self, wake_fd: int | None = None) -> None:
        """`wake_fd` may be another worker's: a call that ends on either wakes the loop."""
        self._owns_fd = wake_fd is None
        if wake_fd is None:
            wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.wake_fd = wake_fd
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="cdc-worker", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the loop raises it where it looks
                future.set_exception(error)
            self.wake()

        self._calls.put(run)
        return future

    def wake(self) -> None:
        """Make `wake_fd` readable. Safe in a signal handler."""
        os.eventfd_write(self.wake_fd, 1)

    def drain(self) -> None:
        """Make `wake_fd` unreadable until the next call ends."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """End the thread, and close its own `wake_fd`, after the calls so far. Returns at once.

        Nothing may be submitted, woken or polled afterwards.
        """
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and what it refers to: the next may come late
        if self._owns_fd:
            os.close(self.wake_fd)
