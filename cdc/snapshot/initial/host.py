"""The process that takes an initial snapshot: the daemon before it streams, or a command.

The host gets progress reports and is asked whether to stop. Blocking calls run in the background,
so that the host answers health checks meanwhile.
"""

from __future__ import annotations

import select
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from cdc.errors import StoppedError
from cdc.runtime.background import BackgroundThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from cdc.snapshot.initial.progress import Report

T = TypeVar("T")

_TURN_SECONDS: Final = 0.2


class HostProcess(Protocol):
    """What the coordinator needs of the process it runs in."""

    @property
    def stopping(self) -> bool: ...

    @property
    def config_file(self) -> Path | None:
        """The configuration's file, for jobs that read it themselves."""

    def beat(self) -> None:
        """Note that the process is alive."""

    def snapshotting(self, reason: str, report: Report | None = None) -> None:
        """Note what the snapshot is doing, in words, and its progress."""


class Background:
    """Runs blocking calls in the background, one at a time."""

    def __init__(self, host: HostProcess) -> None:
        self._host = host
        self._worker = BackgroundThread()
        self._call: Future[object] | None = None
        self._poll = select.poll()
        self._poll.register(self._worker.wake_fd, select.POLLIN)

    def __call__(self, call: Callable[[], T], meanwhile: Callable[[], None] | None = None) -> T:
        """Return the call's result. On a stop raise StoppedError and leave the call running.

        `meanwhile` is called on every iteration.
        """
        future = self._worker.submit(call)
        self._call = future  # type: ignore[assignment]  # whatever it returns
        while not future.done():
            self.turn()
            if meanwhile:
                meanwhile()
        return future.result()

    def turn(self) -> None:
        """Wait a short time; raise StoppedError where the host is to stop."""
        self.check()
        self._poll.poll(_TURN_SECONDS * 1_000)
        self._worker.drain()

    def has_ended(self, seconds: float) -> bool:
        """Wait for a call that was left running; return whether it has ended."""
        return self._call is None or not wait([self._call], seconds).not_done

    def close(self) -> None:
        """End its thread, after a call that was left running. Returns at once."""
        self._worker.close()

    def check(self) -> None:
        """Note that the process is alive; raise StoppedError where it is to stop."""
        self._host.beat()
        if self._host.stopping:
            raise StoppedError

    def pause(self, seconds: float) -> None:
        """Wait this long; raise StoppedError where the host is to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn()
