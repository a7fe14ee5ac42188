"""Report progress on stderr: stdout carries only the results."""

from __future__ import annotations

import sys
import time

_started = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _started:7.1f}s  {text}", file=sys.stderr, flush=True)


class Every:
    """Reports at most once per interval in seconds, however often it is called."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = time.monotonic() + seconds

    def say(self, text: str) -> None:
        if time.monotonic() >= self._due:
            say(text)
            self._due = time.monotonic() + self._seconds
