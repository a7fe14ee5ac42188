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
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from cdc.daemon import timing
from cdc.daemon.console import ConsoleProcess
from cdc.daemon.pipeline import Pipeline
from cdc.daemon.process_state import ProcessState
from cdc.errors import (
    CDCError,
    Exit,
    FencedError,
    Policy,
    RereadError,
    SilentError,
    SlotBusyError,
    StoppedError,
)
from cdc.log.follower_reports import REPORT_SECONDS
from cdc.operate import followers
from cdc.operate.daemon_verdict import daemon_verdict
from cdc.operate.health import HealthState
from cdc.operate.http import serve
from cdc.operate.monitor import Monitor
from cdc.operate.webhooks import WebhooksReader, WebhookStatus
from cdc.sequence.replay import HistoryError
from cdc.snapshot.initial import session

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from cdc.config import Config
    from cdc.operate.http import HttpServer

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
_LATE_SECONDS: Final = timing.STOP_SECONDS + 1.0
# How many sessions in a row must find another history than the log's: the first may be wrong.
_PROOFS: Final = 2
# A session that lasted this long resets the backoff.
_HEALTHY_SECONDS: Final = 10.0


class Daemon(ProcessState):
    """One pipeline's process."""

    def __init__(self, config: Config, config_file: Path | None = None) -> None:
        super().__init__(config, config_file)
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        self._has_streamed = False
        self._doubts = 0  # sessions in a row that found another history than the log's
        self._refused_at: float | None = None  # monotonic, by a server that had accepted us

    def to(self, state: HealthState, reason: str) -> None:
        super().to(state, reason)
        if state is HealthState.STREAMING:
            self._has_streamed, self._refused_at = True, None

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
                    self.to(HealthState.HALTED, error.what)
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
        self.metrics.initial_stage = session.take(self.config, self)
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
            self.metrics.be_standby()
            self.health.warn([])
            self.to(HealthState.STANDBY, error.what)
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
            self.to(HealthState.RECONNECTING, error.what)
            fenced = isinstance(error, FencedError)
            self.health.failed(error.what, "fencing" if fenced else "reconnect")
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
        self.pause(seconds * random.uniform(0.75, 1.25))  # noqa: S311 - jitter, not a secret

    def pause(self, seconds: float) -> None:
        """Wait, and show that the process lives; return earlier when it must stop."""
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
    with ExitStack() as closing:
        followed = followers.FollowersReader(config)
        of_followers = followers.monitored(config, followed, lambda: daemon.wal_end)
        closing.callback(of_followers.close)
        daemon.metrics.monitors["followers"] = of_followers
        daemon.metrics.followers = lambda: of_followers.newest
        daemon.followed = lambda: followed.any_running
        if config.webhooks:
            hooks = WebhooksReader(config)
            of_webhooks = Monitor[list[WebhookStatus]](
                "webhooks", REPORT_SECONDS, hooks, hooks.read, []
            )
            closing.callback(of_webhooks.close)
            daemon.metrics.monitors["webhooks"] = of_webhooks
            daemon.metrics.webhooks = lambda: of_webhooks.newest
        daemon.metrics.verdict = lambda: daemon_verdict(config, daemon.health, daemon.metrics)
        if server := serve(config.http.listen, daemon.health, daemon.metrics):
            closing.callback(server.close)
        # Loaded modules stay: a full collection that walks them would stop the stream for 20 ms.
        gc.collect()
        gc.freeze()
        if console := _console(config, config_file, server):
            closing.callback(console.close)
        return daemon.run()


def _console(
    config: Config, config_file: Path | None, server: HttpServer | None
) -> ConsoleProcess | None:
    """Start the console if one is configured."""
    if not config.console.listen or config_file is None:
        return None
    host = config.http.listen.rpartition(":")[0]
    return ConsoleProcess(config_file, f"{host}:{server.port}" if server else "")
