"""Print what a command waits for if it takes long: usually a server that does not answer.

A command line calls `show_with`; a daemon, which logs, does not.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# After a longer time without output a user takes the command for dead.
PATIENCE_SECONDS: Final = 1.5
_say: Callable[[str], None] | None = None


def show_with(say: Callable[[str], None] | None) -> None:
    """Have `say` called with each such line."""
    global _say  # noqa: PLW0603 - of the process, as its stderr is
    _say = say


@contextmanager
def after(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call `act`, in a thread of its own, if the block takes longer."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def slow(what: str) -> Iterator[None]:
    """Print that `what` is being waited for, if the block takes long."""
    say = _say
    if say is None:
        yield
        return
    with after(PATIENCE_SECONDS, lambda: say(f"waiting for {what} …")):
        yield
