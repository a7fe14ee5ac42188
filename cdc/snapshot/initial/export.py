"""Get an exported snapshot that the log can start with: wait for it, and report what blocks it.

Its consistent point must be at or after the end of the log, since the pipeline's own slot keeps the
WAL from there; the server must be the one that the log comes from, or a standby of it; and every
process that takes part in the snapshot must reach the same server.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError, ConfigError, StoppedError
from cdc.publication import continuity
from cdc.source import catalog
from cdc.source.connection import connect
from cdc.source.export import STANDBY_MAJOR, Export, log_standby_snapshot
from cdc.source.pinned import connect_for_rows
from cdc.source.server import OpenTransaction, open_transactions
from cdc.source.stream import identify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.snapshot.initial.host import Background, HostProcess
    from cdc.source.connection import Connection
    from cdc.source.timelines import System

log = logging.getLogger("cdc.snapshot")

# How often the wait's reason is logged.
_LOG_SECONDS: Final = 5.0
# How often a standby that lags is checked again.
_LAG_SECONDS: Final = 1.0
# How often a primary is asked to log its running transactions, without which a standby waits.
_NOTE_SECONDS: Final = 1.0


def prove(
    config: Config, primary: Connection, resume: tuple[ResumeIdentity, ResumePosition]
) -> System:
    """Return which system the source is; raise where its changes would not continue the log."""
    identity, position = resume
    continuity.require_same_writer(config, identity)
    with connect(config, replication=True) as walsender:
        system = identify(walsender)
    source = catalog.read_state(primary, config, identity.publication)
    continuity.require_same_source(config, identity, position, system, source)
    return system


class Exporting:
    """Creates an export in the background; the host stays able to stop."""

    def __init__(
        self, config: Config, host: HostProcess, background: Background, primary: Connection
    ) -> None:
        self._config, self._host, self._background = config, host, background
        self._primary = primary
        self._logged_at = self._noted_at = 0.0

    @contextmanager
    def lock(self) -> Iterator[Export]:
        """Connect, and hold the exported snapshot until the end of the block."""
        export = self._background(lambda: Export(self._config))
        try:
            yield export
        finally:
            with suppress(CDCError):
                export.close()

    def create(self, export: Export, system: System, position: ResumePosition) -> None:
        """Export a snapshot at or after the log's end. Raises SlotBusyError, ConfigError."""
        self._check(export, system)
        while True:
            self._logged_at = time.monotonic()
            self._host.snapshotting("waiting for a consistent point")
            try:
                self._background(export.create, lambda: self._wait(export))
            except StoppedError:
                export.cancel()
                raise
            with connect_for_rows(self._config) as other:
                self._background(lambda: export.check_same_server(other))
            if export.lsn >= position.end_lsn:
                return
            self._lags(export, position)
            self._background.pause(_LAG_SECONDS)
            self._background(export.reopen)

    def _check(self, export: Export, system: System) -> None:
        config = self._config
        if export.who.in_recovery and export.major < STANDBY_MAJOR:
            raise ConfigError(
                f"snapshot.dsn leads to a standby of Postgres {export.major}; standbys make logical"
                f" slots from {STANDBY_MAJOR} on",
                hint="remove snapshot.dsn: the snapshot is read from the primary then",
            )
        if export.system[:2] != system[:2]:
            raise ConfigError(
                f"snapshot.dsn leads to system {export.system.identifier}, timeline"
                f" {export.system.timeline}; source.dsn to {system.identifier}, timeline"
                f" {system.timeline}",
                hint="name a standby of the very server that source.dsn names",
            )
        if config.snapshot.dsn is None:
            export.check_same_server(self._primary)

    def _lags(self, export: Export, position: ResumePosition) -> None:
        what = f"the standby is at {export.lsn}, the log begins at {position.end_lsn}: waiting"
        self._host.snapshotting(what)
        log.info("waiting for the standby", extra={"fields": {"reason": what}})

    def _wait(self, export: Export) -> None:
        """While the slot is being created: help a standby, and report what blocks it."""
        now = time.monotonic()
        if export.who.in_recovery and now - self._noted_at >= _NOTE_SECONDS:
            self._noted_at = now
            log_standby_snapshot(self._primary)
        if now - self._logged_at < _LOG_SECONDS:
            return
        self._logged_at = now
        reason = waited_for(open_transactions(self._primary))
        self._host.snapshotting(reason)
        log.info("waiting for a consistent point", extra={"fields": {"reason": reason}})


def waited_for(holders: list[OpenTransaction]) -> str:
    """Return in words what a consistent point waits for."""
    if not holders:
        return "waiting for a consistent point"
    oldest = holders[0]
    who = f"pid {oldest.pid}" if oldest.prepared is None else f"prepared {oldest.prepared!r}"
    many = f"{len(holders)} transactions that write" if len(holders) > 1 else "a transaction"
    age = f", {oldest.age_seconds or 0:.0f} s"
    return f"waiting for {many} to end; the oldest: {who}{age}"
