"""The pipeline's verdict, from facts, for `cdc status`, the daemon's health and the doctor.

Pure: facts in, a `Verdict` out: one sentence, a level, and each cause with its age and its remedy.
`ok` means that everything which has something to apply applies it. So nothing that cannot advance,
or has not advanced for `LATE_SECONDS` though the log has more for it, is `ok`, whatever it reports
of itself. `degraded` advances, or may recover by itself; `failed` has not for `STALLED_SECONDS`, or
needs a person.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.errors import Exit
from cdc.operate.findings import Severity, size
from cdc.operate.followers import LATE_SECONDS, STALLED_SECONDS, judge
from cdc.operate.retention import spell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.operate.findings import Finding
    from cdc.operate.followers import Standing
    from cdc.snapshot.incremental.records import LiveRecord
    from cdc.source.server import Slot

# A running daemon updates its resume record every ten seconds, also when idle.
STALE_SECONDS: Final = 60.0
# An incremental snapshot waits for transactions to end, and reads a chunk again that was changed
# meanwhile: a wait that is shorter than this is normal.
_WAITS_SECONDS: Final = 10.0
_AGAIN: Final = "`cdc doctor` says what can be done"
_RUN: Final = (
    "cdc run; a daemon that ended by itself says why in its log, and again when it is started"
)


class Level(Enum):
    """The severity of a cause, or of the verdict."""

    OK = "ok"
    DEGRADED = "degraded"  # it advances, or may recover by itself
    FAILED = "failed"  # it does not advance, or needs a person


class Cause(NamedTuple):
    """Why the verdict is not `ok`."""

    level: Level
    about: str  # server, setup, slot, daemon, snapshot, live_snapshot, follower
    what: str
    remedy: str
    since_seconds: float | None = None  # None: unknown
    exit_code: int = Exit.FAILED  # where the level is FAILED
    subject: str = ""  # which follower, or which snapshot

    def fields(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        since = None if self.since_seconds is None else round(self.since_seconds, 1)
        return {**self._asdict(), "level": self.level.value, "since_seconds": since}


class Verdict(NamedTuple):
    """The answer."""

    level: Level
    sentence: str
    causes: tuple[Cause, ...] = ()  # the worst first

    @property
    def exit_code(self) -> int:
        """Return the process's exit code: not 0 where something failed."""
        failed = (each.exit_code for each in self.causes if each.level is Level.FAILED)
        return max(failed, default=Exit.OK)

    def of(self, level: Level) -> list[Cause]:
        """Return the causes of a level."""
        return [each for each in self.causes if each.level is level]

    def fields(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        causes = [each.fields() for each in self.causes]
        return {"level": self.level.value, "sentence": self.sentence, "causes": causes}


class Reader(NamedTuple):
    """The daemon, as its own loop reports it."""

    state: str
    ready: bool
    reason: str
    since_seconds: float = 0.0  # in this state
    failures: int = 0  # sessions that ended with an error since the log last moved
    failing_seconds: float | None = None  # since the first of them
    error: str = ""  # of the last
    warnings: tuple[str, ...] = ()


class Initial(NamedTuple):
    """The initial snapshot, according to the log."""

    stage: str | None  # None: the log has no record of one
    wanted: bool  # the configuration enables one
    described: str = ""  # its progress, where the daemon reports it


class Facts(NamedTuple):
    """What was found of a pipeline at one moment."""

    unanswered: tuple[Cause, ...] = ()  # servers that were asked and did not answer
    resume_lsn: LSN | None = None  # up to here the log has everything; None: it has no record
    resume_age_seconds: float | None = None
    lag_bytes: int | None = None
    slot: Slot | None = None
    inside: bool = False  # the daemon itself judges: it has the slot, and knows its own state
    daemon: Reader | None = None  # None: it does not answer
    initial: Initial = Initial("done", wanted=True)
    live: tuple[LiveRecord, ...] = ()
    followers: tuple[Standing, ...] = ()
    findings: tuple[Finding, ...] = ()  # of the slot's retention and open transactions
    now_us: int = 0


def verdict(config: Config, facts: Facts) -> Verdict:
    """Return the verdict with its causes."""
    causes = list(facts.unanswered)
    if not causes:
        causes += _setup(config, facts)
    # What is missing or lost explains everything else.
    if not causes:
        causes += [*_reading(facts), *_initial(facts)]
    causes += _live(facts)
    for each in facts.findings:
        if each.severity is Severity.WARNING:
            causes.append(Cause(Level.DEGRADED, each.check, each.what, each.fix))
    for complaint in judge(config, list(facts.followers)):
        level = Level.FAILED if complaint.exit_code else Level.DEGRADED
        code = complaint.exit_code or Exit.FAILED
        since = complaint.since_seconds
        what, remedy, name = complaint.what, complaint.hint, complaint.follower
        causes.append(Cause(level, "follower", what, remedy, since, code, name))
    order = list(Level)
    distinct = {each.what: each for each in causes}
    causes = sorted(distinct.values(), key=lambda each: order.index(each.level), reverse=True)
    if not causes:
        return Verdict(Level.OK, "all is well")
    more = f", and {len(causes) - 1} more" if len(causes) > 1 else ""
    level = causes[0].level
    return Verdict(level, f"{level.value}: {causes[0].what}{more}", tuple(causes))


def _failed(
    about: str, what: str, remedy: str, since: float | None = None, code: int = Exit.FAILED
) -> Cause:
    return Cause(Level.FAILED, about, what, remedy, since, code)


def _setup(config: Config, facts: Facts) -> Iterator[Cause]:
    """Yield what is missing or lost of slot and log."""
    slot, lsn = facts.slot, facts.resume_lsn
    if facts.inside:
        return
    if lsn is None and slot is None:
        what = f"the pipeline {config.pipeline} is not set up"
        yield _failed("setup", what, "cdc setup", code=Exit.CONFIG)
    elif lsn is None:
        what = "the slot exists, but the log has no resume record"
        yield _failed("setup", what, _AGAIN, code=Exit.CONFIG)
    elif slot is None:
        what = f"the slot {config.slot} is missing, and the changes since the log's end with it"
        yield _failed("slot", what, _AGAIN, code=Exit.CONFIG)
    elif slot.wal_status == "lost" or slot.invalidation_reason:
        yield _failed("slot", f"the slot {slot.name} is lost", _AGAIN, code=Exit.CONFIG)
    elif slot.confirmed_flush_lsn is not None and slot.confirmed_flush_lsn > lsn:
        what = f"a gap: the slot begins at {slot.confirmed_flush_lsn}, the log ends before"
        yield _failed("slot", what, _AGAIN, code=Exit.CONFIG)


def _reading(facts: Facts) -> Iterator[Cause]:
    """Yield why the log does not advance, or may stop advancing."""
    slot, daemon = facts.slot, facts.daemon
    if slot is not None and slot.wal_status == "unreserved":
        yield _failed("slot", f"the slot {slot.name} is about to be lost", "cdc run, at once")
    copying = facts.initial.stage not in {"done", None}
    taken = copying and daemon is not None and daemon.ready
    if slot is not None and slot.active_pid is None and not facts.inside and not taken:
        kept = size(slot.retained_bytes or 0)
        what = f"no daemon reads from the slot, which keeps {kept} of WAL"
        yield _failed("daemon", what, _RUN, slot.inactive_seconds)
    elif daemon is not None:
        yield from _daemon(daemon)
    elif facts.lag_bytes and (facts.resume_age_seconds or 0.0) > STALE_SECONDS:
        # The daemon's own report is missing, so the log is checked instead.
        age = facts.resume_age_seconds or 0.0
        what = f"a daemon holds the slot, but has written nothing for {age:.0f} s"
        yield _failed("daemon", what, "see its log, and /readyz where it serves http", age)


def _daemon(daemon: Reader) -> Iterator[Cause]:
    if not daemon.ready:
        what = f"the daemon is {daemon.state}: {daemon.reason}"
        yield _failed("daemon", what, "see its log; /readyz has the details", daemon.since_seconds)
    elif daemon.failures:
        # A session that starts and fails at the same place again is no progress.
        since = daemon.failing_seconds or 0.0
        level = Level.FAILED if since > LATE_SECONDS else Level.DEGRADED
        what = (
            f"the daemon has started over {daemon.failures} times in {spell(since)} without"
            f" publishing anything: {daemon.error}"
        )
        yield Cause(level, "daemon", what, "see its log for the first of these errors", since)
    for warning in daemon.warnings:
        yield Cause(Level.DEGRADED, "source", warning, "`cdc doctor` names the remedy")


def _initial(facts: Facts) -> Iterator[Cause]:
    """Yield that the rows from before the log's start are not in the log."""
    stage, daemon = facts.initial.stage, facts.daemon
    at_work = daemon is not None and daemon.state == "snapshotting"
    if stage is None and facts.initial.wanted:
        yield _failed(
            "snapshot",
            "snapshot.mode is initial, but the log has no record of an initial snapshot: it was"
            " skipped",
            "`cdc snapshot '*'` reads every table while the daemon streams; snapshot.mode: never"
            " where the log is to begin without the rows",
        )
    elif stage in {"done", None}:
        return
    elif at_work:
        how = facts.initial.described
        what = "the initial snapshot is being taken" + (f": {how}" if how else "")
        yield Cause(Level.DEGRADED, "snapshot", what, "it goes on by itself; see that it moves")
    else:
        what = f"the initial snapshot is {stage}, and no daemon takes it"
        if daemon is not None and daemon.state == "streaming":
            what = f"the daemon streams, but the initial snapshot is {stage}: it was skipped"
        yield _failed("snapshot", what, "cdc run takes it; `cdc snapshot --initial` takes only it")


def _live(facts: Facts) -> Iterator[Cause]:
    """Yield the incremental snapshots that fail, or have failed and were not acknowledged."""
    for each in facts.live:
        name, why = f"the snapshot {each.id} of {each.name}", each.why or "the log has no reason"
        if each.state == "failed" and not _read_since(each, facts.live):
            since = max(0.0, (facts.now_us - each.at_us) / 1e6)
            remedy = f"`cdc snapshot {each.name}` reads it again; `cdc snapshot stop {each.id}`"
            what = f"{name} has failed: {why}"
            yield _failed("live_snapshot", what, f"{remedy} acknowledges it", since)
        elif each.state == "running" and each.failing_since_us is not None:
            since = max(0.0, (facts.now_us - each.failing_since_us) / 1e6)
            if not each.errors and since < _WAITS_SECONDS:
                continue
            late = STALLED_SECONDS if not each.errors else LATE_SECONDS
            level = Level.FAILED if since > late else Level.DEGRADED
            times = f" ({each.errors} errors in a row)" if each.errors else ""
            what = f"{name} has read nothing for {spell(since)}{times}: {why}"
            remedy = f"it tries again by itself; `cdc snapshot stop {each.id}` ends it"
            yield Cause(level, "live_snapshot", what, remedy, since)


def _read_since(failed: LiveRecord, live: tuple[LiveRecord, ...]) -> bool:
    """Whether the complete table was read by a later snapshot."""
    return any(
        each.state == "done"
        and (each.schema, each.table) == (failed.schema, failed.table)
        and each.began_at_us >= failed.at_us
        and each.where in {None, failed.where}
        and not each.keys
        for each in live
    )
