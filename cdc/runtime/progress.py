"""Report progress while servers are fetched and started.

One line per step; on a terminal one more line, rewritten in place, with bytes and rate. Calls come
from several threads.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import IO, Final

_REDRAW_SECONDS: Final = 0.2
_REPORT_SECONDS: Final = 3.0  # where output is no terminal, such as a CI log
_MB: Final = 1e6


class Progress:
    """Silent, for tests and programs; `Terminal` prints."""

    def step(self, server: str, text: str) -> None:
        """Report that a server has reached the next step."""

    def expect(self, size: int) -> None:
        """Report that this many more bytes must be fetched."""

    def got(self, size: int) -> None:
        """Report that this many more bytes have arrived; negative when they were bad."""


class Terminal(Progress):
    """Progress on stderr, so that stdout stays for results."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._lock = threading.Lock()
        self._began = 0.0
        self._drawn = 0.0
        self._total = 0
        self._done = 0

    def step(self, server: str, text: str) -> None:
        with self._lock:
            self._print(f"  {server:<11} {text}")

    def expect(self, size: int) -> None:
        with self._lock:
            self._began = self._began or time.monotonic()
            self._total += size

    def got(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            complete = self._done >= self._total
            interval = _REDRAW_SECONDS if self._live else _REPORT_SECONDS
            if not complete and now - max(self._drawn, self._began) < interval:
                return
            self._drawn = now
            rate = self._done / max(now - self._began, 0.001)
            line = (
                f"  {'download':<11} {self._done / _MB:.1f} of {self._total / _MB:.1f} MB, "
                f"{rate / _MB:.1f} MB/s"
            )
            if self._live and not complete:
                self._out.write(f"\r\x1b[K{line}")
                self._out.flush()
            else:
                self._print(line)

    def _print(self, line: str) -> None:
        self._out.write(f"\r\x1b[K{line}\n" if self._live else f"{line}\n")
        self._out.flush()
