"""The demo's readers: what arrives in the log, what followers and the daemon report."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError
from cdc.log.follower_reports import Readings
from cdc.playground.demo.background import DemoThread
from cdc.playground.demo.schema import TABLES
from cdc.playground.demo.tail import Tail

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.playground.demo.child import DaemonChild
    from cdc.playground.demo.flow import Flow

_READ_SECONDS: Final = 0.1
_FIND_SECONDS: Final = 0.5
_ASK_SECONDS: Final = 0.5


class Listener(DemoThread):
    """Feeds the flow from the pipeline's topics."""

    def __init__(self, config: Config, flow: Flow) -> None:
        super().__init__("listener")
        self._config = config
        self._flow = flow

    def work(self) -> None:
        found, due = 0, 0.0
        with closing(Tail(self._config)) as tail:
            while not self.over.is_set():
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


class ReportReader(DemoThread):
    """Feeds the flow with the followers' reports."""

    def __init__(self, config: Config, flow: Flow) -> None:
        super().__init__("followers")
        self._config = config
        self._flow = flow

    def work(self) -> None:
        with closing(Readings(self._config)) as readings:
            while not self.over.is_set():
                try:
                    readings.wait(2 * _READ_SECONDS)
                except CDCError:
                    # A killed broker comes back; the listener reports it when it does not.
                    self.over.wait(2 * _READ_SECONDS)
                    continue
                with self._flow.lock:
                    self._flow.note_followers(readings.newest, time.time())


class StatePoller(DemoThread):
    """Keeps `answer` up to date: asking may take long while the daemon is busy or down."""

    def __init__(self, daemon: DaemonChild) -> None:
        super().__init__("state-poller")
        self.answer = "starting"
        self._daemon = daemon

    def work(self) -> None:
        while not self.over.is_set():
            self.answer = self._daemon.state()
            # Quick to show a start, and cheap once the daemon streams.
            self.over.wait(_ASK_SECONDS if self.answer == "streaming" else _ASK_SECONDS / 2)
