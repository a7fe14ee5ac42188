"""A lock between processes, on a file."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cdc.errors import LocalStackError

_MOMENT_SECONDS: Final = 1.0


@contextmanager
def file_lock(
    path: Path, timeout_seconds: float, waiting: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases when its holder ends, in any way.

    Calls `waiting` once if another process holds it for more than a moment.
    """
    began = time.monotonic()
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waiting is not None and waited > _MOMENT_SECONDS:
                    waiting()
                    waiting = None
                if waited > timeout_seconds:
                    raise LocalStackError(
                        f"{path} is still held by another process after {timeout_seconds:.0f} s",
                        hint=f"find it with: fuser -v {path}",
                    ) from None
                time.sleep(0.05)
        yield
