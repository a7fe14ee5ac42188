"""When a standby copy of a follower takes over, and when it gives way again.

The active copy is known by its reports in the log. A standby takes over once the follower was
stopped, or once no report has arrived for some seconds; it measures these itself, so the machines'
clocks do not matter, and only while it can read the log. A follower that halted is not taken over:
an operator is needed. Two active copies are harmless, so all of this is only a hint: a copy that
was taken for dead may continue. Then the one that was a standby gives way.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError
from cdc.log.follower_reports import Readings

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.follower_reports import FollowerRecord

# How the owner in a standby's reports ends: other copies know by it that it may give way.
MARK: Final = ":standby"
# `cdc rebuild` reports that it has stopped, whether or not the follower runs.
_REBUILD: Final = ":rebuild"
_READ_SECONDS: Final = 5.0
# So that of several standbys one is the first.
JITTER_SECONDS: Final = 1.5


class AnotherCopyError(Exception):
    """Another copy of the follower is active: this one gives way."""


class Standby:
    """What one standby copy of a follower, known by its `owner`, has read of the others."""

    def __init__(self, config: Config, name: str, owner: str, seconds: float) -> None:
        """`seconds`: how long an active copy may be silent."""
        self._name, self._owner, self._seconds = name, owner, seconds
        self._readings = Readings(config)
        self._newest: FollowerRecord | None = None
        self._seen_at = time.monotonic()
        self._jitter = random.uniform(0, JITTER_SECONDS)  # noqa: S311 - jitter, not a secret
        self._lock = threading.Lock()

    def is_free(self) -> bool:
        """Return whether this copy is to be the active one."""
        return self._read() and self._decide(time.monotonic())

    def gives_way(self) -> bool:
        """Return whether another copy is active too, and this one gives way to it."""
        newest = self._newest if self._read() else None
        if newest is None or newest.owner == self._owner or newest.owner.endswith(_REBUILD):
            return False
        is_first = not newest.owner.endswith(MARK) or newest.owner < self._owner
        return newest.state not in {"stopped", "halted"} and is_first

    def close(self) -> None:
        self._readings.close()

    def _read(self) -> bool:
        """Read all reports; return False if they can't be read, which proves no silence."""
        with self._lock:
            try:
                newest = self._readings.refresh(_READ_SECONDS).get(self._name)
            except CDCError:
                self._seen_at = time.monotonic()
                return False
            if newest != self._newest:
                self._newest, self._seen_at = newest, time.monotonic()
            return True

    def _decide(self, now: float) -> bool:
        newest = self._newest
        if newest is not None and newest.owner == self._owner:
            return True
        if newest is not None and newest.state == "halted":
            return False
        is_released = newest is None or (
            newest.state == "stopped" and not newest.owner.endswith(_REBUILD)
        )
        return now - self._seen_at >= self._jitter + (0.0 if is_released else self._seconds)
