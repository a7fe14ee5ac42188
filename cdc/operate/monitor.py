"""Read reports in the log again and again in the background, for what the daemon itself answers."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from cdc.errors import CDCError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("cdc.operate.monitor")

T = TypeVar("T")


class Reader(Protocol):
    """What keeps connections between two reads."""

    def close(self) -> None:
        """Close the connections."""


class Unread(NamedTuple):
    """What a monitor cannot read, why, and for how long."""

    of: str
    error: str
    hint: str
    seconds: float


class Monitor(Generic[T]):
    """Reads until `close`, on a thread of its own; `newest` stays while nothing can be read."""

    def __init__(
        self,
        what: str,
        every_seconds: float,
        reader: Reader,
        read: Callable[[], T],
        newest: T,
        *,
        expected: bool = True,
    ) -> None:
        """Start at once, and close `reader` at the end.

        `expected`: whether there is something to read, so that a failure matters.
        """
        self.newest = newest
        self._what, self._every_seconds, self._expected = what, every_seconds, expected
        self._reader, self._read = reader, read
        self._over = threading.Event()
        self._failed: tuple[CDCError, float] | None = None  # since when (monotonic)
        threading.Thread(target=self._run, name=f"cdc-{what}", daemon=True).start()

    @property
    def unread(self) -> Unread | None:
        """What cannot be read now."""
        if (failed := self._failed) is None:
            return None
        error, since = failed
        return Unread(self._what, error.what, error.hint, round(time.monotonic() - since, 3))

    def close(self) -> None:
        """Stop; the thread ends after its current read."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.newest = self._read()
                self._failed = None
            except CDCError as error:
                if self._expected:
                    self._note(error)
            self._over.wait(self._every_seconds)
        self._reader.close()

    def _note(self, error: CDCError) -> None:
        since = self._failed[1] if self._failed else time.monotonic()
        if self._failed is None:
            fields = {"of": self._what, "error": error.what, "hint": error.hint}
            log.warning("cannot read the reports", extra={"fields": fields})
        self._failed = error, since
