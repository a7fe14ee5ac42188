"""Run a follower: one session after another, with retries, and report its state.

A session opens the store, follows from its frontier, and ends with an error or because it was asked
to stop. The only recovery is the next session. After a temporary error it starts after a growing
backoff; an error that needs a person halts this follower and no other. A standby copy starts its
session once no other copy is active (`jobs.apply.standby`), and reports nothing before.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from contextlib import suppress
from textwrap import indent
from typing import TYPE_CHECKING, Final, Literal, cast

from cdc.errors import (
    CDCError,
    Exit,
    GapError,
    InvariantError,
    Policy,
    StoppedError,
    StoreLostError,
)
from cdc.events import LSN
from cdc.log.follower_reports import REPORT_SECONDS, FollowerRecord, Reports, read
from cdc.runtime.bugs import where
from lockstep.jobs.apply.standby import MARK, AnotherCopyError, Standby
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.follower_reports import FollowerState, TableCommit, ViewWork
    from lockstep.sinks.contract import Sink

Stage = Literal["started", "opened", "caught up"]

log = logging.getLogger("lockstep.jobs.follow")

BACKOFF_SECONDS: Final = (0.5, 30.0)
# Seconds between retries when a server that accepted us before refuses us.
_SLOW_SECONDS: Final = 30.0
# With more lag than this many seconds the follower is catching up.
_LAGGING_SECONDS: Final = 10.0
_TICK_SECONDS: Final = 0.5
# Seconds between two looks of a standby at the reports of other copies.
_STANDBY_SECONDS: Final = 0.5
# A stop does not wait longer for an unavailable broker: supervisors kill after ten seconds.
_FLUSH_SECONDS: Final = 5.0


def now_us() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1_000


class FollowerProgress:
    """What a follower has done since its job started, for its reports."""

    def __init__(self) -> None:
        self.events = self.batches = self.errors = 0
        self.tables: set[str] = set()
        self.views: dict[str, ViewWork] = {}
        # When (monotonic) the first session began, had opened the store, and had applied all that
        # was in the log then.
        self.reached: dict[Stage, float] = {}
        self.events_per_second = self.batch_seconds = 0.0
        self.canary_at_us: int | None = None
        self.began_at_us = self.moved_at_us = now_us()
        self.failing_since_us: int | None = None
        self._window = (time.monotonic(), 0)

    def batch(self, events: int, tables: set[str], seconds: float, canary: int | None) -> None:
        """Count a batch."""
        self.moved_at_us = now_us()
        self.events += events
        self.batches += 1
        self.tables |= tables
        self.batch_seconds = round(seconds, 3)
        self.canary_at_us = max(filter(None, (canary, self.canary_at_us)), default=None)
        began, before = self._window
        if (lasted := time.monotonic() - began) >= REPORT_SECONDS:
            self.events_per_second = round((self.events - before) / lasted, 1)
            self._window = (time.monotonic(), self.events)

    def reach(self, stage: Stage) -> None:
        """Note when a stage was reached, the first time."""
        self.reached.setdefault(stage, time.monotonic())

    def error(self) -> None:
        """Count an error."""
        self.errors += 1
        self.failing_since_us = self.failing_since_us or now_us()


class FollowerRun:
    """Runs one follower in this job. Calls `session` until it is asked to stop."""

    def __init__(
        self,
        config: Config,
        name: str,
        store: str,
        session: Callable[[FollowerRun], None],
        *,
        quiet: bool = False,
        repair: Callable[[FollowerRun, Sink, StoreLostError], None] | None = None,
        standby_seconds: float | None = None,
        remedy: Callable[[CDCError], CDCError] = lambda error: error,
    ) -> None:
        """`quiet`: write no reports, because this is a shadow build.

        `repair` replaces what a store has lost, alongside what is left of it. `standby_seconds`: be
        a standby, until the active copy is silent for so long. `remedy` adds to an error that needs
        a person what else there is to do.
        """
        self.config, self.name, self.store = config, name, store
        self.progress = FollowerProgress()
        self.stopping = threading.Event()
        # A standby reports nothing, so it must not be `starting` before it has read any report.
        self.state: FollowerState | Literal["standby"] = (
            "starting" if standby_seconds is None else "standby"
        )
        self.applied: Applied | None = None
        self.had_lsn: LSN | None = None  # for a store that lost a part: the LSN that it had
        self.commit: TableCommit | None = None  # of the archive's table
        self.exit = Exit.OK
        self._session = session
        self.repair = repair
        self._remedy = remedy
        self.error: CDCError | None = None
        self._reports: Reports | None = None
        self.reported: FollowerRecord | None = None  # the last report before this session
        self.is_shadow = quiet
        self._reported_at = 0.0
        self._lock = threading.Lock()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        self._standby: Standby | None = None
        if standby_seconds is not None:
            self._owner += MARK
            self._standby = Standby(config, name, self._owner, standby_seconds)
        self.is_standby = standby_seconds is not None
        self._gives_way = False
        self._backoff_seconds = BACKOFF_SECONDS[0]
        self._has_applied = False

    def run(self) -> Exit:
        """Run sessions until asked to stop, or until an error needs a person; return its code."""
        ticking = threading.Thread(target=self._tick, name=f"reports-{self.name}", daemon=True)
        ticking.start()
        while self._is_active():
            self.progress.reach("started")
            error = self.take_turn()
            if self._gives_way:
                continue
            if error is None or (self.stopping.is_set() and self._continues_after(error)):
                break
            self.progress.error()
            if not self._continues_after(error):
                self.exit = Exit(error.exit_code)
                error = self._remedy(error)
                # Another process can do what this one cannot: it, or a standby, continues.
                self.to("stopped" if self.exit is Exit.TEMPORARY else "halted", error)
                log.error("%s halted: %s\n  what to do: %s", self.name, error.what, error.hint)
                break
            self._wait(error)
        if self.state not in {"halted", "standby"} and self.exit is Exit.OK:
            self.to("stopped")
        self.stopping.set()
        ticking.join()
        if self._standby is not None:
            self._standby.close()
        if self._reports is not None:
            with suppress(CDCError):
                self._reports.flush(_FLUSH_SECONDS)
        return self.exit

    def _is_active(self) -> bool:
        """Return False once asked to stop; a standby returns True once no other copy is active."""
        standby = self._standby
        if standby is None:
            return not self.stopping.is_set()
        while self._gives_way or not standby.is_free():
            self._gives_way = False
            self.to("standby")
            if self.stopping.wait(_STANDBY_SECONDS):
                return False
        if self.state == "standby":
            self.to("starting")
        return not self.stopping.is_set()

    def take_turn(self) -> CDCError | None:
        """Run a session; return the error that ended it, None if it was asked to stop."""
        try:
            self._session(self)
        except (StoppedError, AnotherCopyError):
            return None
        except CDCError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the other followers continue
            text = "%s: this is a bug in Lockstep: report it with these lines\n%s"
            log.error(text, self.name, indent(where(error), "  "))  # noqa: TRY400 - its text may contain values
            about = "".join(f", in {note}" for note in getattr(error, "__notes__", ()))
            return InvariantError(f"a bug: {type(error).__name__}{about}")
        return None

    def stop(self) -> None:
        """Stop after the current batch."""
        self.stopping.set()

    def to(self, state: FollowerState | Literal["standby"], error: CDCError | None = None) -> None:
        """Enter a state; report it if it changed."""
        if (state, error) != (self.state, self.error):
            if error is None and state != self.state:
                log.debug("%s: %s", self.name, state)  # the job prints it
            if state in {"following", "catching_up"}:  # the store is open, and the log is read
                self.progress.failing_since_us = None
            self.state, self.error = state, error
            self.report()

    def polled(self) -> None:
        """Record that a session has polled its source and found nothing to apply yet."""
        self._expect_no_other()
        self.progress.reach("caught up")
        if self.state not in {"following", "catching_up"}:
            self._backoff_seconds = BACKOFF_SECONDS[0]
            self.to("following")

    def opened_at(self, applied: Applied) -> None:
        """Record the store's frontier at a session's start."""
        self.applied, self.had_lsn = applied, None

    def opened_at_no_frontier(self, generation: int) -> None:
        """Record that the store must not be relied on before the first batch is applied."""
        self.applied = Applied.beginning(self.config.pipeline, generation)
        self.had_lsn = _had_lsn(self.reported)

    def has_applied(
        self, applied: Applied, events: int, tables: set[str], seconds: float, canary: int | None
    ) -> None:
        """Record a batch that the store has applied, and report it."""
        self.applied, self.had_lsn = applied, None
        self._has_applied = True
        self._backoff_seconds = BACKOFF_SECONDS[0]
        self.progress.batch(events, tables, seconds, canary)
        # If nothing writes to the source, only canaries are new.
        newest_us = max(applied.committed_at_us, canary or 0)
        late = events > 0 and time.time() - newest_us / 1e6 > _LAGGING_SECONDS
        state: FollowerState = "catching_up" if late else "following"
        if (state, None) != (self.state, self.error):
            self.to(state)
        else:
            self.report()
        self._expect_no_other()

    def _expect_no_other(self) -> None:
        """Raise AnotherCopyError if this copy gives way to another: its session ends."""
        if self._gives_way:
            raise AnotherCopyError

    def report(self) -> None:
        """Write a report; log a warning if that fails."""
        if self.is_shadow or self.state == "standby":
            return
        with self._lock:
            self._reported_at = time.monotonic()
            try:
                if self._reports is None:
                    reports = Reports(self.config)
                    self.read_report()
                    self._reports = reports
                self._reports.write(self._record(self.applied or self._last_reported()))
            except CDCError as error:
                log.warning("%s: a report was not written: %s", self.name, error.what)

    def read_report(self) -> FollowerRecord | None:
        """Return the follower's newest report, from any process."""
        self.reported = read(self.config).get(self.name)
        return self.reported

    def _last_reported(self) -> Applied:
        """Return the last report's frontier: until the store is opened nothing newer is known."""
        known = self.reported
        if known is None or known.state == "rebuilding":
            return Applied.beginning(self.config.pipeline, known.generation if known else 0)
        return Applied(
            known.pipeline,
            known.generation,
            known.epoch,
            known.lsn,
            known.seq,
            known.committed_at_us,
            known.place,
            {},
        )

    def _record(self, at: Applied) -> FollowerRecord:
        error, progress, known = self.error, self.progress, self.reported
        # Until this job reads a canary, keep the last reported one of the same generation.
        same = known is not None and known.generation == at.generation
        canary = progress.canary_at_us or (known.canary_at_us if known and same else None)
        commit = self.commit or (known.commit if known and same else None)
        return FollowerRecord(
            pipeline=self.config.pipeline,
            follower=self.name,
            store=self.store,
            generation=at.generation,
            state=self._reported_state(),
            epoch=at.epoch,
            lsn=LSN(at.lsn),
            seq=at.seq,
            committed_at_us=at.committed_at_us,
            place=at.place,
            had_lsn=self.had_lsn if self.applied else _had_lsn(known),
            tables=len(progress.tables),
            events=progress.events,
            batches=progress.batches,
            errors=progress.errors,
            events_per_second=progress.events_per_second,
            batch_seconds=progress.batch_seconds,
            canary_at_us=canary,
            began_at_us=progress.began_at_us,
            moved_at_us=progress.moved_at_us,
            failing_since_us=progress.failing_since_us,
            views=progress.views,
            commit=commit,
            what=error.what if error else "",
            hint=error.hint if error else "",
            owner=self._owner,
            at_us=now_us(),
        )

    def _reported_state(self) -> FollowerState:
        """Return the state; one that is starting is still `rebuilding` if that was reported."""
        if self.state not in {"starting", "standby"}:
            return cast("FollowerState", self.state)
        known = self.reported
        is_rebuilding = self.applied is None and known is not None and known.state == "rebuilding"
        return "rebuilding" if is_rebuilding else "starting"

    def _tick(self) -> None:
        while not self.stopping.wait(_TICK_SECONDS):
            if time.monotonic() - self._reported_at >= REPORT_SECONDS - _TICK_SECONDS:
                self.report()
            if self._standby is not None and self.state in {"following", "catching_up"}:
                self._gives_way = self._standby.gives_way()

    def _continues_after(self, error: CDCError) -> bool:
        if error.policy is Policy.SLOW:
            return self._has_applied
        return error.policy is not Policy.HALT

    def _wait(self, error: CDCError) -> None:
        """Wait before the next session, with a backoff that grows until a batch is applied."""
        seconds = self._backoff_seconds
        self._backoff_seconds = min(2 * seconds, BACKOFF_SECONDS[1])
        if error.policy is Policy.SLOW:
            seconds = _SLOW_SECONDS
        self.to("rebuilding" if isinstance(error, StoreLostError) else "waiting", error)
        log.warning("%s: %s; continues in %.1f s", self.name, error.what, seconds)
        self.stopping.wait(seconds * random.uniform(0.75, 1.25))  # noqa: S311 - jitter, not a secret


def _had_lsn(known: FollowerRecord | None) -> LSN | None:
    """Return the LSN that the store had by the last report, if it must not be relied on."""
    if known is None:
        return None
    return known.had_lsn or (known.lsn if known.state == "rebuilding" and known.lsn else None)


def with_remedy(error: CDCError, name: str, cut: str) -> CDCError:
    """Return a gap with its cut and the repair command; return any other error unchanged."""
    if not isinstance(error, GapError):
        return error
    return type(error)(
        f"{error.what} ({cut})",
        hint=f"{error.hint}. Nothing of it was written. `cdc rebuild {name}` builds the follower"
        " again, from the log or a snapshot",
    )
