"""How far followers and the archive are, by their reports and the log, whether or not they run.

`cdc status` reads this once; the daemon does so every few seconds, on a thread of its own, and
shows the result in /readyz and /metrics. A follower's failure does not affect the daemon: it stays
ready.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.config.stores import freshness, longest_wait
from cdc.errors import Exit
from cdc.log.expected import START_OVER
from cdc.log.follower_reports import REPORT_SECONDS, SILENT_SECONDS, FollowerRecord, Readings
from cdc.log.frontier_tail import Unapplied, UnappliedReader
from cdc.operate.findings import Cause, Level
from cdc.operate.monitor import Monitor
from cdc.operate.readable import duration, listed
from cdc.source.authority import CLOCK_US

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.config import Config
    from cdc.events import LSN

ARCHIVE: Final = "archive"  # under which the archive's job reports; no follower has this name
BASES: Final = "archive:bases"  # under which a compaction does, once; no follower's has a colon
# The states in addition to those that a job reports.
NEW: Final = "new"  # has never reported
NOT_RUNNING: Final = "not_running"  # has reported nothing recently, and not that it stops
STATES: Final = (
    *("starting", "following", "catching_up", "waiting", "rebuilding", "halted", "stopped"),
    *(NOT_RUNNING, NEW),
)
# A follower that keeps up applies a canary within a batch or two, like everything else: a longer
# time is reported.
LATE_SECONDS: Final = 60.0
# A report, and what the daemon has read of reports, are up to REPORT_SECONDS old each. A frontier
# that has been in one place for longer than both, though the log has more, does not advance.
STILL_SECONDS: Final = 3 * REPORT_SECONDS
# A follower that has applied nothing for this long, though there is something to apply, has failed:
# a store is up again sooner, and only a huge batch takes longer.
STALLED_SECONDS: Final = 180.0
RUN_ARCHIVE: Final = "cdc archive run"
# An archive begins where its log begins: so another one needs another log.
NEW_ARCHIVE: Final = (
    f"{START_OVER}; archive the new log at another archive.path, and keep the old archive: it has"
    " everything up to there"
)


class FollowerStatus(NamedTuple):
    """A follower's state at one moment; what is not known is None."""

    name: str
    record: FollowerRecord | None
    wal_end: LSN | None
    unapplied: Unapplied | None
    # When the log took the first report of the current frontier; None where it is not known. A job
    # may report progress with an unchanged frontier: only a different frontier counts.
    reached_at_us: int | None = None

    @property
    def state(self) -> str:
        if self.record is None:
            return NEW
        over = self.record.state in {"halted", "stopped"}
        return self.record.state if over or self.record.runs else NOT_RUNNING

    @property
    def is_archive(self) -> bool:
        return self.name == ARCHIVE

    @property
    def lag_bytes(self) -> int | None:
        """WAL between the WAL's end and the applied frontier."""
        if self.record is None or self.wal_end is None:
            return None
        return max(0, self.wal_end - self.record.lsn)

    @property
    def lag_seconds(self) -> float | None:
        """How long the log has held events that are not applied; 0 where all are."""
        if self.unapplied is None:
            return None
        since = self.unapplied.since_us
        return 0.0 if since is None else max(0.0, time.time() - since / 1e6)

    @property
    def canary_age_seconds(self) -> float | None:
        """How long ago the newest applied canary was sent; None where its time is in the future."""
        at_us = self.record.canary_at_us if self.record else None
        if at_us is not None and at_us > time.time() * 1e6 + CLOCK_US:
            return None  # a log of an older version may hold a forged one
        return self._ago("canary_at_us")

    @property
    def job_seconds(self) -> float | None:
        """How long its job has existed."""
        return self._ago("began_at_us")

    @property
    def stalled_seconds(self) -> float:
        """How long its frontier has not moved though the log has more events, by the log."""
        stalled = self._ago("moved_at_us") or 0.0
        if self.reached_at_us is not None:
            stalled = max(stalled, time.time() - self.reached_at_us / 1e6)
        return min(stalled, self.lag_seconds or 0.0)

    @property
    def failing_seconds(self) -> float | None:
        """How long errors have prevented its job from applying anything."""
        return self._ago("failing_since_us")

    def _ago(self, field: str) -> float | None:
        at_us = getattr(self.record, field, None)
        return None if at_us is None else max(0.0, time.time() - at_us / 1e6)

    def fields(self) -> dict[str, Any]:
        names = (
            *("store", "generation", "epoch", "lsn", "seq", "committed_at_us", "tables", "events"),
            *("batches", "errors", "events_per_second", "batch_seconds", "what", "hint", "owner"),
        )
        lags = ("lag_bytes", "lag_seconds", "canary_age_seconds")
        record = self.record
        return {
            "name": self.name,
            "state": self.state,
            **{name: _rounded(getattr(self, name)) for name in lags},
            "report_age_seconds": record and round(record.age_seconds, 3),
            **{name: record and _plain(getattr(record, name)) for name in names},
        }


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if isinstance(value, float) else value


def _plain(value: object) -> object:
    return str(value) if type(value) is not int and isinstance(value, int) else value  # an LSN


class FollowersReader:
    """Reads the state of a configuration's followers, and of its archive, until `close`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._readings = Readings(config)
        self._unapplied = UnappliedReader(config)
        self.any_running = False  # at the newest read, configured or not

    def read(self, wal_end: LSN | None) -> list[FollowerStatus]:
        newest = self._readings.refresh()
        self.any_running = any(record.runs for record in newest.values())
        found = []
        for name in _reporting(self._config):
            record = newest.get(name)
            unapplied = self._unapplied.unapplied(record.place) if record else None
            reached = self._readings.reached_at_us.get(name)
            found.append(FollowerStatus(name, record, wal_end, unapplied, reached))
        return found

    def close(self) -> None:
        """Close the connections."""
        self._readings.close()
        self._unapplied.close()


def _reporting(config: Config) -> list[str]:
    """Return the names under which reports are expected."""
    return [*config.followers, *([ARCHIVE] if config.archive.path is not None else [])]


def judge(config: Config, statuses: list[FollowerStatus]) -> Iterator[Cause]:
    """Yield what is wrong with followers, or will be; nothing for those that keep up."""
    for each in statuses:
        if each.unapplied is not None and each.unapplied.forgotten:
            what = f"the log no longer holds what {each.name} has not applied"
            remedy = f"cdc rebuild {each.name}"
            yield _cause(each, what, NEW_ARCHIVE if each.is_archive else remedy, Exit.CONFIG)
            if not each.record or not each.record.runs:
                continue  # to run it would not help
        found = _trouble(config, each)
        if found is not None:
            yield _cause(each, *found, _since(each))


def _cause(
    each: FollowerStatus, what: str, remedy: str, code: int, since: float | None = None
) -> Cause:
    """Return the cause; with exit code 0 it may pass by itself."""
    level = Level.FAILED if code else Level.DEGRADED
    about = "archive" if each.is_archive else "follower"
    return Cause(level, about, what, remedy, since, code or Exit.FAILED, each.name)


def _since(each: FollowerStatus) -> float | None:
    """Return how long this has lasted, as far as the log shows; None where it does not."""
    if each.record is None:
        return None
    if not each.record.runs and each.lag_seconds is None:
        return each.record.age_seconds
    return max(each.stalled_seconds, each.failing_seconds or 0.0)


def _trouble(config: Config, each: FollowerStatus) -> tuple[str, str, int] | None:
    """Return the most serious thing that keeps a follower from applying what the log has."""
    record, name = each.record, each.name
    run = RUN_ARCHIVE if each.is_archive else f"cdc follow --followers {name}"
    if record is None:
        return f"{name} has never run", run, Exit.FAILED
    if each.state == "halted":
        return f"{name} has halted: {record.what}", record.hint, Exit.CONFIG
    if not record.runs:
        what = f"{name} is not running; its last report is {record.age_seconds:.0f} s old"
        return what, run, Exit.FAILED
    if record.what:
        lags = f" and lags by {duration(lag)}" if (lag := each.lag_seconds or 0.0) >= 1 else ""
        what = f"{name} is {each.state.replace('_', ' ')}{lags}: {record.what}"
        seconds = max(each.failing_seconds or 0.0, each.stalled_seconds)
        lasting = seconds > STALLED_SECONDS + _waits(config, name)
        return what, record.hint, Exit.FAILED if lasting else Exit.OK
    # The archive applies every record alike, and reports no canaries: its lag includes them.
    return _lateness(config, each) or (None if each.is_archive else _silence(config, each))


def _lateness(config: Config, each: FollowerStatus) -> tuple[str, str, int] | None:
    """Return that it has long lacked events of the log; worse where its frontier does not move."""
    lag, stalled, waits = each.lag_seconds or 0.0, each.stalled_seconds, _waits(config, each.name)
    if lag <= LATE_SECONDS + waits:
        return _stillness(config, each) or _not_fresh(config, each, lag)
    since = f"the log has held for {duration(lag)} what it lacks"
    if stalled <= LATE_SECONDS + waits:
        return f"{each.name} lags: {since}", "it advances: check that this falls", Exit.OK
    if (each.job_seconds or LATE_SECONDS) < LATE_SECONDS:
        what = (
            f"{each.name} has applied nothing for {duration(stalled)}, and its job has just started"
        )
        return what, "check that its frontier moves", Exit.OK
    follower = config.followers.get(each.name)
    hint = "see its job's log, and whether Spark has executors for a large batch"
    if follower is not None and follower.mirror:
        hint = f"it reads its mirror: see {follower.mirror}; then its job's log"
    code = Exit.FAILED if stalled > STALLED_SECONDS + waits else Exit.OK
    return f"{each.name} has applied nothing for {duration(stalled)}, and {since}", hint, code


def _stillness(config: Config, each: FollowerStatus) -> tuple[str, str, int] | None:
    """Return that its frontier does not move now though the log has more: no alarm, but not ok."""
    record, stalled = each.record, each.stalled_seconds
    if record is None or not each.lag_seconds:
        return None
    hint = "it may apply its first batch, or a large one: check that its frontier moves"
    if record.state in {"starting", "rebuilding"}:
        return f"{each.name} is {record.state}, and the log has more for it", hint, Exit.OK
    if stalled <= _still_seconds(config, each):
        return None
    lasting = f"for {duration(stalled)}" if record.batches else "since its job started"
    return f"{each.name} has applied nothing {lasting}, and the log has more for it", hint, Exit.OK


def _still_seconds(config: Config, each: FollowerStatus) -> float:
    """Return for how long its frontier may be in one place though the log has more.

    As long as two of its batches take, and what its settings let it wait; its mirror reports, too.
    """
    follower = config.followers.get(each.name)
    reports = STILL_SECONDS * (2 if follower is not None and follower.mirror else 1)
    batches = 2 * each.record.batch_seconds if each.record else 0.0
    return min(LATE_SECONDS, reports + batches) + _waits(config, each.name)


def _not_fresh(config: Config, each: FollowerStatus, lag: float) -> tuple[str, str, int] | None:
    """Return that views of it are later than they say that they may be."""
    found = [] if each.is_archive else freshness(config, each.name)
    late = [f"{view} ({limit:g} s)" for view, limit in found if lag > limit]
    if not late:
        return None
    what = f"{each.name} is {duration(lag)} late, later than freshness_seconds of {listed(late)}"
    return what, "see what its cuts take (`cdc view explain`), or allow a longer time", Exit.OK


def _silence(config: Config, each: FollowerStatus) -> tuple[str, str, int] | None:
    """Return that canaries should have been applied since its job started, and were not."""
    # A canary that was applied before the job started counts from the job's start.
    ages = [age for age in (each.canary_age_seconds, each.job_seconds) if age is not None]
    silent, each_seconds = min(ages, default=0.0), config.canary_seconds
    if not each_seconds or silent <= LATE_SECONDS + 2 * each_seconds + _waits(config, each.name):
        return None
    what = f"{each.name}: it has applied no canary for {silent:.0f} s"
    return what, "check that the daemon runs, and its warnings: cdc status", Exit.OK


def _waits(config: Config, name: str) -> float:
    """Return how long a follower may wait by its settings, including its mirror's."""
    if name == ARCHIVE:
        return 2 * config.archive.every_seconds
    return 2 * longest_wait(config, name)


def monitored(
    config: Config, reader: FollowersReader, wal_end: Callable[[], LSN | None]
) -> Monitor[list[FollowerStatus]]:
    """Read again and again.

    Also where the configuration names none: some may be added while this process runs.
    """
    expected = bool(_reporting(config))
    seconds = REPORT_SECONDS if expected else SILENT_SECONDS
    return Monitor(
        "followers", seconds, reader, lambda: reader.read(wal_end()), [], expected=expected
    )
