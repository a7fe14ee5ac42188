"""Check the source in the background for what the stream does not report.

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
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError, GapError, InvariantError, gist
from cdc.log import trace
from cdc.operate import retention
from cdc.operate.canary import Canary
from cdc.operate.findings import Finding, note
from cdc.operate.heartbeat import Heartbeat
from cdc.operate.incomplete_topics import read_incomplete
from cdc.operate.retention import Gauge
from cdc.publication.check import PublicationCheck
from cdc.source.column_changes import ColumnWatch
from cdc.source.connection import connect, translated
from cdc.source.server import open_transactions, read_server
from cdc.source.slots import read_slot, read_standby_slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.completeness import Completeness
    from cdc.log.records import PinnedPublication
    from cdc.operate.health import Health
    from cdc.operate.metrics import Metrics
    from cdc.source.connection import Connection

log = logging.getLogger("cdc.operate.source_monitor")

# How long rows may be missing before it is noticed. A check costs the server milliseconds.
CHECK_SECONDS: Final = 5.0
# A catalog that is locked for longer is read the next time; so is a locked heartbeat row.
_TIMEOUTS: Final = b"SET statement_timeout = '10s'; SET lock_timeout = '2s'"


class SourceMonitor:
    """Checks the source until `close`. `poll` gives the loop the results, without waiting."""

    def __init__(
        self,
        config: Config,
        recorded: PinnedPublication,
        health: Health,
        metrics: Metrics,
        completeness: Completeness,
        followed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start at once; `recorded` is the log's record of the publication.

        Which topics of `completeness` are captured is looked up while there are any.

        `followed` is passed to `Canary`.
        """
        self._config = config
        self._recorded = recorded
        self._publication = PublicationCheck(config.publication, members=True)
        self._health = health
        self._metrics, self._completeness = metrics, completeness
        self._gauge = Gauge()
        self._heartbeat = Heartbeat(config)
        self._canary = Canary(config, followed)
        self._columns = ColumnWatch(config)
        self._connection: Connection | None = None
        self._error: CDCError | None = None
        # What was recorded, and what is.
        self._seen: tuple[PinnedPublication, PinnedPublication] | None = None
        self._logged: set[tuple[str, str]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cdc-source-monitor", daemon=True)
        self._thread.start()

    def poll(self, recorded: PinnedPublication, adopt: Callable[[PinnedPublication], None]) -> None:
        """Raise a loss that a check found; `adopt` one that has grown since `recorded`."""
        if self._error is not None:
            raise self._error
        self._recorded = recorded
        if self._seen is not None:
            (before, now), self._seen = self._seen, None
            # A relation message may have added to it meanwhile.
            if before is recorded and now != recorded:
                adopt(now)

    def close(self) -> None:
        """Stop checking. Does not wait for a check that hangs; its thread ends after it."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with trace.span("source check"):
                    self._check()
                self._wait()
                continue
            except GapError as error:
                self._error = error
                break
            except CDCError as error:
                # The stream notices by itself when the server is down.
                self._disconnect()
                what = f"the source cannot be checked: {error.what}"
                self._report([note("source_check", what, error.hint)])
            except Exception as error:
                log.error("checking the source failed", exc_info=error)  # noqa: TRY400 - as above
                self._error = InvariantError(f"checking the source failed: {gist(error)}")
                break
            self._over.wait(CHECK_SECONDS)
        self._disconnect()

    def _wait(self) -> None:
        """Wait until the next check, and send the canaries that are due meanwhile."""
        assert self._connection is not None
        check_at = time.monotonic() + CHECK_SECONDS
        while (left := check_at - time.monotonic()) > 0:
            if self._over.wait(self._canary.pause(left)):
                break
            self._canary.send(self._connection)

    def _check(self) -> None:
        config, recorded = self._config, self._recorded
        sql = self._connection or connect(config)
        if self._connection is None:
            with translated("limiting the time of a statement"):
                sql.execute(_TIMEOUTS)
            self._connection = sql
        since = f"within the last {CHECK_SECONDS:.0f} seconds"
        self._seen = recorded, self._publication.continue_with(sql, recorded, since)
        server, slot = read_server(sql), read_slot(sql, config.slot)
        holders = open_transactions(sql)
        kept = slot and self._gauge.observe(time.monotonic(), server.wal_lsn, slot)
        findings = [*retention.judge(server, kept, holders), *self._heartbeat.write_if_due(sql)]
        self._canary.send(sql)
        findings += self._canary.findings
        if slot is not None and slot.failover:
            findings += retention.judge_standbys(read_standby_slots(sql, server))
        self._columns.announce(sql, self._completeness.newest_versions())
        incomplete = read_incomplete(sql, config, self._completeness)
        if self._over.is_set():  # another session's monitor, or daemon, may be reporting by now
            return
        self._metrics.incomplete_topics = incomplete
        self._metrics.source_checked(server.timeline, kept, holders)
        self._report(findings)

    def _report(self, findings: list[Finding]) -> None:
        """Report the findings, and log each once while it lasts."""
        if self._over.is_set():  # as above
            return
        self._health.warn(findings)
        about = {(each.check, each.fix): each for each in findings}
        for key in about.keys() - self._logged:
            log.warning(about[key].check, extra={"fields": about[key].fields()})
        self._logged = set(about)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
