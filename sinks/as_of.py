"""Read stores that change in place as of one frontier: a state that the database had.

A reader reads the frontier before and after its work. If both are the same, with no cut in flight,
the result is the database's state at that frontier. Otherwise it tries again, up to a time limit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from cdc.events import LSN

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.errors import UnavailableError

T = TypeVar("T")

# The names of the fields that stores show to readers.
FIELDS: Final = ("generation", "seq", "lsn", "committed_at_us", "applying")


class StoreFrontier(NamedTuple):
    """A store's frontier, with no cut in flight."""

    generation: int
    seq: int
    lsn: LSN
    committed_at_us: int
    lost: tuple[str, ...] = ()  # the tables of which the store has lost data


class AsOf(NamedTuple, Generic[T]):
    """What was read, and the frontier at which the database had this state.

    Except in the tables `lost`, whose data the store has lost and does not have again yet.
    """

    found: T
    seq: int
    lsn: LSN
    committed_at_us: int
    lost: tuple[str, ...] = ()


class Waiting(NamedTuple):
    """How long a reader tries, how long it pauses in between, and what it raises on timeout."""

    seconds: float
    pause_seconds: float
    error: UnavailableError


def read(
    frontier: Callable[[], StoreFrontier | None], work: Callable[[], T], waiting: Waiting
) -> AsOf[T]:
    """Return what `work` reads; call it again until it has read a single state.

    `frontier` returns the store's frontier, None while a cut is being written.
    """
    deadline = time.monotonic() + waiting.seconds
    while True:
        before = frontier()
        if before is not None:
            found = work()
            if frontier() == before:
                return AsOf(found, *before[1:])
        if time.monotonic() > deadline:
            raise waiting.error
        time.sleep(waiting.pause_seconds)
