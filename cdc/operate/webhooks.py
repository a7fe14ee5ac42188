"""How webhooks are, by their processes' reports, the log, and Kafka's answers, running or not.

`cdc status` reads this once, the console and the daemon again and again with the same connections.
A webhook's failure does not affect the daemon, which does not run it: it stays ready.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.errors import Exit, UnreadableError
from cdc.log import group_states, topics
from cdc.log.consumer import LogConsumer
from cdc.log.group_records import GroupReadings, WebhookReport, webhook_group
from cdc.operate.findings import Cause, Level
from cdc.operate.followers import LATE_SECONDS, STALLED_SECONDS, STILL_SECONDS
from cdc.operate.readable import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config import Config
    from cdc.log.group_states import GroupState
    from cdc.log.partitions import OffsetRange, Partition


STATES: Final = (
    *("new", "gap", "halted", "retrying", "not_running", "silent", "away", "delivering"),
)


class WebhookStatus(NamedTuple):
    """A webhook at one moment; what is not known is None."""

    name: str
    group: GroupState | None  # None: it has never run
    undelivered: int = 0  # events that it gave up and nobody has decided on
    reports: tuple[WebhookReport, ...] = ()  # of each process, the newest first
    since_us: int | None = None  # when the log took the oldest event that is not acknowledged

    @property
    def running(self) -> list[WebhookReport]:
        """The reports of the processes that run it."""
        return [each for each in self.reports if each.runs]

    @property
    def state(self) -> str:
        if self.group is None:
            return "new"
        if self.group.gap:
            return "gap"
        if self.retrying:
            return "retrying"
        if not self.group.members:
            halted = self.reports and self.reports[0].state == "halted"
            return "halted" if halted else "not_running"
        if not self.running:
            return "silent"
        return "away" if self.away else "delivering"

    @property
    def away(self) -> WebhookReport | None:
        """The report that its receiver does not answer."""
        return next((each for each in self.running if each.state == "away"), None)

    @property
    def retrying(self) -> WebhookReport | None:
        """The report that it starts again and again, after an error that may pass."""
        return next((each for each in self.running if each.failed_since_us is not None), None)

    @property
    def failing(self) -> int:
        """How many keys its receiver refuses."""
        return sum(each.failing for each in self.running)

    @property
    def lag_seconds(self) -> float | None:
        """How long the log has held what is not acknowledged; 0 where all is."""
        if self.group is None:
            return None
        if not self.group.lag:
            return 0.0
        return _ago(self.since_us)

    @property
    def stalled_seconds(self) -> float:
        """How long it has delivered and given up nothing, although the log has more for it.

        Or how long it has started again after errors, whatever it delivered in between.
        """
        if self.retrying:
            return _ago(self.retrying.failed_since_us) or 0.0
        # One that has nothing to deliver moves all the time.
        holding = [each for each in self.running if each.held] or self.running
        moved = [_ago(each.moved_at_us) or 0.0 for each in holding]
        return min([*moved, self.lag_seconds or 0.0])

    @property
    def command(self) -> str:
        """The command that follows, or ""."""
        if self.state == "gap":
            return f"cdc group seek {webhook_group(self.name)} --to PLACE"
        if self.state in {"new", "halted", "not_running"}:
            return f"cdc webhook run {self.name}"
        return f"cdc webhook undelivered {self.name}" if self.undelivered else ""

    def fields(self) -> dict[str, Any]:
        group, away, lag = self.group, self.away, self.lag_seconds
        return {
            "name": self.name,
            "state": self.state,
            "members": group.members if group else 0,
            "lag": group.lag if group else None,
            "lag_seconds": None if lag is None else round(lag, 3),
            "undelivered": self.undelivered,
            "failing": self.failing,
            "away_seconds": away and round(_ago(away.since_us) or 0.0, 3),
            "what": next((each.what for each in self.reports if each.what), ""),
            "command": self.command,
        }


def _ago(at_us: int | None) -> float | None:
    return None if at_us is None else max(0.0, time.time() - at_us / 1e6)


class WebhooksReader:
    """Reads the state of a configuration's webhooks, until `close`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._admin = topics.admin(config)
        self._readings = GroupReadings(config)
        self._log: LogConsumer | None = None

    def read(self) -> list[WebhookStatus]:
        if not self._config.webhooks:
            return []
        self._readings.read_new()
        return [self._status(name) for name in self._config.webhooks]

    def _status(self, name: str) -> WebhookStatus:
        record = self._readings.groups.get(webhook_group(name))
        given_up = self._readings.undelivered_of(webhook_group(name))
        group = group_states.state(self._admin, self._config, record) if record else None
        return WebhookStatus(
            name,
            group,
            sum(each.state == "undelivered" for each in given_up),
            tuple(self._readings.reports_of(name)),
            self._oldest_us(group.unacknowledged) if group else None,
        )

    def _oldest_us(self, ranges: dict[Partition, OffsetRange]) -> int | None:
        """Return when the log took the first record of the ranges; None if there is none.

        And if it can't be read: the webhook itself says so.
        """
        if not ranges:
            return None
        if self._log is None:
            self._log = LogConsumer(self._config, skip_deleted=True)
        try:
            return self._log.oldest_us(ranges)
        except UnreadableError:
            return None

    def close(self) -> None:
        """Close the connections."""
        self._readings.close()
        if self._log is not None:
            self._log.close()


def judge(statuses: Sequence[WebhookStatus]) -> Iterator[Cause]:
    """Yield what is wrong with webhooks; nothing for those that deliver everything."""
    for each in statuses:
        yield from _troubles(each)
        if each.undelivered:
            what = f"the webhook {each.name} has given up {each.undelivered} events"
            remedy = (
                f"`cdc webhook undelivered {each.name}` lists them; `cdc webhook send` or `discard`"
            )
            yield _cause(each, Level.FAILED, what, remedy)


def _cause(
    each: WebhookStatus, level: Level, what: str, remedy: str, since: float | None = None
) -> Cause:
    return Cause(level, "webhook", what, remedy, since, subject=each.name)


def _troubles(each: WebhookStatus) -> Iterator[Cause]:
    """Yield what keeps a webhook from delivering, or some of it."""
    name, group = each.name, each.group
    run = f"cdc webhook run {name}"
    if group is None:
        yield _cause(each, Level.FAILED, f"the webhook {name} has never run", run)
        return
    if group.gap:
        what, remedy = f"the webhook {name} cannot go on: {group.gap}", f"{each.command} decides"
        yield _cause(each, Level.FAILED, what, remedy)._replace(exit_code=Exit.CONFIG)
        return
    if each.state == "halted":
        what, remedy = (
            f"the webhook {name} has halted: {each.reports[0].what}",
            each.reports[0].hint,
        )
        since = _ago(each.reports[0].since_us)
        yield _cause(each, Level.FAILED, what, f"{remedy}; then {run}", since)._replace(
            exit_code=Exit.CONFIG
        )
        return
    if each.retrying:
        since = each.stalled_seconds
        level = Level.FAILED if since > STALLED_SECONDS else Level.DEGRADED
        what = f"the webhook {name} starts again: {each.retrying.what}"
        yield _cause(each, level, what, each.retrying.hint, since)
        return
    if not group.members:
        what = f"the webhook {name} does not run, {group.lag:,} offsets are not acknowledged"
        yield _cause(each, Level.FAILED, what, run, each.lag_seconds or None)
        return
    yield from _silent(each) if not each.running else _delivering(each)


def _silent(each: WebhookStatus) -> Iterator[Cause]:
    """Yield that Kafka has members of its group, and none of them reports."""
    # If none has ever reported: as long as it has delivered nothing.
    since = each.reports[0].age_seconds if each.reports else each.lag_seconds
    level = Level.FAILED if (since or 0.0) > STALLED_SECONDS else Level.DEGRADED
    what = (
        f"the webhook {each.name} has {each.group and each.group.members} members, and none reports"
    )
    yield _cause(each, level, what, "it may have just started; else see its log", since)


def _delivering(each: WebhookStatus) -> Iterator[Cause]:
    """Yield what keeps a webhook that runs from delivering, or some of it."""
    name, away, stalled = each.name, each.away, each.stalled_seconds
    failed = Level.FAILED if stalled > STALLED_SECONDS else Level.DEGRADED
    if away is not None:
        since = _ago(away.since_us) or 0.0
        what = f"the receiver of the webhook {name} is away: {away.what}"
        remedy = "see that it runs, and its log; it is tried again by itself, and nothing is lost"
        level = Level.FAILED if since > STALLED_SECONDS else Level.DEGRADED
        yield _cause(each, level, what, remedy, since)
    elif each.failing:
        why = next((report.what for report in each.running if report.failing), "")
        what = f"the receiver of the webhook {name} refuses {each.failing} keys: {why}"
        remedy = (
            "see the receiver's log; they are tried again by themselves until they are given up"
        )
        yield _cause(each, failed, what, remedy, stalled or None)
    elif (lag := each.lag_seconds or 0.0) > LATE_SECONDS or stalled > STILL_SECONDS:
        what = f"the webhook {name} lags: the log has held for {duration(lag)} what it lacks"
        remedy = "check that this falls; more `connections`, or `cdc webhook run` on another host"
        if failed is Level.FAILED:
            what = f"the webhook {name} has delivered nothing for {duration(stalled)}"
            remedy = f"see its log; stop it, and {each.command or 'cdc webhook run ' + name}"
        yield _cause(each, failed, what, remedy, stalled or None)
