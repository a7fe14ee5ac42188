"""Who takes an initial snapshot: the daemon before it streams, or a command that does only this.

The host is told how it goes and asked whether to stop; blocking calls run beside it, so that it
answers for itself meanwhile.
"""

from __future__ import annotations

import select
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from cdc.errors import StoppedError
from cdc.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from cdc.snapshot.progress import Report

T = TypeVar("T")

_TURN_SECONDS: Final = 0.2


class Host(Protocol):
    """What the coordinator needs of the process it runs in."""

    @property
    def stopping(self) -> bool: ...

    @property
    def config_file(self) -> Path | None:
        """The configuration's file, for jobs that read it themselves."""

    def beat(self) -> None:
        """Note that the process turns."""

    def snapshotting(self, reason: str, report: Report | None = None) -> None:
        """Note what the snapshot is doing, in words, and how far it is."""


class Aside:
    """Runs blocking calls beside the host, one at a time."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._worker = Worker()
        self._call: Future[object] | None = None
        self._poll = select.poll()
        self._poll.register(self._worker.wake_fd, select.POLLIN)

    def __call__(self, call: Callable[[], T], meanwhile: Callable[[], None] | None = None) -> T:
        """Return the call's result; raise StoppedError, and leave it to itself, on a stop.

        `meanwhile` is called at every turn.
        """
        future = self._worker.submit(call)
        self._call = future  # type: ignore[assignment]  # whatever it returns
        while not future.done():
            self.turn()
            if meanwhile:
                meanwhile()
        return future.result()

    def turn(self) -> None:
        """Let some time pass; raise StoppedError where the host is to stop."""
        self.check()
        self._poll.poll(_TURN_SECONDS * 1_000)
        self._worker.drain()

    def rests(self, seconds: float) -> bool:
        """Wait for a call that was left to itself; return whether it has ended."""
        return self._call is None or not wait([self._call], seconds).not_done

    def check(self) -> None:
        """Note that the process turns; raise StoppedError where it is to stop."""
        self._host.beat()
        if self._host.stopping:
            raise StoppedError

    def pause(self, seconds: float) -> None:
        """Let so much time pass."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn()
