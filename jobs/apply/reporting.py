"""The output of a followers' job: a line when a follower's state changes, and one at an interval.

Readable lines on standard error, or one JSON object per line on standard output. They show that the
job starts, where each follower continues, and how far each is.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import click

from cdc.runtime.uptime import started_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.jobs.apply.running import FollowerRun

# Seconds between a follower's lines.
LINE_SECONDS: Final = 30.0
# Seconds between checks for a changed state, which is printed at once.
_POLL_SECONDS: Final = 0.5
_LATE_SECONDS: Final = 10.0


class Lines:
    """Prints lines; `as_json` as objects."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, what: str, **fields: Any) -> None:  # noqa: ANN401 - whatever JSON has
        """Print one line; as JSON also the `fields`."""
        if self._as_json:
            click.echo(json.dumps({"at": time.time(), "what": what, **fields}))
            sys.stdout.flush()
        else:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            click.echo(f"{stamp} {what}", file=sys.stderr)
            sys.stderr.flush()


class ProgressPrinter:
    """Prints the followers' progress, in a separate thread, until `close`."""

    def __init__(
        self, runs: Sequence[FollowerRun], lines: Lines, seconds: float = LINE_SECONDS
    ) -> None:
        self._runs, self._lines, self._seconds = runs, lines, seconds
        self._printed: dict[str, str] = {}
        self._current: set[str] = set()  # the followers whose start was printed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Print how each follower ended, and stop."""
        self._over.set()
        self._thread.join()
        for run in self._runs:
            self._lines.say(line(run), **fields(run))

    def _run(self) -> None:
        next_at = time.monotonic() + self._seconds
        while not self._over.wait(_POLL_SECONDS):
            is_due = time.monotonic() >= next_at
            for run in self._runs:
                if is_due or self._printed.get(run.name) != run.state:
                    self._printed[run.name] = run.state
                    self._lines.say(line(run), **fields(run))
                if run.name not in self._current and (took := start(run)):
                    self._current.add(run.name)
                    self._lines.say(start_line(run, took), follower=run.name, start_seconds=took)
            if is_due:
                next_at = time.monotonic() + self._seconds


def fields(run: FollowerRun) -> dict[str, Any]:
    """Return a follower's progress, for a program."""
    at, error = run.applied, run.error
    return {
        "follower": run.name,
        "state": run.state,
        "generation": at.generation if at else None,
        "lsn": str(at.lsn) if at else None,
        "seq": at.seq if at else None,
        "lag_seconds": lag(run),
        "events": run.progress.events,
        "events_per_second": run.progress.events_per_second,
        "error": error.what if error else "",
        "hint": error.hint if error else "",
    }


def start(run: FollowerRun) -> dict[str, float] | None:
    """Return the seconds that each part of the start took; None until the follower caught up.

    `imports` is all that was before its first session; a standby's start is when it took over.
    """
    at = run.progress.reached
    if "caught up" not in at:
        return None
    began = at["started"] if run.is_standby else started_at()
    opened = at.get("opened", at["started"])
    parts = {
        "imports": at["started"] - began,
        "opening": opened - at["started"],
        "catching_up": at["caught up"] - opened,
    }
    return {name: round(seconds, 1) for name, seconds in parts.items()}


def start_line(run: FollowerRun, took: dict[str, float]) -> str:
    """Return how long the follower's start took, for a person."""
    parts = ", ".join(f"{name.replace('_', ' ')} {took[name]:.1f}" for name in took)
    after = "it took over" if run.is_standby else "the start"
    return f"{run.name}: caught up {sum(took.values()):.1f} s after {after}: {parts}"


def lag(run: FollowerRun) -> float | None:
    """Return the age in seconds of the newest change or canary that this job applied."""
    newest = max(run.applied.committed_at_us if run.applied else 0, run.progress.canary_at_us or 0)
    return round(max(0.0, time.time() - newest / 1e6), 1) if newest else None


def line(run: FollowerRun) -> str:
    """Return a follower's progress, for a person."""
    at = f"at {run.applied.lsn}, seq {run.applied.seq}" if run.applied else "not opened yet"
    text = f"{run.name}: {run.state.replace('_', ' ')}, {at}"
    if run.error is not None:
        return f"{text}: {run.error.what}"
    if run.state in {"following", "catching_up"}:
        seconds = lag(run)
        late = "" if seconds is None or seconds < _LATE_SECONDS else f", a lag of {seconds:.0f} s"
        text += f"{late}; {run.progress.events:,} events, {run.progress.events_per_second:g}/s"
    return text
