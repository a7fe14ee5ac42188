"""Make followers' stores hold the views that are declared, and no others.

A follower's own copy does it if one runs, since two with different configurations would undo each
other's work: it is started again to build, and asked to delete a view or to compute it again.
Otherwise a copy in this process does it, for as many cuts as it takes.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from functools import cache, partial
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import uuid4

from cdc.cli.options import print_waiting
from cdc.errors import Exit, LagError, StoreLostError
from cdc.events import LSN
from cdc.log import follower_reports, view_requests
from cdc.log.follower_reports import Reports
from lockstep.jobs.apply import stores
from lockstep.jobs.apply.following_views import ViewDropping, ViewsFollowing
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.documents.mirror_cuts import LogVersions
from lockstep.jobs.following_stores import run_all
from lockstep.jobs.spark.session import with_jars
from lockstep.jobs.views import definitions
from lockstep.jobs.views.planning import ViewStep, plans_of, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cdc.config import Config
    from lockstep.jobs.views.definitions import Definition
    from lockstep.sinks.contract import Applied, Sink

T = TypeVar("T")
_POLL_SECONDS: Final = 0.5
_REPORT_SECONDS: Final = 5.0
_NEWEST: Final = LSN((1 << 64) - 1)
_DUE: Final = {"new", "changed"}


def planned(config: Config) -> list[ViewStep]:
    """Return what there is to do, for each view and follower."""
    named = [name for name, each in config.followers.items() if each.views]
    plans = plans_of(config, LogVersions(config)(_NEWEST))
    return steps(config, plans, {name: stored(config, name) for name in named})


def stored(config: Config, follower: str) -> dict[str, Definition]:
    """Return the definitions in a follower's store; none if it is new, or lost."""
    views = config.followers[follower].views

    def read(sink: Sink, applied: Applied) -> dict[str, Definition]:
        found = definitions.listed(sink, views)
        return {name: each.seen_at(applied.seq) for name, each in found.items()}

    return _read(config, follower, read) or {}


def _read(config: Config, follower: str, read: Callable[[Sink, Applied], T]) -> T | None:
    """Return what `read` finds in a store and its frontier; None if it is new, or lost."""
    with closing(stores.sink(config, follower, config.followers[follower])) as sink:
        try:
            state = None if sink.current() is None else sink.open()
            return state and read(sink, state.applied)
        except StoreLostError:
            return None


class Patience:
    """A command's patience: until when it waits, and how often it reports for what."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._reported_at: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def expect(self, what: str, hint: str) -> None:
        """Raise LagError if it is over."""
        if self.is_over:
            raise LagError(f"{what} in time", hint=f"{hint}; then run this again")

    def report(self, about: str, line: str) -> None:
        """Print what is waited for, unless that was done about the same a moment ago."""
        now = time.monotonic()
        if now >= self._reported_at.get(about, 0.0) + _REPORT_SECONDS:
            self._reported_at[about] = now
            print_waiting(line)


def build(config: Config, waiting: Patience) -> None:
    """Return once each follower's store has its views by their declared definitions."""
    while due := _due(config):
        free = _free(
            config,
            due,
            waiting,
            "it builds {} when its job is started again with this configuration",
        )
        waiting.expect(
            "; ".join(f"{name} has not built {', '.join(views)}" for name, views in due.items()),
            "a follower's job must run with this configuration, or not at all, and its mirror's job"
            " must run (`cdc follow`, `cdc status`)",
        )
        made = {name: partial(ViewsFollowing, once=True) for name in free}
        _run(config, made, waiting, "builds")


def _due(config: Config) -> dict[str, list[str]]:
    """Return the views that are to be built, by follower."""
    found: dict[str, list[str]] = {}
    for each in planned(config):
        if each.state in _DUE:
            found.setdefault(each.follower, []).append(each.view)
    return found


def drop(config: Config, followers: Iterable[str], view: str, waiting: Patience) -> set[str]:
    """Delete the rows of a view from followers' stores; return those that had it."""
    left, had = list(followers), set[str]()
    asking = _Asking(config, view, waiting)
    while due := _holding(config, left, view):
        left = list(due)
        had |= due.keys()
        free = asking.free(due, "its job is asked to delete {} in its next cuts")
        asking.expect(due, "deleted it")
        asking.ask(due.keys() - set(free), drop=view)
        made = {name: partial(ViewDropping, dropped=(view, due[name])) for name in free}
        _run(config, made, waiting, "deletes")
    return had


def rebuild(config: Config, followers: Iterable[str], view: str, waiting: Patience) -> None:
    """Return once each of these stores has a view's rows as computed again, from here on."""
    request, left = uuid4().hex, list(followers)
    asking = _Asking(config, view, waiting)
    while left := [name for name in left if not _has_answered(config, name, view, request)]:
        free = asking.free(left, "its job is asked to compute {} again in its next cuts")
        asking.expect(left, "computed it again")
        asking.ask(set(left) - set(free), rebuild=view, request=request)
        made = {name: partial(ViewsFollowing, once=True, rebuild=(view, request)) for name in free}
        _run(config, made, waiting, "computes")


class _Asking:
    """Asks followers' jobs that run to change a view in their stores, again and again.

    A job may start at any time, and obeys nothing older.
    """

    def __init__(self, config: Config, view: str, waiting: Patience) -> None:
        self._config, self._view, self._waiting = config, view, waiting
        self._reports = cache(partial(Reports, config))

    def free(self, followers: Iterable[str], what: str) -> list[str]:
        """Return the followers of which no copy runs; report what others are asked for."""
        return _free(self._config, {name: [self._view] for name in followers}, self._waiting, what)

    def expect(self, followers: Iterable[str], what: str) -> None:
        """Raise LagError if these have not done it in time."""
        self._waiting.expect(
            f"view {self._view}: {', '.join(followers)} has not {what}",
            "its mirror's job must run, and its own, if it runs, must hold the view and reach later"
            " frontiers (`cdc status`); one that does not is to be stopped",
        )

    def ask(self, followers: Iterable[str], **what: str) -> None:
        """Make a request to each of these."""
        for name in followers:
            self._reports().send(view_requests.key(self._config, name, **what), None)


def _has_answered(config: Config, follower: str, view: str, request: str) -> bool:
    """Return whether a store's frontier has the rows that were computed for a request."""

    def read(sink: Sink, applied: Applied) -> bool:
        found = definitions.stored(sink, [view]).get(view)
        return found is not None and found.has_answered(request, applied.seq)

    return _read(config, follower, read) or False


def _holding(config: Config, followers: Iterable[str], view: str) -> dict[str, Definition]:
    """Return the definition of a view in each of these stores that has it."""
    found = ((name, stored(config, name).get(view)) for name in followers)
    return {name: definition for name, definition in found if definition is not None}


def _free(
    config: Config, due: Mapping[str, Sequence[str]], waiting: Patience, what: str
) -> list[str]:
    """Return the followers of which no copy runs elsewhere; report what to do about the others."""
    records, free = follower_reports.read(config), []
    for name, views in due.items():
        record = records.get(name)
        if record is None or not record.runs:
            free.append(name)
        else:
            at = f"; its store is at {record.lsn}{record.what and f' ({record.what})'}"
            asked = what.format(", ".join(views))
            waiting.report(name, f"{name} runs ({record.owner}): {asked}{at}")
    return free


def _run(
    config: Config, made: Mapping[str, Callable[..., ViewsFollowing]], waiting: Patience, what: str
) -> None:
    """Run a session of each follower until all have ended, or the time is over."""
    if not made:
        time.sleep(_POLL_SECONDS)
    sessions = {name: _session(config, name, each) for name, each in made.items()}
    runs, stop = [_run_of(config, *each) for each in sessions.items()], threading.Event()
    thread = threading.Thread(target=run_all, args=(runs, stop))
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if waiting.is_over:
            stop.set()
        for run in runs:
            at = f"; its store is at {run.applied.lsn}" if run.applied else ""
            why = f" ({run.error.what})" if run.error else ""
            waiting.report(run.name, f"{run.name} {what} with the next frontier{at}{why}")
    for run in runs:
        if run.exit is not Exit.OK and run.error is not None:
            raise run.error


def _session(config: Config, name: str, made: Callable[..., ViewsFollowing]) -> ViewsFollowing:
    sink = stores.sink(config, name, config.followers[name])
    return made(
        config, name, sink, spark=partial(with_jars, f"lockstep views of {config.pipeline}")
    )


def _run_of(config: Config, name: str, session: ViewsFollowing) -> FollowerRun:
    return FollowerRun(config, name, stores.kind(config.followers[name]), session)
