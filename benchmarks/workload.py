"""What a drain carries: tables, their changes in the WAL, and what must arrive of them.

A workload is described here and run by `benchmarks.drains` (ours with floor, limit and peer) or by
`benchmarks.memory_bigtx`; it starts nothing itself.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg

    from benchmarks.contents import Content


class Clock(Enum):
    """When a drain's time starts; it ends when a read_committed reader can see the last event."""

    FIRST_RECORD = "the broker's stamp on the first record"
    # The server sends a single transaction only after it has decoded all of it, or the daemon
    # spills it until its commit: a clock from the first record on would miss most of the work.
    SLOT_TAKEN = "the moment at which a walsender streams from the slot"


class Workload(Protocol):
    """One kind of backlog."""

    @property
    def name(self) -> str: ...

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of schema public that the publication names."""
        ...

    @property
    def rows(self) -> int:
        """How many changes the pinned workload has."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def in_progress(self) -> bool:
        """Whether floor, limit and ours are also measured with open transactions streamed."""
        ...

    def create(self, connection: psycopg.Connection, rows: int) -> None:
        """Create the tables with their initial rows, which are not in the backlog."""
        ...

    def load(self, connection: psycopg.Connection, rows: int) -> None:
        """Make `rows` changes."""
        ...

    def contents(self, connection: psycopg.Connection, rows: int) -> Mapping[str, Content]:
        """Return new contents for one check: what must arrive of each table."""
        ...
