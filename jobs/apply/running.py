"""Run a follower: one session after another, with retries, and report its state.

A session opens the store, follows from its frontier, and ends with an error or because it was asked
to stop. The only recovery is the next session. After a temporary error it starts after a growing
backoff; an error that needs a person halts this follower and no other.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cdc.errors import (
    CDCError,
    ConfigError,
    Exit,
    GapError,
    InvariantError,
    Policy,
    StoppedError,
    StoreLostError,
    UnavailableError,
)
from cdc.events import LSN
from cdc.log.follower_reports import REPORT_SECONDS, FollowerRecord, Reports, read
from cdc.runtime.bugs import where
from jobs.apply.applying import TornError
from jobs.apply.refilling import refuse_unfillable
from jobs.generations.rebuilding import STILL
from sinks.contract import Applied, Mountable, Standing

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.follower_reports import FollowerState
    from sinks.contract import Generations

log = logging.getLogger("jobs.follow")

_BACKOFF_SECONDS: Final = (0.5, 30.0)
# Seconds between retries when a server that accepted us before refuses us.
_SLOW_SECONDS: Final = 30.0
# With more lag than this many seconds the follower is catching up.
_BEHIND_SECONDS: Final = 10.0
_TICK_SECONDS: Final = 0.5
# A stop does not wait longer for an unavailable broker: supervisors kill after ten seconds.
_FLUSH_SECONDS: Final = 5.0
# Seconds before a store is checked again for something missing, before it counts as lost.
_SURE_SECONDS: Final = 2.0


def now_us() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1_000


class Progress:
    """What a follower has done since its job started, for its reports."""

    def __init__(self) -> None:
        self.events = self.batches = self.errors = 0
        self.tables: set[str] = set()
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

    def error(self) -> None:
        """Count an error."""
        self.errors += 1
        self.failing_since_us = self.failing_since_us or now_us()


class Run:
    """Runs one follower in this job. Calls `session` until it is asked to stop."""

    def __init__(
        self,
        config: Config,
        name: str,
        store: str,
        session: Callable[[Run], None],
        *,
        quiet: bool = False,
    ) -> None:
        """`quiet`: write no reports, because this is a shadow build."""
        self.config, self.name, self.store = config, name, store
        self.progress = Progress()
        self.stopping = threading.Event()
        self.state: FollowerState = "starting"
        self.applied: Applied | None = None
        self.had_lsn: LSN | None = None  # for a store that lost a part: the LSN that it had
        self.exit = Exit.OK
        self._session = session
        self.error: CDCError | None = None
        self._reports: Reports | None = None
        self._known: FollowerRecord | None = None  # the last report before this session
        self.is_aside = quiet
        self._reported_at = 0.0
        self._lock = threading.Lock()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        self._has_applied = False

    def run(self) -> Exit:
        """Run sessions until asked to stop, or until an error needs a person; return its code."""
        ticking = threading.Thread(target=self._tick, name=f"reports-{self.name}", daemon=True)
        ticking.start()
        while not self.stopping.is_set():
            error = self._turn()
            if error is None or (self.stopping.is_set() and self._goes_on(error)):
                break
            self.progress.error()
            if not self._goes_on(error):
                self.exit = Exit(error.exit_code)
                self.to("halted", error)
                log.error("%s halted: %s\n  what to do: %s", self.name, error.what, error.hint)
                break
            self._wait(error)
        if self.state != "halted":
            self.to("stopped")
        self.stopping.set()
        ticking.join()
        if self._reports is not None:
            with suppress(CDCError):
                self._reports.flush(_FLUSH_SECONDS)
        return self.exit

    def _turn(self) -> CDCError | None:
        """Run a session; return the error that ended it, None if it was asked to stop."""
        try:
            self._session(self)
        except StoppedError:
            return None
        except CDCError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            told = "%s: this is a bug in Lockstep: report it with these lines\n%s"
            log.error(told, self.name, where(error))  # noqa: TRY400 - its words may be values
            return InvariantError(f"a bug: {type(error).__name__}")
        return None

    def stop(self) -> None:
        """Stop after the current batch."""
        self.stopping.set()

    def to(self, state: FollowerState, error: CDCError | None = None) -> None:
        """Enter a state; report it if it changed."""
        if (state, error) != (self.state, self.error):
            if error is None and state != self.state:
                log.info("%s: %s", self.name, state)
            if state in {"following", "catching_up"}:  # the store is open, and the log is read
                self.progress.failing_since_us = None
            self.state, self.error = state, error
            self.report()

    def reads(self) -> None:
        """Record that a session has polled its source and found nothing to apply yet."""
        if self.state not in {"following", "catching_up"}:
            self._backoff_seconds = _BACKOFF_SECONDS[0]
            self.to("following")

    def stands(self, applied: Applied) -> None:
        """Record the store's frontier at a session's start."""
        self.applied, self.had_lsn = applied, None

    def has_applied(
        self, applied: Applied, events: int, tables: set[str], seconds: float, canary: int | None
    ) -> None:
        """Record a batch that the store has applied, and report it."""
        self.applied = applied
        self._has_applied = True
        self._backoff_seconds = _BACKOFF_SECONDS[0]
        self.progress.batch(events, tables, seconds, canary)
        # If nothing writes to the source, only canaries are new.
        newest_us = max(applied.committed_at_us, canary or 0)
        late = events > 0 and time.time() - newest_us / 1e6 > _BEHIND_SECONDS
        state: FollowerState = "catching_up" if late else "following"
        if (state, None) != (self.state, self.error):
            self.to(state)
        else:
            self.report()

    def report(self) -> None:
        """Write a report; log a warning if that fails."""
        if self.is_aside:
            return
        with self._lock:
            self._reported_at = time.monotonic()
            try:
                if self._reports is None:
                    reports = Reports(self.config)
                    self.told()
                    self._reports = reports
                self._reports.write(self._record(self.applied or self._last_told()))
            except CDCError as error:
                log.warning("%s: a report is lost: %s", self.name, error.what)

    def told(self) -> FollowerRecord | None:
        """Return the follower's newest report, from any process."""
        self._known = read(self.config).get(self.name)
        return self._known

    def _last_told(self) -> Applied:
        """Return the last report's frontier: until the store is opened nothing newer is known."""
        known = self._known
        if known is None:
            return Applied.beginning(self.config.pipeline, 0)
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
        error, progress, known = self.error, self.progress, self._known
        # Until this job reads a canary, keep the last reported one of the same generation.
        same = known is not None and known.generation == at.generation
        canary = progress.canary_at_us or (known.canary_at_us if known and same else None)
        return FollowerRecord(
            pipeline=self.config.pipeline,
            follower=self.name,
            store=self.store,
            generation=at.generation,
            state=self.state,
            epoch=at.epoch,
            lsn=LSN(at.lsn),
            seq=at.seq,
            committed_at_us=at.committed_at_us,
            place=at.place,
            had_lsn=self.had_lsn,
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
            what=error.what if error else "",
            hint=error.hint if error else "",
            owner=self._owner,
            at_us=now_us(),
        )

    def _tick(self) -> None:
        while not self.stopping.wait(_TICK_SECONDS):
            if time.monotonic() - self._reported_at >= REPORT_SECONDS - _TICK_SECONDS:
                self.report()

    def _goes_on(self, error: CDCError) -> bool:
        if error.policy is Policy.SLOW:
            return self._has_applied
        return error.policy is not Policy.HALT

    def _wait(self, error: CDCError) -> None:
        """Wait before the next session, with a backoff that grows until a batch is applied."""
        seconds = self._backoff_seconds
        self._backoff_seconds = min(2 * seconds, _BACKOFF_SECONDS[1])
        if error.policy is Policy.SLOW:
            seconds = _SLOW_SECONDS
        self.to("rebuilding" if isinstance(error, StoreLostError) else "waiting", error)
        log.warning("%s: %s; goes on in %.1f s", self.name, error.what, seconds)
        self.stopping.wait(seconds * random.uniform(0.75, 1.25))  # noqa: S311 - jitter, not a secret


def with_remedy(error: CDCError, name: str, cut: str) -> CDCError:
    """Return a gap with its cut and the repair command; return any other error unchanged."""
    if not isinstance(error, GapError):
        return error
    return GapError(
        f"{error.what} ({cut})",
        hint=f"{error.hint}. Nothing of it was written. `cdc rebuild {name}` builds the follower"
        " anew, from what the log or a snapshot has",
    )


def opened(run: Run, sink: Generations) -> Standing:
    """Return the store's frontier; a store that lost a part starts its next generation.

    Nothing is deleted from it before it is certain that it can be refilled; raises GapError if it
    can't. Raises ConfigError if it follows another pipeline.
    """
    pipeline = run.config.pipeline
    told = None if run.is_aside else run.told()
    try:
        standing = _found(run, sink, told)
    except StoreLostError as error:
        _begin_again(run, sink, told, error)
        standing = _standing(run, sink)
    if standing.applied.pipeline != pipeline:
        raise ConfigError(
            f"the store follows the pipeline {standing.applied.pipeline}",
            hint="give each pipeline's follower a prefix or a path of its own",
        )
    return standing


def _found(run: Run, sink: Generations, told: FollowerRecord | None) -> Standing:
    """Return the store's frontier; raise StoreLostError if a part is missing at two checks."""
    if isinstance(run.error, TornError):
        raise run.error
    try:
        return _look(run, sink, told)
    except StoreLostError as error:
        log.warning("%s: %s; looking again", run.name, error.what)
        if run.stopping.wait(_SURE_SECONDS):
            raise StoppedError from error
        return _look(run, sink, told)


def _look(run: Run, sink: Generations, told: FollowerRecord | None) -> Standing:
    had = _had(told)
    # Checked before the store is opened, because that creates what is missing.
    if told is not None and had and sink.current() is None:
        place = sink.absent() if isinstance(sink, Mountable) else None
        if place is not None:
            raise UnavailableError(
                f"there is nothing at {place}, where the store held everything up to {had}",
                hint="mount the volume, or put the store back: until then nothing is written"
                f" there. If it is deleted for good, `cdc rebuild {run.name}` builds it again",
            )
        raise _other(told)
    standing = _standing(run, sink)
    _expect_told(told, standing.applied)
    return standing


def _begin_again(
    run: Run, sink: Generations, told: FollowerRecord | None, error: StoreLostError
) -> None:
    """Start the next generation in place of the lost one, if it can be refilled."""
    generation = _next_generation(run, sink, told)
    if run.is_aside and sink.current() not in (None, generation):
        run.stands(Applied.beginning(run.config.pipeline, generation))
        sink.drop(generation)  # the generation that readers see is not lost
        return
    try:
        refuse_unfillable(run.config, run.name, error)
    except GapError:
        at = told.generation if told else generation
        run.stands(Applied.beginning(run.config.pipeline, at))
        run.had_lsn = _had(told)
        raise
    run.stands(Applied.beginning(run.config.pipeline, generation))
    run.to("rebuilding", error)
    log.warning("%s: %s; building generation %d", run.name, error.what, generation)
    sink.anew(generation)


def _standing(run: Run, sink: Generations) -> Standing:
    """Open the store; one that has applied nothing yet is at the log's beginning."""
    standing = sink.open()
    if standing is not None and standing.applied.pipeline:
        return standing
    generation = run.applied.generation if run.is_aside and run.applied else sink.current() or 1
    beginning = Applied.beginning(run.config.pipeline, generation)
    return Standing(beginning, standing.reached if standing else 0)


def _expect_told(told: FollowerRecord | None, at: Applied) -> None:
    """Raise StoreLostError if more was reported than the store or its generation has.

    Reports of an older generation are ignored, and the newest report promises rows that are
    missing. Exception: a rebuild reports a generation just before the switch, so readers may never
    have seen it.
    """
    if told is None:
        return
    is_lost = told.generation > at.generation and told.state != "rebuilding"
    if not at.lsn:
        is_lost = (told.generation, _had(told)) > (at.generation, LSN(0))
    if is_lost:
        raise _other(told)


def _had(told: FollowerRecord | None) -> LSN:
    """Return the LSN up to which the store held everything, by the newest report."""
    return LSN(0) if told is None else told.had_lsn or told.lsn


def _other(told: FollowerRecord) -> StoreLostError:
    return StoreLostError(
        f"the store is not the one that had generation {told.generation} up to {_had(told)}"
    )


def _next_generation(run: Run, sink: Generations, told: FollowerRecord | None) -> int:
    """Return the next number for a lost store: above all that were reported or exist.

    A shadow build keeps its number, because the rebuild identifies it by that.
    """
    if run.is_aside and run.applied is not None:
        return run.applied.generation
    known = [told.generation if told else 1, run.applied.generation if run.applied else 1]
    with suppress(StoreLostError):
        known += [number for number in sink.generations() if number < STILL]
    return max(known) + 1
