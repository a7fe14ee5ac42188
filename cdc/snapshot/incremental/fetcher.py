"""The worker's side of incremental snapshots: chunks read between two watermarks.

Every call blocks, and runs on the incremental snapshots' own worker, on one connection: a chunk may
wait for a lock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from cdc import failpoints
from cdc.errors import StoppedError
from cdc.snapshot.incremental import commands
from cdc.source.chunks import Reader

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.snapshot.incremental.job import Flight
    from cdc.source.chunks import InProgress


class Fetcher:
    """Reads for one session of the daemon."""

    def __init__(self, config: Config, session: str, key: bytes) -> None:
        """Connect when there is something to read; `key` signs the session's watermarks."""
        self._config, self._session, self._key = config, session, key
        self._reader: Reader | None = None
        self._over = False

    def fetch(self, flight: Flight) -> None:
        """Read the chunk that the flight requests."""
        record, sql = flight.job.record, self._connected()
        if not flight.relation_id:
            flight.relation_id, flight.estimate = sql.find(record.schema, record.table)
        low = commands.Mark(
            session=self._session,
            snapshot=record.id,
            chunk=flight.number,
            relation_id=flight.relation_id,
            low=True,
        )
        failpoints.reach("before_low")
        sql.mark(commands.MARK, commands.encode(low.signed(self._key)))
        failpoints.reach("after_low")
        chunk = sql.read(flight.asked._replace(relation_id=flight.relation_id))
        failpoints.reach("after_select")
        flight.chunk = chunk  # before its high watermark can arrive
        failpoints.reach("before_high")
        flight.marked_at = time.monotonic()
        sql.mark(commands.MARK, commands.encode(replace(low, low=False).signed(self._key)))
        failpoints.reach("after_high")

    def in_progress(self) -> InProgress:
        """Return the transactions that are open now."""
        return self._connected().in_progress()

    def cancel(self) -> None:
        """End what it waits for, and refuse further reads. Safe from another thread."""
        self._over = True
        if reader := self._reader:
            reader.cancel()

    def disconnect(self) -> None:
        """Close the connection; the next read opens another."""
        if reader := self._reader:
            self._reader = None
            reader.close()

    close = disconnect

    def _connected(self) -> Reader:
        if self._over:
            raise StoppedError
        if self._reader is None:
            self._reader = Reader(self._config)
        return self._reader
