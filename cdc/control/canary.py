"""Send canaries: logical messages that come out of the log, and out of every follower, as events.

What a canary needs is what a change needs: a server that writes WAL, a slot that is read, a broker
that takes transactions, a follower that applies them. So its age where it comes out is the health
of all of it, also while nobody changes anything. It is outside any transaction and in no table, and
takes no rights that the publication does not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cdc.control.findings import Finding, note
from cdc.errors import CDCError
from cdc.log.followers import CANARY
from cdc.source.connection import translated

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.source.catalog import Connection

_SEND: Final = b"SELECT pg_logical_emit_message(false, %s, %s)"
_FIX: Final = (
    "source.dsn must name the primary, and its role may call pg_logical_emit_message (GRANT EXECUTE"
    " ON FUNCTION pg_logical_emit_message(boolean, text, text) TO …); or source.canary_seconds: 0"
)


class Canary:
    """One every `seconds`; none where that is 0."""

    def __init__(self, config: Config) -> None:
        self.seconds = config.canary_seconds
        self._sent_at = float("-inf")
        self.findings: list[Finding] = []  # what stood in the way of the newest

    def send(self, sql: Connection) -> None:
        """Send one where it is time. Raises the error of a connection that is gone."""
        now = time.monotonic()
        if not self.seconds or now - self._sent_at < self.seconds:
            return
        self._sent_at, self.findings = now, []
        try:
            with translated("sending a canary"):
                sql.execute(_SEND, (CANARY, str(time.time_ns() // 1_000)))
        except CDCError as error:
            if sql.closed:
                raise
            self.findings = [note("canary", f"no canary is sent: {error.what}", _FIX)]

    def pause(self, left: float) -> float:
        """Return for how long to rest, when something else is due after `left` seconds."""
        if not self.seconds:
            return left
        return max(0.0, min(left, self._sent_at + self.seconds - time.monotonic()))
