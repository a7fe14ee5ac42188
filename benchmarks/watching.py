"""See when a store reaches a seq: it is asked again and again, in a thread."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def watching(
    seq: Callable[[], int], note: Callable[[int], None], every_seconds: float
) -> Iterator[None]:
    """Call `note` with each new seq while the block runs; then raise what the thread raised."""
    done, failed = threading.Event(), list[Exception]()

    def look() -> None:
        newest = 0
        try:
            while not done.wait(every_seconds):
                found = seq()
                if found > newest:
                    newest = found
                    note(found)
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]
