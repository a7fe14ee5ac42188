"""What went wrong or was decided, with cause and time, from one measurement to the next. Pure.

What the daemon itself noted since it started is taken as it is; the rest is seen from here: an
interruption between two measurements that left no trace is not. The newest `_KEPT` are in memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.operate.findings import Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.operate.followers import FollowerStatus
    from cdc.operate.status import Status

_KEPT: Final = 200


class Incident(NamedTuple):
    """One incident; `what` names its cause as far as it is known."""

    at_us: int
    kind: str
    what: str


class Incidents:
    """The newest incidents, each once."""

    def __init__(self) -> None:
        self._found = dict[Incident, None]()
        self._before: Status | None = None

    def add(self, status: Status) -> None:
        """Take the next measurement."""
        before, self._before = self._before, status
        for each in (*_of_daemon(status), *_of_snapshots(status), *_changes(before, status)):
            self._found[each] = None
        newest = sorted(self._found, key=lambda each: each.at_us)[-_KEPT:]
        self._found = dict.fromkeys(newest)

    def listed(self) -> list[dict[str, Any]]:
        """Return them, the newest first."""
        return [each._asdict() for each in reversed(self._found)]


def _of_daemon(status: Status) -> Iterator[Incident]:
    for each in (status.daemon or {}).get("incidents") or ():
        yield Incident(int(each["at_us"]), str(each["kind"]), str(each["what"]))


def _of_snapshots(status: Status) -> Iterator[Incident]:
    """Yield tables that were read again: their records are in the log, with their times."""
    for each in status.incremental_snapshots:
        why = f": {each.why}" if each.why else ""
        yield Incident(each.began_at_us, "snapshot", f"{each.name} is read again ({each.id})")
        if not each.active:
            yield Incident(each.at_us, "snapshot", f"{each.id} of {each.name} {each.state}{why}")


def _changes(before: Status | None, after: Status) -> Iterator[Incident]:
    """Yield what is different since the previous measurement."""
    now_us = time.time_ns() // 1_000
    was = before.verdict.level if before else Level.OK
    if after.verdict.level is not was:
        yield Incident(now_us, "verdict", after.verdict.sentence)
    if before is None:
        return
    if before.resume and after.resume:
        old, new = before.resume[0], after.resume[0]
        if new.epoch != old.epoch:
            yield Incident(now_us, "log", f"a new epoch of the log: {new.epoch}")
        if new.timeline != old.timeline:
            yield Incident(now_us, "failover", f"the source is on timeline {new.timeline}")
        previous_owner, owner = before.resume[1].owner, after.resume[1].owner
        if owner != previous_owner and _is_daemon(previous_owner) and _is_daemon(owner):
            yield Incident(now_us, "fencing", f"another daemon writes to the log: {owner}")
    known = {each.name for each in before.incomplete_topics}
    for topic in after.incomplete_topics:
        if topic.name not in known:
            yield Incident(now_us, "gap", topic.what)
    previous = {each.name: each for each in before.followers}
    for follower in after.followers:
        yield from _of_follower(now_us, previous.get(follower.name), follower)


def _is_daemon(owner: str) -> bool:
    """Return whether a daemon wrote the record, and not `cdc setup` or an initial snapshot."""
    return not owner.endswith((":setup", ":snapshot"))


def _of_follower(
    now_us: int, was: FollowerStatus | None, now: FollowerStatus
) -> Iterator[Incident]:
    if was is None or was.record is None or now.record is None:
        return
    if was.record.generation not in {0, now.record.generation}:  # 0: not built yet
        what = f"{now.name}'s store was built again, as generation {now.record.generation}"
        yield Incident(now_us, "rebuild", what)
    if now.state != was.state and now.state in {"halted", "not_running", "rebuilding", "waiting"}:
        why = f": {now.record.what}" if now.record.what else ""
        yield Incident(now_us, "follower", f"{now.name} is {now.state.replace('_', ' ')}{why}")
