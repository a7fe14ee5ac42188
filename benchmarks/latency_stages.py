"""Where a latency comes from: the stages of each change, and what happened during the slow ones.

Computed from the trace of a daemon (benchmarks.traced_daemon) and from the changes as a reader of
the log saw them. Pure: a trace and journeys in, tables out. The stages of a change add up to its
latency, because each starts where the previous one ends; the last one ends at the reader.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.arrivals import percentiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.arrivals import Journey

# In order; each is the time from the end of the previous stage to its own end.
STAGES: Final = {
    "received": "committed (before the flush) until the loop reads it off the socket",
    "sequenced": "until it is sequenced and encoded",
    "batch before": "until the batch before it is acknowledged: records of two must not mix",
    "handed over": "until the loop has noticed, and handed it to the producer",
    "acknowledged": "partitions added, records sent, verified and acknowledged",
    "turn": "until the commit before it has ended",
    "committed": "until its EndTxn is answered",
    "visible": "markers written, fetched, handed to the reader",
}
# The quantiles of the slow changes, and of the middle ones that they are compared with.
_SLOW: Final = 0.99
_MIDDLE: Final = (0.4, 0.6)
_US_PER_MS: Final = 1e3
# Indexes into a batch's moments.
_HANDED_OVER, _ACKNOWLEDGED, _IN_TURN, _ANSWERED = 1, 2, 3, 4


class Staged(NamedTuple):
    """One change: its stages in microseconds, when it started and ended, and its batch."""

    latency_us: int
    stages_us: tuple[int, ...]
    committed_us: int
    arrived_us: int
    batch: dict[str, Any]


@dataclass(frozen=True)
class ThreadSample:
    """Milliseconds that the threads of each process ran and waited in a tenth of a second."""

    from_us: int
    to_us: int
    ran_ms: dict[str, float]
    waited_ms: dict[str, float]


def staged(journeys: Sequence[Journey], trace: dict[str, Any]) -> list[Staged]:
    """Return the stages of each change; the trace must contain all of them."""
    received, batches = trace["received"], trace["batches"]
    read_seqs = [seq for seq, _, _ in received]
    batch_seqs = [batch["seq"] for batch in batches]
    found = []
    for journey in journeys:
        _, began_us, ended_us = received[bisect_left(read_seqs, journey.seq)]
        at = bisect_left(batch_seqs, journey.seq)
        batch = batches[at]
        moments = batch["moments_us"]
        before_us = batches[at - 1]["moments_us"][_ACKNOWLEDGED] if at else 0
        # The worker may have recorded the moment just after the loop acted on it.
        free_us = min(max(ended_us, before_us), moments[_HANDED_OVER])
        passed = (
            *(journey.committed_us, began_us, ended_us, free_us),
            *(moments[place] for place in (_HANDED_OVER, _ACKNOWLEDGED, _IN_TURN, _ANSWERED)),
            journey.arrived_us,
        )
        stages = tuple(after - before for before, after in pairwise(passed))
        latency_us = journey.arrived_us - journey.committed_us
        found.append(Staged(latency_us, stages, journey.committed_us, journey.arrived_us, batch))
    return found


def table(changes: Sequence[Staged]) -> dict[str, dict[str, Any]]:
    """Return each stage's percentiles, histogram, and share of the slow changes' extra time."""
    ordered = sorted(changes)
    slow = ordered[int(len(ordered) * _SLOW) :]
    middle = ordered[int(len(ordered) * _MIDDLE[0]) : int(len(ordered) * _MIDDLE[1]) + 1]
    more_ms = _mean(each.latency_us for each in slow) - _mean(each.latency_us for each in middle)
    found = {}
    for place, stage in enumerate(STAGES):
        shown = percentiles([each.stages_us[place] / _US_PER_MS for each in changes])
        means = [_mean(each.stages_us[place] for each in some) for some in (changes, middle, slow)]
        found[stage] = {
            "mean_ms": means[0],
            "p50_ms": shown.p50_ms,
            "p99_ms": shown.p99_ms,
            "middle_mean_ms": means[1],
            "slow_mean_ms": means[2],
            "of_what_slow_take_more": round((means[2] - means[1]) / more_ms, 3) if more_ms else 0,
            "histogram": shown.histogram,
        }
    return found


def causes(
    changes: Sequence[Staged], trace: dict[str, Any], windows: Sequence[ThreadSample]
) -> dict[str, dict[str, float]]:
    """Return what happened during the slow changes and during all; a cause shows as a difference.

    Times are milliseconds between commit and arrival; waits are summed over all threads of a
    process.
    """
    ordered = sorted(changes)
    slow = ordered[int(len(ordered) * _SLOW) :]

    def both(of: Callable[[Staged], float]) -> dict[str, float]:
        return {
            name: round(sum(map(of, some)) / len(some), 3)
            for name, some in (("all", changes), ("slow", slow))
        }

    found = {
        "events of its batch": both(lambda each: each.batch["events"]),
        "partitions of its batch": both(lambda each: each.batch["partitions"]),
        "batches with a frontier record": both(lambda each: float(each.batch["frontier"])),
    }
    for name in sorted({name for name, _, _ in trace["spans"]}):
        spans = [(began, ended) for kind, began, ended in trace["spans"] if kind == name]
        found[f"ms of {name}"] = both(_overlap(spans))
    for name in windows[0].waited_ms if windows else ():
        found[f"ms of {name} waiting for a core"] = both(_waits(windows, name))
    return found


def _overlap(spans: list[tuple[int, int]]) -> Callable[[Staged], float]:
    """Return a function: how many milliseconds of a change's latency overlap the spans."""
    spans = sorted(spans)
    begins = [began for began, _ in spans]
    longest = max((ended - began for began, ended in spans), default=0)

    def of(change: Staged) -> float:
        first = bisect_left(begins, change.committed_us - longest)
        last = bisect_left(begins, change.arrived_us)
        return sum(
            max(0, min(ended, change.arrived_us) - max(began, change.committed_us)) / _US_PER_MS
            for began, ended in spans[first:last]
        )

    return of


def _waits(windows: Sequence[ThreadSample], name: str) -> Callable[[Staged], float]:
    """Return a function: the share of the waits in the windows that a change's latency overlaps."""
    ends = [window.to_us for window in windows]

    def of(change: Staged) -> float:
        total = 0.0
        for window in windows[bisect_left(ends, change.committed_us) :]:
            if window.from_us >= change.arrived_us:
                break
            inside = min(window.to_us, change.arrived_us) - max(window.from_us, change.committed_us)
            total += window.waited_ms[name] * inside / (window.to_us - window.from_us)
        return total

    return of


def requests(trace: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the round trips of each kind of request, where they were logged."""
    found = {}
    for kind, milliseconds in trace["requests_ms"].items():
        shown = percentiles(milliseconds)
        found[kind] = {
            "a_batch": round(len(milliseconds) / max(1, len(trace["batches"])), 2),
            "p50_ms": shown.p50_ms,
            "p99_ms": shown.p99_ms,
            "max_ms": shown.max_ms,
        }
    return found


def windows(lines: Sequence[dict[str, Any]]) -> list[ThreadSample]:
    """Return the windows between the lines that `benchmarks.scheduling` wrote."""
    return [
        ThreadSample(
            before["at_us"],
            after["at_us"],
            *(
                {name: its[place] for name, its in after.items() if name != "at_us"}
                for place in (0, 1)
            ),
        )
        for before, after in pairwise(lines)
    ]


def _mean(values_us: Iterable[int]) -> float:
    values = list(values_us)
    return round(sum(values) / len(values) / _US_PER_MS, 3) if values else 0.0
