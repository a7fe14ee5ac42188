"""Send canaries: logical messages that the log and every follower carry, as events do.

A canary needs what a change needs: a server that writes WAL, a slot that is read, a broker that
accepts transactions, a follower that applies them. So its age at each of these shows the health of
all of them, even when the database is idle. It is outside any transaction and in no table, and
needs no rights that the publication does not. It is signed, and the daemon publishes only signed
ones: a forged one would hide that a follower is dead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cdc.config.model import CANARY_SECONDS
from cdc.errors import CDCError
from cdc.log.follower_reports import CANARY
from cdc.operate.findings import Finding, note
from cdc.source import authority
from cdc.source.connection import translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.source.connection import Connection

_SYSTEM: Final = b"SELECT system_identifier::text FROM pg_catalog.pg_control_system()"
_SEND: Final = b"SELECT pg_logical_emit_message(false, %s, %s)"
_FIX: Final = (
    "source.dsn must name the primary, and its role may call pg_logical_emit_message (GRANT EXECUTE"
    " ON FUNCTION pg_logical_emit_message(boolean, text, text) TO …); or source.canary_seconds: 0"
)


class Canary:
    """One every `seconds`; none where that is 0."""

    def __init__(self, config: Config, followed: Callable[[], bool] = lambda: False) -> None:
        """`followed` returns whether a follower reports, which the configuration may not name."""
        self._config, self._followed = config, followed
        self._pipeline, self._secret = config.pipeline, authority.canary_secret(config)
        self._sent_at = float("-inf")
        self.findings: list[Finding] = []  # why the newest could not be sent

    @property
    def seconds(self) -> float:
        """How often one is sent: also for followers that were added after this process started."""
        if self._config.source.canary_seconds is None and self._followed():
            return CANARY_SECONDS
        return self._config.canary_seconds

    def send(self, sql: Connection) -> None:
        """Send one when it is due. Raises the error of a lost connection."""
        now = time.monotonic()
        if not self.seconds or now - self._sent_at < self.seconds:
            return
        self._sent_at, self.findings = now, []
        try:
            with translated("sending a canary"):
                row = sql.execute(_SYSTEM).fetchone()
                assert row is not None
                scope = authority.Scope(self._pipeline, row[0])
                at_us, purpose = time.time_ns() // 1_000, authority.CANARY_PURPOSE
                content = authority.sign(self._secret, purpose, scope, at_us, b"")
                sql.execute(_SEND, (CANARY, content.decode()))
        except CDCError as error:
            if sql.closed:
                raise
            self.findings = [note("canary", f"no canary is sent: {error.what}", _FIX)]

    def pause(self, left: float) -> float:
        """Return how long to wait, when something else is due after `left` seconds."""
        if not self.seconds:
            return left
        return max(0.0, min(left, self._sent_at + self.seconds - time.monotonic()))
