"""Say what a command waits for, once it waits for long: a server that does not answer, as a rule.

A command line sets `say`; a daemon, which logs, leaves it alone.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Whoever waits without a word for longer takes the command for dead.
PATIENCE_SECONDS: Final = 1.5
_say: Callable[[str], None] | None = None


def tell_with(say: Callable[[str], None] | None) -> None:
    """Have `say` called with each line of the kind."""
    global _say  # noqa: PLW0603 - of the process, as its stderr is
    _say = say


@contextmanager
def slow(what: str) -> Iterator[None]:
    """Say that `what` is waited for, where the block takes long."""
    if _say is None:
        yield
        return
    timer = threading.Timer(PATIENCE_SECONDS, _say, [f"waiting for {what} …"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
