"""The demo's listeners, each a thread: what arrives in the log, and what the daemon reports.

Both end with `close`. `check` raises a listener's error in the calling thread.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError
from cdc.playground.demo.schema import TABLES
from cdc.playground.demo.tail import Tail

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.playground.demo.daemon import Daemon
    from cdc.playground.demo.flow import Flow

_READ_SECONDS: Final = 0.1
_FIND_SECONDS: Final = 0.5
_ASK_SECONDS: Final = 0.5


class Listener(threading.Thread):
    """Feeds the flow from the pipeline's topics."""

    def __init__(self, config: Config, flow: Flow) -> None:
        super().__init__(name="listener", daemon=True)
        self._config = config
        self._flow = flow
        self._over = threading.Event()
        self._error: CDCError | None = None

    def run(self) -> None:
        tail = Tail(self._config)
        found, due = 0, 0.0
        try:
            while not self._over.is_set():
                # One topic per table, and those of frontiers, dead letters and logical messages.
                if found <= len(TABLES) + 2 and time.monotonic() >= due:
                    due = time.monotonic() + _FIND_SECONDS
                    found = len(tail.find_topics())
                batch = tail.read(_READ_SECONDS)
                now = time.time()
                with self._flow.lock:
                    for seen in batch:
                        if seen.topic not in {tail.dead_topic, tail.messages_topic}:
                            self._flow.take(seen, now)
        except CDCError as error:
            self._error = error
        finally:
            tail.close()

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._over.set()
        self.join(5)


class Asker(threading.Thread):
    """Keeps `answer` up to date: asking may take long while the daemon is busy or down."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(name="asker", daemon=True)
        self.answer = "starting"
        self._daemon = daemon
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            self.answer = self._daemon.state()
            # Quick to show a start, and cheap once the daemon streams.
            self._over.wait(_ASK_SECONDS if self.answer == "streaming" else _ASK_SECONDS / 2)

    def close(self) -> None:
        self._over.set()
        self.join(5)
