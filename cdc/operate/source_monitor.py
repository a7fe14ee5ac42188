"""Watch the source in the background, for what the stream does not report.

Such as a table that left the publication while no table is written to; a slot that keeps ever more
WAL; the transaction that holds it back. It runs every few seconds, on a thread and a connection of
its own, which also sends the canaries: neither the loop nor a commit ever waits for these queries,
and a source that answers none of them costs only this information. What would lose changes is
raised where the loop asks; the rest are findings, for /readyz, /metrics and the log.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import (
    CDCError,
    GapError,
    InvariantError,
    gist,
)
from cdc.log import trace
from cdc.operate import retention
from cdc.operate.canary import Canary
from cdc.operate.findings import Finding, note
from cdc.operate.heartbeat import Heartbeat
from cdc.operate.retention import Gauge, Retention
from cdc.publication_look import PublicationLook
from cdc.source import catalog
from cdc.source import server as inspection
from cdc.source.connection import connect, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.records import Publication
    from cdc.operate.health import Health
    from cdc.operate.metrics import Metrics

log = logging.getLogger("cdc.operate.source_monitor")

# How long rows may be missing before it is noticed. A look costs the server milliseconds.
LOOK_SECONDS: Final = 5.0
# A catalog that is locked for longer is read the next time; so is a locked heartbeat row.
_TIMEOUTS: Final = b"SET statement_timeout = '10s'; SET lock_timeout = '2s'"


class Look(NamedTuple):
    """The result of one look."""

    timeline: int
    retention: Retention | None
    holders: list[inspection.Holder]
    findings: list[Finding]


class Watch:
    """Looks until `close`. `turn` gives the loop the results, without waiting."""

    def __init__(
        self,
        config: Config,
        known: Publication,
        health: Health,
        metrics: Metrics,
        followed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start at once; `known` is the log's record of the publication.

        `followed` is passed to `Canary`.
        """
        self._config = config
        self._known = known
        self._publication = PublicationLook(config.publication, members=True)
        self._health = health
        self._metrics = metrics
        self._gauge = Gauge()
        self._heartbeat = Heartbeat(config)
        self._canary = Canary(config, followed)
        self._connection: catalog.Connection | None = None
        self._error: CDCError | None = None
        self._seen: tuple[Publication, Publication] | None = None  # what was known, what is
        self._told: set[tuple[str, str]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cdc-watch", daemon=True)
        self._thread.start()

    def turn(self, known: Publication, adopt: Callable[[Publication], None]) -> None:
        """Raise a loss that a look found; `adopt` a publication that has grown since `known`."""
        if self._error is not None:
            raise self._error
        self._known = known
        if self._seen is not None:
            (before, now), self._seen = self._seen, None
            # A relation message may have added to it meanwhile.
            if before is known and now != known:
                adopt(now)

    def close(self) -> None:
        """Stop looking. Does not wait for a look that hangs; its thread ends after it."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with trace.span("source watch"):
                    look = self._look()
                self._take(look)
                self._between_looks()
                continue
            except GapError as error:
                self._error = error
                break
            except CDCError as error:
                # The stream notices by itself when the server is down.
                self._disconnect()
                self._tell([note("watch", f"cannot look at the source: {error.what}", error.hint)])
            except Exception as error:
                log.error("watching the source failed", exc_info=error)  # noqa: TRY400 - as above
                self._error = InvariantError(f"watching the source failed: {gist(error)}")
                break
            self._over.wait(LOOK_SECONDS)
        self._disconnect()

    def _between_looks(self) -> None:
        """Wait until the next look, and send the canaries that are due meanwhile."""
        assert self._connection is not None
        look_at = time.monotonic() + LOOK_SECONDS
        while (left := look_at - time.monotonic()) > 0:
            if self._over.wait(self._canary.pause(left)):
                break
            self._canary.send(self._connection)

    def _look(self) -> Look:
        config, known = self._config, self._known
        sql = self._connection or connect(config)
        if self._connection is None:
            with translated("limiting the time of a statement"):
                sql.execute(_TIMEOUTS)
            self._connection = sql
        since = f"within the last {LOOK_SECONDS:.0f} seconds"
        self._seen = known, self._publication.look(sql, known, since)
        server, slot = inspection.server(sql), inspection.slot(sql, config.slot)
        holders = inspection.holders(sql)
        findings = [*retention.judge_holders(holders), *self._heartbeat.due(sql)]
        self._canary.send(sql)
        findings += self._canary.findings
        kept = None
        if slot is not None:
            kept = self._gauge.observe(time.monotonic(), server.wal_lsn, slot)
            findings += retention.judge_slot(kept)
            if slot.failover:
                findings += retention.judge_standbys(inspection.standby_slots(sql, server))
        return Look(server.timeline, kept, holders, findings)

    def _take(self, look: Look) -> None:
        self._metrics.looked(look.timeline, look.retention, look.holders)
        self._tell(look.findings)

    def _tell(self, findings: list[Finding]) -> None:
        """Report the findings, and log each once while it lasts."""
        if self._over.is_set():  # another session's watch may be reporting by now
            return
        self._health.warn([each.what for each in findings])
        about = {(each.check, each.fix): each for each in findings}
        for key in about.keys() - self._told:
            log.warning(about[key].check, extra={"fields": about[key].fields()})
        self._told = set(about)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
