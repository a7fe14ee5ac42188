"""Write to `lockstep.heartbeat`, where the configuration enables the table.

The pipeline does not need it: a failed write is a finding, and the stream continues.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError, Policy
from cdc.operate.findings import Finding, note
from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.connection import Connection

_BEAT: Final = b"""
INSERT INTO lockstep.heartbeat AS h (pipeline, beat_at, owner) VALUES (%s, now(), %s)
ON CONFLICT (pipeline) DO UPDATE SET beat_at = excluded.beat_at, owner = excluded.owner
"""


class Heartbeat:
    """The pipeline's row, written every `migrations.heartbeat_seconds`."""

    def __init__(self, config: Config) -> None:
        self._pipeline = config.pipeline
        self._enabled = config.migrations.heartbeat_table
        self._seconds = config.migrations.heartbeat_seconds
        self._beat_at = float("-inf")
        self._owner = f"{socket.gethostname()}:{os.getpid()}"

    def write_if_due(self, sql: Connection) -> list[Finding]:
        """Write when it is due; return what prevented it.

        Raises the error of a lost connection.
        """
        now = time.monotonic()
        if not self._enabled or now - self._beat_at < self._seconds:
            return []
        try:
            with translated("writing to lockstep.heartbeat"):
                sql.execute(_BEAT, (self._pipeline, self._owner))
        except CDCError as error:
            if error.policy is Policy.BACKOFF:
                raise
            fix = "cdc migrations up heartbeat_table"
            return [note("heartbeat", f"no heartbeat is written: {error.what}", fix)]
        self._beat_at = now
        return []
