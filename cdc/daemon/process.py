"""The process around the pipeline: signals, health and metrics over HTTP, and restarting sessions.

A session that fails is discarded completely and the next one starts from the resume record. The
error's policy decides whether there is a next one.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Final

from cdc.daemon import timing as pace
from cdc.daemon.pipeline import Pipeline
from cdc.errors import CDCError, Exit, Policy, RereadError, SilentError, SlotBusyError, StoppedError
from cdc.events import LSN
from cdc.log.publisher import LANES, TRANSACTION_TIMEOUT_SECONDS
from cdc.operate.followers import Watch
from cdc.operate.health import Health, State
from cdc.operate.http import serve
from cdc.operate.metrics import Metrics
from cdc.operate.readable import judge_inside
from cdc.runtime.background import Worker
from cdc.sequence.replay import HistoryError
from cdc.snapshot.initial import session as initial

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from cdc.config import Config
    from cdc.snapshot.incremental.records import LiveRecord
    from cdc.snapshot.initial.progress import Report

log = logging.getLogger("cdc.daemon.process")

# Doubles from the first to the second; jitter spreads the reconnects of daemons after one outage.
_BACKOFF_SECONDS: Final = (0.2, 10.0)
# How often a standby asks for the slot: a takeover takes about that long.
_STANDBY_SECONDS: Final = 0.5
# How often a server that refuses us is retried: some lock a role after a few failures.
SLOW_SECONDS: Final = 10.0
# How long a rotated password or certificate may take to arrive here; then a person is needed.
PATIENCE_SECONDS: Final = 900.0
# In timeouts of the walsender: with the default of a minute, a dead connection is noticed after
# eight minutes at most.
_MOST_PATIENCE: Final = 8
# A stop that takes longer ends the process: below the ten seconds that supervisors allow.
_LATE_SECONDS: Final = pace.STOP_SECONDS + 1.0
# The default of the brokers' transaction.max.timeout.ms, in seconds: they refuse more.
LONGEST_TRANSACTION_SECONDS: Final = 900
# How many sessions in a row must find another history than the log's: the first may be wrong.
_PROOFS: Final = 2
# A session that lasted this long resets the backoff.
_HEALTHY_SECONDS: Final = 10.0


class Daemon:
    """One pipeline's process."""

    def __init__(self, config: Config, config_file: Path | None = None) -> None:
        self.config = config
        self.config_file = config_file
        self.worker = Worker()
        self.snapshots = Worker(self.worker.wake_fd)  # a chunk may wait for a lock
        # Requested snapshots by id, with the keys and conditions that must not be in the log.
        self.given_snapshots: dict[str, LiveRecord] = {}
        self.lanes = [Worker(self.worker.wake_fd) for _ in range(LANES)]
        # Whether the next session gets every transaction complete, after its commit: what one
        # transaction had streamed was in doubt.
        self.reread = False
        self.patience = 1  # with a silent walsender, as a multiple of its timeout
        self.transaction_seconds = TRANSACTION_TIMEOUT_SECONDS
        self.health = Health()
        self.metrics = Metrics()
        # Whether any follower reports, even one that this process's configuration does not name.
        self.followed: Callable[[], bool] = lambda: False
        self.stopping = False
        self.stop_asked_at = 0.0
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        self._has_streamed = False
        self._doubts = 0  # sessions in a row that found another history than the log's
        self._refused_at: float | None = None  # monotonic, by a server that had accepted us

    def to(self, state: State, reason: str) -> None:
        """Enter a state, and log it once."""
        if state is not self.health.state:
            log.info(state.value, extra={"fields": {"reason": reason}})
        self.health.to(state, reason)
        self.metrics.state = state
        if state is State.STREAMING:
            self._has_streamed, self._refused_at = True, None

    @property
    def wal_end(self) -> LSN | None:
        """The server's WAL end, while it is streamed."""
        streaming = self.health.state is State.STREAMING
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
        self.to(State.SNAPSHOTTING, reason)
        self.health.snapshotting(report)
        self.metrics.snapshot = report or self.metrics.snapshot

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Stop after what is in flight; on the second call, at once."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        self.stop_asked_at = time.monotonic()
        self.worker.wake()
        # A server that accepts the connection and never answers delays a start until its timeout.
        # Being killed is safe at any moment, and this gives the better exit code.
        late = threading.Timer(_LATE_SECONDS, os._exit, (int(Exit.OK),))
        late.daemon = True
        late.start()

    def run(self) -> Exit:
        """Run sessions until a stop, or until an error needs a person; return the exit code."""
        while not self.stopping:
            began_at = time.monotonic()
            try:
                self._session()
            except StoppedError:
                break
            except CDCError as error:
                if not self._goes_on(error):
                    self.to(State.HALTED, error.what)
                    log.error("halted", extra={"fields": {"error": error.what, "hint": error.hint}})  # noqa: TRY400 - the sentence is the message
                    return error.exit_code
                self.reread = isinstance(error, RereadError)
                self._start_over(error, time.monotonic() - began_at)
        log.info("stopped")
        return Exit.OK

    def _goes_on(self, error: CDCError) -> bool:
        """Return whether there is a next session after this error."""
        if isinstance(error, HistoryError):
            self._doubts += 1
            return self._doubts < _PROOFS
        if error.policy is not Policy.SLOW:
            return error.policy is not Policy.HALT
        if self._refused_at is None:
            self._refused_at = time.monotonic()
        patient = time.monotonic() - self._refused_at < PATIENCE_SECONDS
        return self._has_streamed and patient

    def _session(self) -> None:
        self.metrics.initial_stage = initial.take(self.config, self)
        pipeline = Pipeline(self.config, self)
        try:
            pipeline.start()
            pipeline.run()
        finally:
            if pipeline.proven:
                self._doubts = 0
            pipeline.close()

    def _start_over(self, error: CDCError, lasted_seconds: float) -> None:
        """Wait before the next session: briefly for a busy slot, else with growing backoff."""
        if isinstance(error, SlotBusyError):
            self.to(State.STANDBY, error.what)
            seconds = _STANDBY_SECONDS
        else:
            if lasted_seconds > _HEALTHY_SECONDS:
                self._backoff_seconds = _BACKOFF_SECONDS[0]
            seconds = self._backoff_seconds
            self._backoff_seconds = min(2 * seconds, _BACKOFF_SECONDS[1])
            if isinstance(error, RereadError):
                seconds = 0.0  # nothing has to recover
            if error.policy is Policy.SLOW:
                seconds = SLOW_SECONDS
            self.to(State.RECONNECTING, error.what)
            self.health.failed(error.what)
            # A walsender that encodes a row of hundreds of megabytes sends nothing meanwhile: with
            # the same patience in each session that row would never be read.
            silent = isinstance(error, SilentError)
            self.patience = min(2 * self.patience, _MOST_PATIENCE) if silent else 1
            self.metrics.reconnected(type(error).__name__)
            log.log(
                logging.ERROR if error.policy is Policy.SLOW else logging.WARNING,
                "starting over",
                extra={"fields": {"error": error.what, "hint": error.hint, "in_seconds": seconds}},
            )
        self._sleep(seconds * random.uniform(0.75, 1.25))  # noqa: S311 - jitter, not a secret

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self.worker.wake_fd, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not self.stopping and (left := deadline - time.monotonic()) > 0:
            self.health.beat()
            poll.poll(left * 1_000)
            self.worker.drain()


def run(config: Config, config_file: Path | None = None) -> Exit:
    """Run the daemon until a signal stops it; return the exit code."""
    daemon = Daemon(config, config_file)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, daemon.stop)
    watch = Watch(config, lambda: daemon.wal_end)
    daemon.metrics.followers = lambda: watch.standings
    daemon.followed = lambda: watch.anyone
    daemon.metrics.verdict = lambda: judge_inside(config, daemon.health, daemon.metrics)
    server = serve(config.http.listen, daemon.health, daemon.metrics)
    # Loaded modules stay: a full collection that walks them would stop the stream for 20 ms.
    gc.collect()
    gc.freeze()
    try:
        return daemon.run()
    finally:
        watch.close()
        if server:
            server.close()
