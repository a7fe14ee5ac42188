"""The pipeline's verdict, from facts, for `cdc status`, the daemon's health and the doctor.

Pure: facts in, a `Verdict` out: one sentence, a level, and each cause with its age and its remedy.
`ok` means that everything which has something to apply applies it, and its sentence has the worst
lag. So nothing that cannot advance, or has not advanced for `STILL_SECONDS` (longer where batches
take long, `LATE_SECONDS` at most) though the log has more for it, is `ok`, whatever it reports of
itself. `degraded` advances, or may recover by itself; `failed` has not for `STALLED_SECONDS`, or
needs a person.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from cdc.errors import Exit
from cdc.operate.findings import Cause, Finding, Level, Severity
from cdc.operate.followers import LATE_SECONDS, STALLED_SECONDS, FollowerStatus, judge
from cdc.operate.monitor import Unread
from cdc.operate.readable import duration, listed, size
from cdc.operate.webhooks import WebhookStatus
from cdc.operate.webhooks import judge as judge_webhooks
from cdc.snapshot.incremental.records import read_since

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.completeness import IncompleteTopic
    from cdc.snapshot.incremental.records import IncrementalRecord
    from cdc.source.slots import Slot

# A running daemon updates its resume record every ten seconds, also when idle.
STALE_SECONDS: Final = 60.0
# An incremental snapshot waits for transactions to end, and reads a chunk again that was changed
# meanwhile: a wait that is shorter than this is normal.
_WAITS_SECONDS: Final = 10.0
# What a group's name has before it where readers hold compaction back.
GROUP: Final = "group "
# What is not known while the daemon cannot read it; that a read fails once is normal.
_UNREAD: Final = {
    "followers": "where the followers are is not known",
    "webhooks": "what the webhooks deliver is not known",
    "compaction": "whom compaction must wait for is not known",
}
_UNREAD_SECONDS: Final = 15.0
# More incomplete topics than this are one cause.
_TOPICS_NAMED: Final = 8
_SEE_DOCTOR: Final = "`cdc doctor` shows what can be done"
_RUN: Final = "cdc run; a daemon that ended by itself logs why, and again when it is started"


class Verdict(NamedTuple):
    level: Level
    sentence: str
    causes: tuple[Cause, ...] = ()  # the worst first

    @property
    def exit_code(self) -> int:
        """Return the process's exit code: not 0 where something failed."""
        failed = (each.exit_code for each in self.causes if each.level is Level.FAILED)
        return max(failed, default=Exit.OK)

    def of(self, level: Level) -> list[Cause]:
        return [each for each in self.causes if each.level is level]

    def fields(self) -> dict[str, Any]:
        causes = [each.fields() for each in self.causes]
        return {"level": self.level.value, "sentence": self.sentence, "causes": causes}


class DaemonReport(NamedTuple):
    """What the daemon reports of itself."""

    state: str
    ready: bool
    reason: str
    since_seconds: float = 0.0  # in this state
    failures: int = 0  # sessions that ended with an error since the log last moved
    failing_seconds: float | None = None  # since the first of them
    error: str = ""  # of the last
    warnings: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()  # of the warnings, one each
    wrong_policies: tuple[tuple[str, str], ...] = ()  # topics with another cleanup.policy
    compaction_held: tuple[str, ...] = ()  # the readers for which nothing is compacted
    unread: tuple[Unread, ...] = ()  # what it watches and cannot read
    lag_seconds: float | None = None  # of the log

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the fields in the body of /readyz; an older daemon's has fewer."""
        return cls(
            state=str(body.get("state")),
            ready=bool(body.get("ready")),
            reason=str(body.get("reason")),
            since_seconds=float(body.get("since_seconds") or 0.0),
            failures=int(body.get("failures") or 0),
            failing_seconds=body.get("failing_seconds"),
            error=str(body.get("error") or ""),
            warnings=tuple(body.get("warnings") or ()),
            remedies=tuple(body.get("remedies") or ()),
            wrong_policies=tuple(sorted((body.get("wrong_policies") or {}).items())),
            compaction_held=tuple(body.get("compaction_held") or ()),
            unread=tuple(Unread(**each) for each in body.get("unread") or ()),
            lag_seconds=body.get("lag_seconds"),
        )


class PipelineFacts(NamedTuple):
    """What was found of a pipeline at one moment."""

    unanswered: tuple[Cause, ...] = ()  # servers that were asked and did not answer
    resume_lsn: LSN | None = None  # up to here the log has everything; None: it has no record
    resume_age_seconds: float | None = None
    lag_bytes: int | None = None
    slot: Slot | None = None
    by_daemon: bool = False  # the daemon itself judges: it has the slot, and knows its own state
    daemon: DaemonReport | None = None  # None: it does not answer
    initial_stage: str | None = "done"  # None: the log has no record of an initial snapshot
    incremental_snapshots: tuple[IncrementalRecord, ...] = ()
    incomplete_topics: tuple[IncompleteTopic, ...] = ()
    followers: tuple[FollowerStatus, ...] = ()
    webhooks: tuple[WebhookStatus, ...] = ()
    findings: tuple[Finding, ...] = ()  # of the slot's retention and open transactions
    now_us: int = 0


def verdict(config: Config, facts: PipelineFacts) -> Verdict:
    causes = list(facts.unanswered)
    if not causes:
        causes += _setup(config, facts)
    # What is missing or lost explains everything else.
    if not causes:
        causes += [*_reading(facts), *_initial(config, facts)]
    causes += [*_incremental_snapshots(facts), *_incomplete_topics(facts)]
    for each in facts.findings:
        if each.severity is Severity.WARNING:
            causes.append(Cause(Level.DEGRADED, each.check, each.what, each.fix))
    causes += judge(config, list(facts.followers))
    causes += judge_webhooks(facts.webhooks)
    order = list(Level)
    distinct = {each.what: each for each in causes}
    causes = sorted(distinct.values(), key=lambda each: order.index(each.level), reverse=True)
    if not causes:
        return Verdict(Level.OK, _well(facts))
    worst = causes[0]
    since = f", since {worst.since}" if worst.since else ""
    more = f", and {len(causes) - 1} more" if len(causes) > 1 else ""
    sentence = f"{worst.level.value}: {worst.what}{since}{more}"
    return Verdict(worst.level, sentence, tuple(causes))


def _well(facts: PipelineFacts) -> str:
    """Return by how much the slowest reader lags, with the log itself where that is known."""
    log = facts.daemon.lag_seconds if facts.daemon else None
    lags = {
        "store": [each.lag_seconds or 0.0 for each in facts.followers],
        "webhook": [each.lag_seconds or 0.0 for each in facts.webhooks],
    }
    kinds = [kind for kind, found in lags.items() if found]
    if not kinds:
        return "the log keeps up" if log is None else f"the log lags by at most {_at_most(log)}"
    worst = max(lag for found in lags.values() for lag in found) + (log or 0.0)
    of = " the log" if log is None else ""
    return f"every {' and '.join(kinds)} lags{of} by at most {_at_most(worst)}"


def _at_most(seconds: float) -> str:
    """Return a duration of at least a second, rounded up."""
    seconds = max(1, math.ceil(seconds))
    return f"{seconds} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"  # noqa: PLR2004 - as `duration`


def _failed(
    about: str, what: str, remedy: str, since: float | None = None, code: int = Exit.FAILED
) -> Cause:
    return Cause(Level.FAILED, about, what, remedy, since, code)


def _setup(config: Config, facts: PipelineFacts) -> Iterator[Cause]:
    """Yield what is missing or lost of slot and log."""
    slot, lsn = facts.slot, facts.resume_lsn
    if facts.by_daemon:
        return
    if lsn is None and slot is None:
        what = f"the pipeline {config.pipeline} is not set up"
        yield _failed("setup", what, "cdc setup", code=Exit.CONFIG)
    elif lsn is None:
        what = "the slot exists, but the log has no resume record"
        yield _failed("setup", what, _SEE_DOCTOR, code=Exit.CONFIG)
    elif slot is None:
        what = f"the slot {config.slot} is missing, and the changes since the log's end with it"
        yield _failed("slot", what, _SEE_DOCTOR, code=Exit.CONFIG)
    elif slot.loss:
        yield _failed("slot", f"the slot {slot.name} is lost", _SEE_DOCTOR, code=Exit.CONFIG)
    elif slot.confirmed_flush_lsn is not None and slot.confirmed_flush_lsn > lsn:
        what = f"a gap: the slot starts at {slot.confirmed_flush_lsn}, the log ends before"
        yield _failed("slot", what, _SEE_DOCTOR, code=Exit.CONFIG)


def _reading(facts: PipelineFacts) -> Iterator[Cause]:
    """Yield why the log does not advance, or may stop advancing."""
    slot, daemon = facts.slot, facts.daemon
    if slot is not None and slot.is_nearly_lost:
        yield _failed("slot", f"the slot {slot.name} is about to be lost", "cdc run, at once")
    copying = facts.initial_stage not in {"done", None}
    taken = copying and daemon is not None and daemon.ready
    # A daemon that answers knows why it does not read: it can't log in, for example.
    waits = daemon is not None and not daemon.ready
    unread = slot is not None and slot.active_pid is None and not facts.by_daemon
    if slot is not None and unread and not taken and not waits:
        kept = size(slot.retained_bytes or 0)
        what = f"no daemon reads from the slot, which keeps {kept} of WAL"
        yield _failed("daemon", what, _RUN, slot.inactive_seconds)
    elif daemon is not None and daemon.state != "standby":
        yield from _daemon(daemon)
    elif facts.lag_bytes and (facts.resume_age_seconds or 0.0) > STALE_SECONDS:
        # Without a report of the daemon that holds the slot the log is checked instead.
        age = facts.resume_age_seconds or 0.0
        what = f"a daemon holds the slot, but has written nothing for {age:.0f} s"
        yield _failed("daemon", what, "see its log, and /readyz where it serves http", age)


def _daemon(daemon: DaemonReport) -> Iterator[Cause]:
    if not daemon.ready:
        what = f"the daemon is {daemon.state}: {daemon.reason}"
        yield _failed("daemon", what, "see its log; /readyz has the details", daemon.since_seconds)
    elif daemon.failures:
        # A session that starts and fails at the same place again is no progress.
        since = daemon.failing_seconds or 0.0
        level = Level.FAILED if since > LATE_SECONDS else Level.DEGRADED
        what = (
            f"the daemon has started over {daemon.failures} times in {duration(since)} without"
            f" publishing anything: {daemon.error}"
        )
        yield Cause(level, "daemon", what, "see its log for the first of these errors", since)
    if daemon.wrong_policies:
        them = listed([f"{policy} for {topic}" for topic, policy in daemon.wrong_policies])
        what = f"cleanup.policy is {them}: Kafka may delete events that followers need"
        remedy = (
            "`cdc doctor` has the command that sets it back; then `cdc prove` finds what is lost"
        )
        yield _failed("topic", what, remedy)
    if daemon.compaction_held:
        names = listed(list(daemon.compaction_held))
        what = f"no topic is compacted, and all of them grow, while these lag: {names}"
        remedy = "start them, or take them out of the configuration"
        held = [
            each.removeprefix(GROUP) for each in daemon.compaction_held if each.startswith(GROUP)
        ]
        if held:
            commands = listed([f"`cdc group remove {each}`" for each in held])
            remedy += f"; {commands}, if nobody needs it any more"
        yield Cause(Level.DEGRADED, "topic", what, remedy)
    for each in daemon.unread:
        if each.seconds > _UNREAD_SECONDS:
            level = Level.FAILED if each.seconds > STALLED_SECONDS else Level.DEGRADED
            what = f"{_UNREAD[each.of]}: {each.error}"
            yield Cause(level, "daemon", what, each.hint, each.seconds)
    for warning, remedy in zip_longest(daemon.warnings, daemon.remedies, fillvalue=""):
        yield Cause(Level.DEGRADED, "source", warning, remedy or "see the daemon's log")


def _initial(config: Config, facts: PipelineFacts) -> Iterator[Cause]:
    """Yield that the rows from before the log's start are not in the log."""
    stage, daemon = facts.initial_stage, facts.daemon
    if stage is None and config.snapshot.mode == "initial":
        yield _failed(
            "snapshot",
            "snapshot.mode is initial, but the log has no record of an initial snapshot: it was"
            " skipped",
            "`cdc snapshot '*'` reads every table while the daemon streams; snapshot.mode: never"
            " where the log is to start without the rows",
        )
    elif stage in {"done", None}:
        return
    elif daemon is not None and daemon.state == "snapshotting":
        what = "the initial snapshot is being taken"
        what += f": {daemon.reason}" if daemon.reason else ""
        yield Cause(
            Level.DEGRADED, "snapshot", what, "it continues by itself; check that it advances"
        )
    else:
        what = f"the initial snapshot is {stage}, and no daemon continues it"
        if daemon is not None and daemon.state == "streaming":
            what = f"the daemon streams, but the initial snapshot is {stage}: it was skipped"
        yield _failed(
            "snapshot", what, "cdc run continues it; `cdc snapshot --initial` does only that"
        )


def _incremental_snapshots(facts: PipelineFacts) -> Iterator[Cause]:
    """Yield the incremental snapshots that fail, or have failed and were not acknowledged.

    Of paused ones those that have emptied their topic.
    """
    for each in facts.incremental_snapshots:
        name, why = f"the snapshot {each.id} of {each.name}", each.why or "the log has no reason"
        if each.state == "failed" and not read_since(each, facts.incremental_snapshots):
            since = max(0.0, (facts.now_us - each.at_us) / 1e6)
            remedy = (
                f"once the cause is removed, `cdc snapshot {each.name}` reads it again; `cdc"
                f" snapshot stop {each.id}`"
            )
            what = f"{name} has failed: {why}"
            yield _failed("incremental_snapshot", what, f"{remedy} acknowledges it", since)
        elif each.state == "paused" and each.emptied_under:
            what = f"{name} is paused, and the topic has {each.rows:,} of the table's rows so far"
            remedy = f"`cdc snapshot resume {each.id}` reads the rest"
            since = max(0.0, (facts.now_us - each.at_us) / 1e6)
            yield Cause(Level.DEGRADED, "incremental_snapshot", what, remedy, since)
        elif each.state == "running" and each.failing_since_us is not None:
            since = max(0.0, (facts.now_us - each.failing_since_us) / 1e6)
            if not each.errors and since < _WAITS_SECONDS:
                continue
            late = STALLED_SECONDS if not each.errors else LATE_SECONDS
            level = Level.FAILED if since > late else Level.DEGRADED
            times = f" ({each.errors} errors in a row)" if each.errors else ""
            what = f"{name} has read nothing for {duration(since)}{times}: {why}"
            remedy = f"it tries again by itself; `cdc snapshot stop {each.id}` ends it"
            yield Cause(level, "incremental_snapshot", what, remedy, since)


def _incomplete_topics(facts: PipelineFacts) -> Iterator[Cause]:
    """Yield the topics that do not equal their tables; those of no captured table are no cause."""
    replacing = {
        each.name: each.id
        for each in facts.incremental_snapshots
        if each.state == "running" and each.replaces
    }
    captured = [each for each in facts.incomplete_topics if each.captured]
    lasting = [each for each in captured if each.name not in replacing]
    for topic in captured:
        if topic.name in replacing:
            remedy = f"the snapshot {replacing[topic.name]} reads the table again"
            yield Cause(Level.DEGRADED, "topic", topic.what, remedy, subject=topic.name)
        elif len(lasting) <= _TOPICS_NAMED:
            yield _failed("topic", topic.what, topic.remedy)._replace(subject=topic.name)
    if len(lasting) > _TOPICS_NAMED:
        # As after ALTER SCHEMA … RENAME.
        what = f"the topics of {len(lasting)} tables are incomplete: "
        what += listed([each.name for each in lasting])
        remedy = "`cdc snapshot TABLE --replace` for each; `cdc status --json` has all of them"
        yield _failed("topic", what, remedy)
