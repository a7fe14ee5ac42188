"""Two daemons at any time: one works, one is the standby, and each that dies is replaced.

Every other new daemon carries a failpoint, at which it kills itself: each failpoint in turn. A
daemon that ends in any other way than by SIGKILL has found an error that a person must handle,
which is a failure of the campaign.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest

from cdc import failpoints
from tests.fixtures.daemon import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.daemon import Daemon, PipelineUnderTest

_SIZE: Final = 2
# At which hit of the failpoint it dies: at once, or after a while.
_COUNTS: Final = (1, 2, 5, 20)
_RECOVERY_SECONDS: Final = 180.0
_MOVED_EVENTS: Final = 5


class Crew:
    """The daemons of one pipeline; `look` replaces those that died."""

    def __init__(self, pipeline: PipelineUnderTest, config: Path, chance: random.Random) -> None:
        self._pipeline = pipeline
        self._config = config
        self._chance = chance
        self._failpoints: list[str] = []
        self._places: dict[int, str] = {}
        self._alive: list[Daemon] = []
        self.died: Counter[str] = Counter()
        self.failpoints = False

    def look(self) -> None:
        """Count those that died at their failpoints, and start replacements."""
        for daemon in list(self._alive):
            code = daemon.process.poll()
            if code is None:
                continue
            self._alive.remove(daemon)
            if code != -signal.SIGKILL:
                pytest.fail(f"a daemon ended by itself with {code}: {daemon.log[-2_000:]}")
            place = self._places.pop(id(daemon), "")
            if place:
                self.died[f"died {place}"] += 1
        while len(self._alive) < _SIZE:
            self._alive.append(self._start())

    def _start(self) -> Daemon:
        place = ""
        if self.failpoints and self._chance.random() < 0.5:
            if not self._failpoints:
                self._failpoints = list(failpoints.NAMES)
                self._chance.shuffle(self._failpoints)
            place = self._failpoints.pop()
        count = 1 if place in ("after_slot", "after_fence") else self._chance.choice(_COUNTS)
        daemon = self._pipeline.start(f"{place}:{count}" if place else "", self._config)
        if place:
            self._places[id(daemon)] = place
        return daemon

    @property
    def working(self) -> Daemon:
        """The one that streams; where none does, the first that is alive."""
        self.look()
        streaming = [each for each in self._alive if each.state == "streaming"]
        return (streaming or self._alive)[0]

    @property
    def waiting(self) -> Daemon:
        self.look()
        others = [each for each in self._alive if each.state == "standby"]
        return (others or self._alive)[-1]

    def forgive(self, daemon: Daemon) -> None:
        """Forget that it carried a failpoint: it was killed from outside."""
        self._places.pop(id(daemon), None)

    def recovered(self) -> None:
        """Wait until a daemon that is alive has published new events."""
        seen: dict[int, float] = {}

        def moved() -> bool:
            self.look()
            for daemon in self._alive:
                events = daemon.metric("lockstep_events_total")
                if events >= seen.setdefault(id(daemon), events) + _MOVED_EVENTS:
                    return True
            return False

        wait_until(moved, "nothing flows again", _RECOVERY_SECONDS, pause=0.1)

    def quiesce(self) -> None:
        """Continue without failpoints: each daemon that carries one is replaced."""
        self.failpoints = False
        for daemon in list(self._alive):
            if self._places.pop(id(daemon), None):
                daemon.kill()
        self.look()
