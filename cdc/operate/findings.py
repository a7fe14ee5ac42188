"""The doctor's findings: the result of each check, its severity, and the exact fix."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Severity(Enum):
    """The severity of a finding."""

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
        return {
            "check": self.check,
            "severity": self.severity.value,
            "what": self.what,
            "fix": self.fix,
        }


def ok(check: str, what: str) -> Finding:
    return Finding(check, Severity.OK, what)


def note(check: str, what: str, fix: str = "") -> Finding:
    return Finding(check, Severity.NOTE, what, fix)


def warning(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Severity.WARNING, what, fix)


def error(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Severity.ERROR, what, fix)


def worst(findings: list[Finding]) -> Severity:
    """Return the worst severity among `findings`."""
    order = list(Severity)
    return max((each.severity for each in findings), key=order.index, default=Severity.OK)


def size(count: float) -> str:
    """Return a number of bytes in readable form: `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:  # noqa: PLR2004 - the step between the units
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def listed(names: list[str], limit: int = 8) -> str:
    """Return `names` separated by commas, at most `limit` of them."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
