"""Rates and lags between the parts of the pipeline, from measurements one after the other. Pure.

A rate is the difference of two measurements at least `_OVER_SECONDS` apart: LSNs for bytes, seq for
events. What one of them does not know, because a server did not answer, is None, never 0.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.console.latency import Lateness

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.operate.status import Status

# Shorter, and a rate follows single batches.
_OVER_SECONDS: Final = 10.0
_KEPT_SECONDS: Final = 3_600.0
# More than a chart of this width can show.
_CHART_POINTS: Final = 180


class Point(NamedTuple):
    """One measurement; `at` is monotonic, in seconds."""

    at: float
    wal_lsn: int | None
    log_lsn: int | None
    seq: int | None
    lag_seconds: float | None
    followers: dict[str, tuple[int, float | None]]  # seq and lag in seconds, by name
    late: Lateness  # of the events that were decoded since the previous one


class Measured:
    """The measurements of the last hour."""

    def __init__(self) -> None:
        self._points = deque[Point]()

    def add(self, point: Point) -> None:
        self._points.append(point)
        while point.at - self._points[0].at > _KEPT_SECONDS:
            self._points.popleft()

    def rates(self) -> dict[str, Any]:
        """Return bytes/s of WAL and of the log, and events/s of the log and of each follower."""
        newest = self._points[-1]
        followers = {name: self._rate(lambda p, n=name: _seq(p, n)) for name in newest.followers}
        return {
            "wal_bytes_per_second": self._rate(lambda point: point.wal_lsn),
            "log_bytes_per_second": self._rate(lambda point: point.log_lsn),
            "log_events_per_second": self._rate(lambda point: point.seq),
            "followers": followers,
        }

    def chart(self) -> dict[str, Any]:
        """Return events/s and lags of the last hour, at most `_CHART_POINTS` of each."""
        points = list(self._points)
        step = max(1, -(-len(points) // _CHART_POINTS))
        # The newest is always among them.
        chosen = points[::-1][::step][::-1]
        now = points[-1].at if points else 0.0
        pairs = list(pairwise(chosen))
        names = sorted({name for each in chosen for name in each.followers})
        late = [_late(each for each in points if a.at < each.at <= b.at) for a, b in pairs]
        hour = _late(points)
        return {
            "hour": {
                "seconds": round(now - points[0].at, 1) if points else 0.0,
                "events_per_second": _throughput(points),
                "late_p50_ms": hour.percentile(0.5),
                "late_p99_ms": hour.percentile(0.99),
            },
            "late_p50_ms": [each.percentile(0.5) for each in late],
            "late_p99_ms": [each.percentile(0.99) for each in late],
            "seconds_ago": [round(now - each.at, 1) for _, each in pairs],
            "events_per_second": [_between(a, b, a.seq, b.seq) for a, b in pairs],
            "lag_seconds": [each.lag_seconds for _, each in pairs],
            "follower_lag_seconds": {
                name: [
                    each.followers[name][1] if name in each.followers else None for _, each in pairs
                ]
                for name in names
            },
        }

    def _rate(self, value: Any) -> float | None:  # noqa: ANN401 - a function of a point
        newest = self._points[-1]
        for older in reversed(self._points):
            if newest.at - older.at >= _OVER_SECONDS:
                return _between(older, newest, value(older), value(newest))
        return None


def _late(points: Iterable[Point]) -> Lateness:
    found = Lateness()
    for each in points:
        found.update(each.late)
    return found


def _throughput(points: Iterable[Point]) -> float | None:
    """Return events a second between the first point with a known seq and the last.

    A log that was started over counts from there. None before there are two.
    """
    known = [(each.at, each.seq) for each in points if each.seq is not None]
    if len(known) < 2:  # noqa: PLR2004 - a rate is between two
        return None
    written = sum(max(0, b - a) for (_, a), (_, b) in pairwise(known))
    return round(written / (known[-1][0] - known[0][0]), 3)


def _seq(point: Point, name: str) -> int | None:
    found = point.followers.get(name)
    return None if found is None else found[0]


def _between(a: Point, b: Point, first: int | None, last: int | None) -> float | None:
    """Return the rate; None where either is unknown, or it went back: the log was started over."""
    if first is None or last is None or b.at <= a.at or last < first:
        return None
    return round((last - first) / (b.at - a.at), 3)


def point(at: float, status: Status, late: Lateness) -> Point:
    """Return what a status measured, and the feed meanwhile."""
    return Point(
        at=at,
        wal_lsn=status.server.wal_lsn if status.server else None,
        log_lsn=status.resume[1].end_lsn if status.resume else None,
        seq=status.resume[1].seq if status.resume else None,
        lag_seconds=(status.daemon or {}).get("lag_seconds"),
        followers={
            each.name: (each.record.seq, each.lag_seconds)
            for each in status.followers
            if each.record
        },
        late=late,
    )
