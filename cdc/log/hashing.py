"""Compute the digests of a batch's records in a thread of its own.

SHA-256 runs outside of the interpreter's lock: while it does, the loop reads and encodes what is
next. Records are encoded where they are handed over, in a fifth of the time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from cdc.log.digests import ChunkHash, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

# What takes as long to hash as to hand over to the thread.
_SMALL_BYTES: Final = 32 << 10


class Hashing:
    """Adds records to digests; `start` begins with what was added, `wait` returns once it is done.

    All methods are called by one thread, each digest is read only after `wait`.
    """

    def __init__(self) -> None:
        self._added: list[tuple[ChunkHash, memoryview]] = []
        self._bytes = 0
        self._running: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def add(self, to: ChunkHash, messages: Sequence[Mapping[str, object]]) -> None:
        """Add records to a digest, after those added to it before."""
        for data in encode(messages):
            self._added.append((to, data))
            self._bytes += len(data)

    def start(self) -> None:
        """Hash what was added, in the background if it is much."""
        added, self._added = self._added, []
        size, self._bytes = self._bytes, 0
        if size < _SMALL_BYTES and self._running is None:
            _hash(added)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._running = self._thread.submit(_hash, added)

    def wait(self) -> None:
        """Return when all that was added is hashed."""
        if self._added:
            self.start()
        if self._running is not None:
            self._running.result()
            self._running = None

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _hash(added: list[tuple[ChunkHash, memoryview]]) -> None:
    for to, data in added:
        to.update(data)
