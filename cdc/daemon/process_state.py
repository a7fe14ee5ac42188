"""What the sessions of one process share: its workers, its health, and whether it is to stop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from cdc.events import LSN
from cdc.log.publisher import PRODUCERS, TRANSACTION_TIMEOUT_SECONDS
from cdc.operate.health import Health, HealthState
from cdc.operate.metrics import Metrics
from cdc.runtime.background import BackgroundThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cdc.config import Config
    from cdc.snapshot.incremental.records import IncrementalRecord
    from cdc.snapshot.initial.progress import Report

log = logging.getLogger("cdc.daemon.process")

# The default of the brokers' transaction.max.timeout.ms, in seconds: they refuse more.
LONGEST_TRANSACTION_SECONDS: Final = 900


class ProcessState:
    """Lives as long as the process: what a session leaves to the next one is here."""

    def __init__(self, config: Config, config_file: Path | None = None) -> None:
        self.config = config
        self.config_file = config_file
        self.worker = BackgroundThread()
        self.snapshots = BackgroundThread(self.worker.wake_fd)  # a chunk may wait for a lock
        # Requested snapshots by id, with the keys and conditions that must not be in the log.
        self.given_snapshots: dict[str, IncrementalRecord] = {}
        self.producer_workers = [BackgroundThread(self.worker.wake_fd) for _ in range(PRODUCERS)]
        # Whether the next session gets every transaction complete, after its commit: what one
        # transaction had streamed was in doubt.
        self.reread = False
        self.patience = 1  # with a silent walsender, as a multiple of its timeout
        self.transaction_seconds = TRANSACTION_TIMEOUT_SECONDS
        self.health = Health()
        self.metrics = Metrics()
        self.metrics.pipeline = config.pipeline
        # Whether any follower reports, even one that this process's configuration does not name.
        self.followed: Callable[[], bool] = lambda: False
        self.stopping = False
        self.stop_asked_at = 0.0  # monotonic

    def to(self, state: HealthState, reason: str) -> None:
        """Enter a state, and log it once."""
        if state is not self.health.state:
            log.info(state.value, extra={"fields": {"reason": reason}})
        self.health.to(state, reason)
        self.metrics.state = state

    @property
    def wal_end(self) -> LSN | None:
        """The server's WAL end, while it is streamed."""
        streaming = self.health.state is HealthState.STREAMING
        return LSN(self.metrics.wal_end_lsn) if streaming else None

    def transaction_took(self, seconds: float) -> None:
        """Note how long a dead letter has kept its Kafka transaction open.

        The broker aborts a transaction that is open for too long. If a letter takes long to send,
        the next session may keep its transactions open for longer: else it would retry forever.
        """
        if seconds > self.transaction_seconds / 2:
            longest = LONGEST_TRANSACTION_SECONDS
            self.transaction_seconds = min(4 * self.transaction_seconds, longest)

    def beat(self) -> None:
        """Note that the loop is alive."""
        self.health.beat()

    def snapshotting(self, reason: str, report: Report | None = None) -> None:
        """Note what the initial snapshot is doing, and how far it is."""
        self.to(HealthState.SNAPSHOTTING, reason)
        self.health.snapshotting(report)
        self.metrics.snapshot = report or self.metrics.snapshot
