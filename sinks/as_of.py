"""Read as of one frontier what stores change in place: a state that the database had.

A reader asks for the frontier before its work and behind it. The same twice, with nothing on its
way to the next: so was the database at that frontier. Otherwise again, for a while.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from cdc.events import LSN

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.errors import UnavailableError

T = TypeVar("T")

# What stores tell readers, by these names.
FIELDS: Final = ("generation", "seq", "lsn", "committed_at_us", "applying")


class Mark(NamedTuple):
    """A store at a frontier, with nothing on its way to the next."""

    generation: int
    seq: int
    lsn: LSN
    committed_at_us: int


class AsOf(NamedTuple, Generic[T]):
    """What was read, and the frontier at which the database was so."""

    found: T
    seq: int
    lsn: LSN
    committed_at_us: int


class Waiting(NamedTuple):
    """How long a reader tries, how long it rests in between, and what it raises in the end."""

    seconds: float
    pause_seconds: float
    error: UnavailableError


def read(mark: Callable[[], Mark | None], work: Callable[[], T], waiting: Waiting) -> AsOf[T]:
    """Return what `work` reads; it is called again until it met one state.

    `mark` tells where the store stands, None while rows are on their way to the next frontier.
    """
    deadline = time.monotonic() + waiting.seconds
    while True:
        before = mark()
        if before is not None:
            found = work()
            if mark() == before:
                return AsOf(found, *before[1:])
        if time.monotonic() > deadline:
            raise waiting.error
        time.sleep(waiting.pause_seconds)
