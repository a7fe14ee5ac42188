"""Read reports in the log again and again in the background, for what the daemon itself answers."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from cdc.errors import CDCError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("cdc.operate.monitor")

T = TypeVar("T")


class Reader(Protocol):
    """What keeps connections between two reads."""

    def close(self) -> None:
        """Close the connections."""


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
        logs: bool = True,
    ) -> None:
        """Start at once, and close `reader` at the end.

        `logs`: whether a failure to read is worth a line.
        """
        self.newest = newest
        self._what, self._every_seconds, self._logs = what, every_seconds, logs
        self._reader, self._read = reader, read
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"cdc-{what}", daemon=True).start()

    def close(self) -> None:
        """Stop; the thread ends after its current read."""
        self._over.set()

    def _run(self) -> None:
        logged = False
        while not self._over.is_set():
            try:
                self.newest = self._read()
                logged = False
            except CDCError as error:
                if not logged and self._logs:
                    fields = {"of": self._what, "error": error.what, "hint": error.hint}
                    log.warning("cannot read the reports", extra={"fields": fields})
                logged = True
            self._over.wait(self._every_seconds)
        self._reader.close()
