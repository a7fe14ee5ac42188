"""drain-bigtx: the rows of drain-inserts in one transaction.

The server decodes and buffers the complete transaction before it sends a byte, unless it streams it
while it is open (protocol 2); floor and limit are read both ways. So the clock starts when a
walsender streams from the slot, for ours, the peer and the floor alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import rows as bench
from benchmarks.drain_inserts import Inserts
from benchmarks.workload import Clock

if TYPE_CHECKING:
    import psycopg


class BigTransaction(Inserts):
    """One INSERT of all rows."""

    name = "drain-bigtx"
    clock = Clock.SLOT_TAKEN
    in_progress = True

    def load(self, connection: psycopg.Connection, rows: int) -> None:
        bench.insert_at_once(connection, bench.TABLE, bench.VALUES, rows)
