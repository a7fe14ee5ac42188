"""The moments of a batch on its way into the log, and a tracer that records them.

Every batch carries its `Moments`; their differences are the stages in the metrics. A process that
measures more sets `tracer` before it runs the daemon (benchmarks.traced_daemon): it is called for
each iteration of the loop that read something, each batch and each poll of a watcher. Without a
tracer each of these costs one comparison.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.log.batch import BatchContents

# The stages of a batch, in their order; each ends at the next moment of `Moments`.
STAGES: Final = {
    "gather": "from its first change received until all of it is handed to the producer",
    "acknowledge": "until the brokers have acknowledged all of its records",
    "turn": "until the Kafka transaction before it has ended",
    "commit": "until its own commit is answered",
    "confirm": "until the loop has noted that and confirmed it to Postgres",
}


class Moments:
    """When a batch reached the end of each stage (monotonic seconds); 0 before it has."""

    __slots__ = ("acknowledged", "answered", "confirmed", "handed_over", "in_turn", "received")

    def __init__(self, received: float, handed_over: float) -> None:
        self.received = received
        self.handed_over = handed_over
        # Written by the worker of its producer, in this order.
        self.acknowledged = self.in_turn = self.answered = 0.0
        self.confirmed = 0.0

    def in_order(self) -> tuple[float, ...]:
        """Return the moments in the order of the stages."""
        return (
            *(self.received, self.handed_over, self.acknowledged),
            *(self.in_turn, self.answered, self.confirmed),
        )

    def seconds(self) -> Iterator[tuple[str, float]]:
        """Yield how long each stage took, for a confirmed batch; they add up to the total."""
        moments = self.in_order()
        for stage, before, after in zip(STAGES, moments, moments[1:], strict=False):
            yield stage, after - before


class Tracer(Protocol):
    """Called as things happen, on whichever thread; must return at once."""

    def received(self, seq: int, began_at: float, ended_at: float) -> None:
        """Record that changes up to `seq` were read and sequenced within this time."""

    def committed(self, seq: int, contents: BatchContents, moments: Moments) -> None:
        """Record a batch of changes up to `seq`, which has just been confirmed."""

    def span(self, name: str, began_at: float, ended_at: float) -> None:
        """Record when something else that the daemon does began and ended."""


tracer: Tracer | None = None


@contextmanager
def span(name: str) -> Iterator[None]:
    """Pass the time that the block took to the tracer, if there is one."""
    if tracer is None:
        yield
        return
    began_at = time.monotonic()
    try:
        yield
    finally:
        tracer.span(name, began_at, time.monotonic())
