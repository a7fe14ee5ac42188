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
    """What a monitor cannot read, why, and since when (monotonic)."""

    of: str
    error: str
    hint: str
    since: float

    def fields(self) -> dict[str, object]:
        """Return it as the body of /readyz has it."""
        seconds = round(time.monotonic() - self.since, 3)
        return {"of": self.of, "error": self.error, "hint": self.hint, "seconds": seconds}


class Monitor(Generic[T]):
    """Reads until `close`, on a thread of its own; `newest` stays while nothing can be read."""

    unread: Unread | None = None

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
        threading.Thread(target=self._run, name=f"cdc-{what}", daemon=True).start()

    def close(self) -> None:
        """Stop; the thread ends after its current read."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.newest = self._read()
                self.unread = None
            except CDCError as error:
                if self._expected:
                    self._note(error)
            self._over.wait(self._every_seconds)
        self._reader.close()

    def _note(self, error: CDCError) -> None:
        since = self.unread.since if self.unread else time.monotonic()
        if self.unread is None:
            fields = {"of": self._what, "error": error.what, "hint": error.hint}
            log.warning("cannot read the reports", extra={"fields": fields})
        self.unread = Unread(self._what, error.what, error.hint, since)
