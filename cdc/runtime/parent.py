"""Ends a process with the one that has started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def end_with(
    parent_ends: Callable[[], object], *, within: float | None = None, code: int = 0
) -> None:
    """Stop this process, as SIGTERM does, once `parent_ends` returns, in a thread of its own.

    One that has not ended `within` so many seconds then exits with `code`.
    """

    def wait() -> None:
        parent_ends()
        os.kill(os.getpid(), signal.SIGTERM)
        if within is not None:
            time.sleep(within)
            os._exit(code)

    threading.Thread(target=wait, name="cdc-parent", daemon=True).start()
