"""The daemon's health: what it is doing, whether its loop runs, and whether the log advances.

Two questions, as orchestrators ask them. *Live*: the main loop has beaten within `LIVE_SECONDS`; if
not, the process is stuck and should be killed. *Ready*: it streams, or copies the initial snapshot,
or stands by for the daemon that does, and the log is not stalled. It is stalled when Kafka has not
committed a batch for `BATCH_SECONDS`, or when, for `STALL_SECONDS`, the server's WAL end has been
above the published LSN while neither that LSN nor `seq` moved: an idle database is not a stall (its
keepalives move the published LSN), nor is one huge transaction (its changes move `seq`). A snapshot
is stalled when no row was copied for `STALL_SECONDS`.

The pipeline's thread writes, HTTP threads read; one lock makes every answer consistent.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from cdc.events import LSN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cdc.operate.findings import Finding
    from cdc.snapshot.initial.progress import Report

# Longer than any single step of the loop, shorter than an operator would wait.
LIVE_SECONDS = 30.0
# Longer than a broker's restart; wal_sender_timeout is the same.
STALL_SECONDS = 60.0
# Longer than a cluster takes to elect another leader for a dead broker's partitions; a batch takes
# less than a second.
BATCH_SECONDS = 15.0
# Sessions that ended and are still shown: a night of them, while a broker restarts.
_INCIDENTS = 50


class HealthState(Enum):
    STARTING = "starting"
    STANDBY = "standby"  # another daemon holds the slot
    SNAPSHOTTING = "snapshotting"  # copying the tables' existing rows, before it streams
    STREAMING = "streaming"
    RECONNECTING = "reconnecting"
    HALTED = "halted"  # stopped by an error that needs a person


class HealthReport(NamedTuple):
    """One consistent answer, for `/livez` and `/readyz`."""

    live: bool
    ready: bool
    state: HealthState
    reason: str
    since_seconds: float  # in this state
    beat_age_seconds: float
    lag_bytes: int
    published_lsn: LSN
    wal_end_lsn: LSN
    seq: int
    snapshot: Report | None = None  # while and after this process takes the initial one
    warnings: tuple[str, ...] = ()  # what will fail if ignored; not ready is worse
    failures: int = 0  # sessions in a row that ended with an error and published nothing
    failing_seconds: float | None = None  # since the first of them ended
    error: str = ""  # why the last one ended
    remedies: tuple[str, ...] = ()  # of the warnings, one each
    incidents: tuple[dict[str, object], ...] = ()  # the newest sessions that ended, oldest first

    def body(self) -> dict[str, object]:
        fields: dict[str, object] = self._asdict()
        fields |= {"state": self.state.value}
        fields |= {"snapshot": self.snapshot and self.snapshot.body()}
        fields |= {name: str(fields[name]) for name in ("published_lsn", "wal_end_lsn")}
        rounded = ("since_seconds", "beat_age_seconds", "failing_seconds")
        fields |= {n: round(v, 3) for n in rounded if (v := getattr(self, n)) is not None}
        return fields


class Health:
    """The state machine for `/livez` and `/readyz`: thread-safe, never waiting."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._state = HealthState.STARTING
        self._reason = "starting"
        self._since = self._beat_at = self._moved_at = now()
        self._published = LSN(0)
        self._wal_end = LSN(0)
        self._seq = 0
        self._batch_at = math.inf
        self._snapshot: Report | None = None
        self._warned: tuple[tuple[str, str], ...] = ()  # what, and its remedy
        self._failures = 0
        self._failing_at = 0.0
        self._error = ""
        self._incidents = deque[dict[str, object]](maxlen=_INCIDENTS)

    @property
    def state(self) -> HealthState:
        return self._state

    def beat(self) -> None:
        """Note that the main loop runs. Call it on every iteration, also while reconnecting."""
        self._beat_at = self._now()

    def to(self, state: HealthState | str, reason: str = "") -> None:
        """Enter `state` for `reason`, a sentence for an operator."""
        state = HealthState(state)
        with self._lock:
            now = self._beat_at = self._now()
            if state is not self._state:
                self._since = now
                # A new connection gets the full time to move the log.
                self._moved_at = now
            self._state = state
            self._reason = reason or state.value

    def progress(
        self, wal_end_lsn: int, published_lsn: int, seq: int, batch_seconds: float = 0.0
    ) -> None:
        """Note how far the server's WAL and the log are, on an iteration of the main loop.

        `batch_seconds` is how long Kafka has had a batch that it has not committed yet.
        """
        with self._lock:
            self._beat_at = self._now()
            self._batch_at = self._beat_at - batch_seconds if batch_seconds else math.inf
            moved = published_lsn > self._published or seq > self._seq
            # A session's initial values are not progress: only what it publishes is.
            if self._published and moved:
                self._failures = 0
            if moved or published_lsn >= wal_end_lsn:
                self._moved_at = self._beat_at
            self._published, self._wal_end = LSN(published_lsn), LSN(wal_end_lsn)
            self._seq = seq

    def snapshotting(self, snapshot: Report | None) -> None:
        """Note the progress of the initial snapshot; None while it has not started to copy."""
        with self._lock:
            self._beat_at = self._now()
            rows = self._snapshot.rows if self._snapshot else -1
            if snapshot is not None and snapshot.rows != rows:
                self._moved_at = self._beat_at
                self._failures = 0 if snapshot.rows > rows >= 0 else self._failures
            self._snapshot = snapshot or self._snapshot

    def failed(self, error: str, kind: str = "reconnect") -> None:
        """Note that a session has ended with an error, and that another one follows."""
        with self._lock:
            at_us = time.time_ns() // 1_000
            self._incidents.append({"at_us": at_us, "kind": kind, "what": error})
            if not self._failures:
                self._failing_at = self._now()
            self._failures += 1
            self._error = error

    def warn(self, findings: Iterable[Finding]) -> None:
        """Set the warnings in the report; they replace the earlier ones."""
        self._warned = tuple((each.what, each.fix) for each in findings)

    def report(self) -> HealthReport:
        with self._lock:
            now = self._now()
            beat_age = now - self._beat_at
            live = beat_age <= LIVE_SECONDS
            reason = self._reason
            streaming = self._state is HealthState.STREAMING
            refused = streaming and now - self._batch_at > BATCH_SECONDS
            stalled = (
                streaming
                and self._published < self._wal_end
                and now - self._moved_at > STALL_SECONDS
            )
            if self._state is HealthState.SNAPSHOTTING:
                stalled = now - self._moved_at > STALL_SECONDS
            elif refused:
                reason = f"Kafka has not taken a batch for {now - self._batch_at:.0f} s"
            elif stalled:
                reason = (
                    f"nothing was published for {now - self._moved_at:.0f} s "
                    "while the source's WAL is ahead"
                )
            if not live:
                reason = f"the main loop has not turned for {beat_age:.0f} s"
            at_work = self._state in (
                HealthState.STREAMING,
                HealthState.STANDBY,
                HealthState.SNAPSHOTTING,
            )
            return HealthReport(
                live=live,
                ready=live and at_work and not stalled and not refused,
                state=self._state,
                reason=reason,
                since_seconds=now - self._since,
                beat_age_seconds=beat_age,
                lag_bytes=max(0, self._wal_end - self._published),
                published_lsn=self._published,
                wal_end_lsn=self._wal_end,
                seq=self._seq,
                snapshot=self._snapshot,
                warnings=tuple(what for what, _ in self._warned),
                remedies=tuple(fix for _, fix in self._warned),
                failures=self._failures,
                failing_seconds=now - self._failing_at if self._failures else None,
                error=self._error if self._failures else "",
                incidents=tuple(self._incidents),
            )
