"""Read reports in the log again and again in the background, for what the daemon itself answers."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from cdc.errors import CDCError

log = logging.getLogger("cdc.operate.monitor")


class Reader(Protocol):
    """What keeps connections between two reads."""

    def close(self) -> None:
        """Close the connections."""


R = TypeVar("R", bound=Reader)


class Monitor(ABC, Generic[R]):
    """Reads until `close`, on a thread of its own. The last result stays while none can be read."""

    def __init__(self, what: str, every_seconds: float, *, logs: bool = True) -> None:
        """Start at once; `logs`: whether a failure to read is worth a line."""
        self._what = what
        self._every_seconds = every_seconds
        self._logs = logs
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"cdc-{what}", daemon=True).start()

    @abstractmethod
    def _open(self) -> R:
        """Return a reader; nothing is connected yet."""

    @abstractmethod
    def _read(self, reader: R) -> None:
        """Read, and keep the result; raise CDCError where that fails."""

    def close(self) -> None:
        """Stop; the thread ends after its current read."""
        self._over.set()

    def _run(self) -> None:
        reader, logged = self._open(), False
        while not self._over.is_set():
            try:
                self._read(reader)
                logged = False
            except CDCError as error:
                if not logged and self._logs:
                    fields = {"of": self._what, "error": error.what, "hint": error.hint}
                    log.warning("cannot read the reports", extra={"fields": fields})
                logged = True
            self._over.wait(self._every_seconds)
        reader.close()
