"""The demo's threads: each runs until `close`, and its error is raised where `check` is called."""

from __future__ import annotations

import threading
from abc import abstractmethod

from cdc.errors import CDCError


class DemoThread(threading.Thread):
    """A thread of the demo; a subclass does its work in `work`, until `over` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.over = threading.Event()
        self._error: CDCError | None = None

    @abstractmethod
    def work(self) -> None:
        """Work until `over` is set; a CDCError ends it."""

    def run(self) -> None:
        try:
            self.work()
        except CDCError as error:
            self._error = error

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Request the end, and wait for it for a few seconds."""
        self.over.set()
        self.join(5)
