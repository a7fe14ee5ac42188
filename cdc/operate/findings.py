"""Findings of checks, with the exact fix, and causes of a verdict, with the remedy."""

from __future__ import annotations

import time
from enum import Enum
from typing import Any, NamedTuple

from cdc.errors import Exit
from cdc.operate.readable import moment


class Severity(Enum):
    OK = "ok"
    NOTE = "note"  # for information; nothing is wrong
    WARNING = "warning"  # works, but will fail some day
    ERROR = "error"  # does not work, or loses changes


class Finding(NamedTuple):
    """The outcome of one check. `fix` is SQL or a command, ready to paste; empty when ok."""

    check: str  # what was checked, such as `wal_level`
    severity: Severity
    what: str
    fix: str = ""

    def fields(self) -> dict[str, str]:
        return {**self._asdict(), "severity": self.severity.value}


def ok(check: str, what: str) -> Finding:
    return Finding(check, Severity.OK, what)


def note(check: str, what: str, fix: str = "") -> Finding:
    return Finding(check, Severity.NOTE, what, fix)


def warning(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Severity.WARNING, what, fix)


def error(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Severity.ERROR, what, fix)


def worst(findings: list[Finding]) -> Severity:
    order = list(Severity)
    return max((each.severity for each in findings), key=order.index, default=Severity.OK)


class Level(Enum):
    """The severity of a cause, or of the verdict."""

    OK = "ok"
    DEGRADED = "degraded"  # it advances, or may recover by itself
    FAILED = "failed"  # it does not advance, or needs a person


class Cause(NamedTuple):
    """Why the verdict is not `ok`."""

    level: Level
    # server, setup, slot, daemon, snapshot, incremental_snapshot, topic, follower, webhook
    about: str
    what: str
    remedy: str
    since_seconds: float | None = None  # None: unknown
    exit_code: int = Exit.FAILED  # where the level is FAILED
    subject: str = ""  # which follower, webhook, snapshot or table

    @property
    def since(self) -> str:
        """When it began, in UTC; "" where that is not known."""
        now = time.time()
        return "" if self.since_seconds is None else moment(now - self.since_seconds, now)

    def fields(self) -> dict[str, Any]:
        seconds = None if self.since_seconds is None else round(self.since_seconds, 1)
        named = {"level": self.level.value, "since_seconds": seconds, "since": self.since}
        return {**self._asdict(), **named}
