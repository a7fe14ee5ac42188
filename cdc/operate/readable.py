"""Sizes, times and lists of names in readable form, for findings, steps and errors."""

from __future__ import annotations

import time


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


def duration(seconds: float) -> str:
    """Return a duration in words, in one unit: `3 h`."""
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(at: float, now: float) -> str:
    """Return a time (seconds since 1970) in UTC, with its date if that is not today's."""
    is_today = time.gmtime(at)[:3] == time.gmtime(now)[:3]
    return time.strftime("%H:%M UTC" if is_today else "%Y-%m-%d %H:%M UTC", time.gmtime(at))
